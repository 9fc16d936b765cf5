"""What a step costs on a card that is not there: its operations counted by hand, and the time made of them."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from test_memory_plan import HSDP, RECOMPUTE, RESHARD, planned, run, tokens
from torch._subclasses.fake_tensor import FakeTensorMode
from toy import write_model_config
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.config import ConfigError
from trainer.planner import memory_plan, roofline
from trainer.planner.fake_step import measure
from trainer.planner.fused_norm import FusedNorm
from trainer.planner.live_storage import LiveStorages
from trainer.planner.memory_plan import MemoryPlan
from trainer.planner.operations import FUSED, Operations
from trainer.planner.roofline import (
    ATTENTION,
    AWAITED,
    COPIES,
    FROM_HOST,
    GATHER,
    MATMUL,
    MEMORY,
    ON_HOST,
    REDUCE,
    TO_HOST,
    Card,
    DeviceOperation,
    find_card,
    predict,
)
from trainer.run.compose import load_config

BF16 = "model.fsdp_config.param_dtype=bfloat16"
CARD = Card("card", 100.0, 50.0, 10.0, 1.0, 1000.0, 100.0, 10.0, 20.0, 30.0, 80.0, launch_us=0.0)


def totals(plan: MemoryPlan, kind: str) -> int:
    """Floating-point operations of a whole step."""
    number = plan.workload.num_micro_batches
    return sum(n * op.flops * roofline.repeats(op, number) for op, n in plan.operations.items() if op.kind == kind)


def test_products_of_a_step_are_those_of_the_formula(tmp_path: Path) -> None:
    """Six per matrix parameter and token, eight where all is computed again but the head and the last matrix of each
    layer, whose result nothing needs; attention over what is not masked: two products forward, five backward.
    """
    words = [*tokens(96, 64, batch=12), BF16]
    kept, again = (planned(tmp_path, 2, *words, *more) for more in ([], [RECOMPUTE]))
    assert (kept.workload.seqlens, kept.workload.num_micro_batches) == ((64, 32), 6)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    layers = sum(p.numel() for p in model.model.layers.parameters() if p.ndim == 2)
    head = model.lm_head.weight.numel()
    assert totals(kept, MATMUL) == 6 * 96 * 6 * (layers + head)
    last = sum(layer.mlp.down_proj.weight.numel() for layer in model.model.layers)
    assert totals(again, MATMUL) == 6 * 96 * (8 * layers - 2 * last + 6 * head)
    pairs = 64 * 65 // 2 + 32 * 33 // 2
    width = 4 * 16  # of all heads
    assert totals(kept, ATTENTION) == 2 * 6 * (2 + 5) * 2 * pairs * width


def counted(work: Any, **settings: Any) -> Counter[DeviceOperation]:
    live = LiveStorages()
    live.enter(0, "forward", 0)
    with live, (operations := Operations(live, (8,), **settings)):
        kept = work()
    del kept
    return operations.counts


def test_a_norm_asks_for_its_kernels_alone() -> None:
    """Zeros were filled in for the gradient of a result that has none: four kernels a layer that no card runs."""
    with FakeTensorMode():
        hidden, weight = (torch.ones(*shape, requires_grad=True) for shape in ((4, 8), (8,)))
        found = counted(lambda: torch.autograd.grad(FusedNorm.apply(hidden, weight), (hidden, weight), hidden.detach()))
    assert {(op.name, op.size_bytes): n for op, n in found.items()} == {
        ("rms_norm", 4 * (32 + 8 + 32 + 4)): 1,
        ("rms_norm_backward", 4 * (2 * 32 + 8 + 4 + 32 + 8)): 1,
    }


@pytest.mark.parametrize(
    ("work", "num_bytes"),
    [
        (lambda a, b: a + b, 3 * 400),
        (lambda a, b: a.add_(b), 3 * 400),
        (lambda a, b: a.copy_(b), 2 * 400),
        (lambda a, b: a + b[:1].expand(10, 10), 400 + 40 + 400),
        (lambda a, b: a[torch.tensor([1, 1])], 2 * 80),
        (lambda a, b: a.view(100).t(), 0),
        (lambda a, b: torch._foreach_add_([a, b], 1.0), 4 * 400),
        (lambda a, b: torch._foreach_copy_([a], [b]), 2 * 400),
        (lambda a, b: torch.ops.fsdp.chunk_cat([a, b], 0, 2, out=torch.empty(2, 100)), 4 * 400),
    ],
)
def test_bytes_read_and_written(work: Any, num_bytes: int) -> None:
    a, b = torch.zeros(2, 10, 10)
    found = counted(lambda: work(a.clone(), b.clone()))
    assert sum(op.size_bytes * n for op, n in found.items() if op.name not in ("clone", "lift_fresh_copy")) == num_bytes


def test_a_compiler_fuses_what_lies_between_products() -> None:
    """Read once, and written only what is needed later."""
    a, w = torch.ones(2, 10, 10)

    def work() -> torch.Tensor:
        gate = (a * 2).sigmoid() * a
        return gate @ w

    plain, fused = counted(work), counted(work, is_compiled=True)
    assert sum(n for op, n in plain.items() if op.kind == MEMORY) == 3
    assert [(op.name, op.size_bytes) for op in fused if op.kind == MEMORY] == [(FUSED, 2 * 400)]
    assert [op for op in fused if op.kind != MEMORY] == [op for op in plain if op.kind != MEMORY]


def test_memory_that_was_given_back_is_not_written() -> None:
    """Though what is made there next, which is no kernel's, lives on."""
    a = torch.ones(10, 10)

    def work() -> list[torch.Tensor]:
        a.mul(2)
        return [torch.empty(10, 10) for _ in range(8)]

    assert [(op.name, op.size_bytes) for op in counted(work, is_compiled=True)] == [(FUSED, 400)]


def test_a_compiled_step_is_predicted_alike_each_time_and_from_fewer_layers(tmp_path: Path) -> None:
    write_model_config(tmp_path, num_hidden_layers=7)
    words = [f"model.partial_pretrain={tmp_path}", *tokens(64, 32, batch=4), BF16, "model.compile=true"]
    job = memory_plan._job(load_config(words), 2)
    few, more = (measure(job, number) for number in (4, 5))
    elsewhere = [torch.empty(1) for _ in range(5000)]
    again, whole = (measure(job, number) for number in (5, 7))
    del elsewhere
    assert again.operations == more.operations
    found = memory_plan.extrapolated(few, more, 7).operations
    assert found.total() == whole.operations.total()
    seconds = [predict(counts, find_card("H100"), num_micro_batches=1).step_s for counts in (found, whole.operations)]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-6)


def test_attention_waits_for_the_heads_that_ranks_exchange(tmp_path: Path) -> None:
    """Half of q and output (64 wide), k and v (32), in bfloat16, of 64 tokens; forward and back, in two layers."""
    words = [*tokens(64, 64, batch=4), BF16, "model.ulysses_sequence_parallel_size="]
    alone, shared = (planned(tmp_path, 4, *words[:-1], words[-1] + size) for size in "12")
    assert (alone.heads_bytes, shared.heads_bytes) == (0, 2 * 2 * (64 + 32) * 2 * 64 * 2 // 2)
    assert not [op for op in shared.operations if op.name == "wait_tensor"]
    sent = operation(roofline.ALL_TO_ALL, 2.0, "forward")
    hidden = Counter([operation(MATMUL, 3.0, "forward"), operation(GATHER, 1.0, "forward")])
    assert predict(hidden + Counter([sent]), CARD, num_micro_batches=1).step_s == pytest.approx(5.0)


def copied(plan: MemoryPlan, kind: str) -> int:
    number = plan.workload.num_micro_batches
    return sum(n * op.size_bytes * roofline.repeats(op, number) for op, n in plan.operations.items() if op.kind == kind)


def test_offloaded_state_goes_and_comes_as_computed_by_hand(tmp_path: Path) -> None:
    """As fake CUDA tensors do (fakecuda/test_fake_step.py): float32 shards of the layers twice in each of three
    micro-batches, all else once; gradients back, added to those there from the second one on (12 bytes an element).
    The host reads gradients for their norm, and for the update reads and writes them, parameters and moments.
    """
    words = [*tokens(64, 64, batch=24), BF16, RESHARD, "model.fsdp_config.cpu_offload=true"]
    shared = planned(tmp_path, 8, *words)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    whole, layers = (sum(p.numel() for p in part.parameters()) for part in (model, model.model.layers))
    assert copied(shared, FROM_HOST) == 3 * (whole + layers) * 4 // 8
    assert (copied(shared, TO_HOST), copied(shared, AWAITED)) == (whole * 4 // 8, 2 * whole * 4 // 8)
    assert shared.copied_bytes == (3 * (2 * whole + layers) * 4 // 8, 2 * whole * 4 // 8)
    assert copied(shared, ON_HOST) == pytest.approx((2 * 12 + 4 + 32) * whole // 8, rel=0.02)
    one, replicas = (
        planned(tmp_path, 1, *words),
        planned(tmp_path, 16, *words, *tokens(64, 64, batch=48), HSDP.replace("=2", "=8")),
    )
    assert copied(one, FROM_HOST) == 0, "nothing is gathered, so nothing is fetched ahead"
    assert copied(one, AWAITED) == 24 * (whole + layers) * 4 + 23 * whole * 4
    assert (copied(replicas, TO_HOST), copied(replicas, AWAITED)) == (whole * 4 // 8, 0), "behind their sum, once"
    assert copied(replicas, FROM_HOST) == 3 * (whole + layers) * 4 // 8


def test_inputs_of_layers_that_are_put_away_go_and_come(tmp_path: Path) -> None:
    """Of four layers and two micro-batches, 64 tokens of 64 in bfloat16; the last one's stays until it is needed."""
    words = [*tokens(64, 64, batch=4), BF16, "model.enable_gradient_checkpointing=offload"]
    found = planned(tmp_path, 2, *words, num_hidden_layers=4)
    assert copied(found, TO_HOST) == 2 * 4 * 64 * 64 * 2
    assert copied(found, FROM_HOST) == 2 * 3 * 64 * 64 * 2


def operation(kind: str, seconds: float, part: str, micro_batch: int = 0) -> DeviceOperation:
    """That takes so long on CARD."""
    flops = int(seconds * CARD.rate(kind)) if kind in (MATMUL, ATTENTION) else 0
    rates = {MEMORY: CARD.memory_gb_s, ON_HOST: CARD.host_memory_gb_s, **dict.fromkeys(COPIES, CARD.host_link_gb_s)}
    size_bytes = 0 if flops else int(seconds * 1e9 * rates.get(kind, CARD.link_gb_s))
    return DeviceOperation((micro_batch, part, 1), kind, kind, flops, size_bytes)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        ([(MATMUL, 3.0, "forward"), (ATTENTION, 1.0, "forward"), (MEMORY, 0.5, "forward")], 4.5),
        ([(MATMUL, 3.0, "forward"), (GATHER, 2.0, "forward")], 3.0),
        ([(MATMUL, 1.0, "backward"), (GATHER, 2.0, "backward"), (REDUCE, 2.0, "backward")], 4.0),
        ([(MATMUL, 1.0, "forward"), (GATHER, 2.0, "backward")], 3.0),
        ([(MEMORY, 1.0, "start"), (GATHER, 2.0, "start"), (MEMORY, 1.0, "update")], 4.0),
        ([(MATMUL, 1.0, "forward"), (MATMUL, 2.0, "forward", 1)], 1.0 + 3 * 2.0),
        ([(MATMUL, 3.0, "forward"), (GATHER, 1.0, "forward"), (FROM_HOST, 2.0, "forward")], 3.0),
        ([(MATMUL, 1.0, "backward"), (FROM_HOST, 2.0, "backward"), (TO_HOST, 3.0, "backward")], 3.0),
        ([(MATMUL, 1.0, "backward"), (REDUCE, 2.0, "backward"), (AWAITED, 1.5, "backward")], 4.5),
        ([(FROM_HOST, 1.0, "start"), (GATHER, 2.0, "start"), (ON_HOST, 1.0, "update")], 4.0),
    ],
)
def test_ranks_exchange_and_copies_run_while_a_layer_is_computed(work: list[tuple[Any, ...]], expected: float) -> None:
    counts = Counter(operation(*entry) for entry in work)
    found = predict(counts, CARD, num_micro_batches=4)
    assert found.step_s == pytest.approx(expected)
    assert sum(seconds for _, seconds in found.costliest(100)) == pytest.approx(expected)


def test_many_small_kernels_wait_for_the_host() -> None:
    slow = find_card("H100,launch_us=10")
    found = predict(Counter({DeviceOperation((0, "forward", 0), "add", MEMORY, 0, 8): 1000}), slow, num_micro_batches=1)
    assert found.step_s == pytest.approx(0.01)
    assert found.costliest(1)[0][0] == f"forward: {roofline.LAUNCH}"


def test_between_machines_the_network_counts(tmp_path: Path) -> None:
    """32 ranks on four machines; with eight shards all but the sum of the replicas stays within one."""
    words = [*tokens(64, 32, batch=64), BF16, RESHARD]
    whole, replicas = (planned(tmp_path, 32, *words, *more) for more in ([], [HSDP.replace("=2", "=8")]))
    shares = [
        {(op.kind, op.ranks_on_machine) for op in plan.operations if op.kind in roofline.COLLECTIVES}
        for plan in (whole, replicas)
    ]
    assert shares == [{(GATHER, 8), (REDUCE, 8)}, {(GATHER, 0), (REDUCE, 0), (roofline.ALL_REDUCE, 1)}]
    gather = DeviceOperation((0, "start"), GATHER, GATHER, 0, 10**9)
    assert CARD.seconds(gather) == 1 / 100
    assert CARD.seconds(DeviceOperation((0, "start"), GATHER, GATHER, 0, 10**9, ranks_on_machine=2)) == 1 / 20


@pytest.mark.parametrize(
    ("words", "message"),
    [("H1000", "known are A100, H100"), ("H100,speed=1", "'speed=1'"), ("H100,tflops=x", "'tflops=x'")],
)
def test_an_unknown_card_is_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_card(words)


def test_the_plan_tells_time_and_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model_config(tmp_path)
    words = ["8", f"model.partial_pretrain={tmp_path}", *tokens(64, 32), "trainer.total_training_steps=3600000"]
    options = ["--card", "H100,memory_gb_s=1,memory_gib=3.5", "--price-per-gpu-hour", "2"]
    code, lines, _ = run(capsys, *words, *options)
    assert (code, lines[-1][:12]) == (0, "fits: 3.0 of"), lines[-1]
    start = next(index for index, line in enumerate(lines) if line.startswith("predicted for H100, not measured: "))
    step_s = float(lines[start].split(": ")[1].split(" s a step")[0])
    hours, gpu_hours, cost = (
        float(word) for word in lines[-2].replace(",", "").split() if word[0].isdigit() and "." in word
    )
    assert hours == pytest.approx(1000 * step_s, rel=0.01)
    assert (gpu_hours, cost) == (pytest.approx(8 * hours, rel=0.02), pytest.approx(16 * hours, rel=0.01))
    assert [line for line in lines if line.startswith("disk: a checkpoint takes ")]
    assert len(lines) == start + 1 + 5 + 1 + 1
    assert not [line for line in run(capsys, *words, "trainer.device=cpu")[1] if "predicted" in line]
