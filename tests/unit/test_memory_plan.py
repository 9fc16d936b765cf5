"""The memory plan: its numbers and its advice. It needs no weights, GPU or other ranks."""

import math
from itertools import chain
from unittest.mock import Mock, patch

import psutil
import pytest
import torch
import toy
from ranks import run_ranks
from toy import build_toy_model, optim_config, write_model_config

from trainer.cli import plan
from trainer.model import cpu_attention
from trainer.model.experts import Routers
from trainer.optim import OPTIMIZERS
from trainer.tools.plan import checks, disk, fake_step, memory
from trainer.tools.plan.advice import change_series
from trainer.tools.plan.live_storage import (
    ACTIVATIONS,
    FROZEN,
    GATHERED,
    HEAD,
    HOST_INPUTS,
    OPTIMIZER,
    PARAMETERS,
    LiveStorages,
    flash_backward_bytes,
)
from trainer.tools.plan.memory import (
    Change,
    MemoryPlan,
    heaviest_workload,
    plan_memory,
    planner,
)
from trainer.train.start.compose import load_config

WIDE = {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 32000, "head_dim": 256}
EXPERTS = {"model_type": "qwen3_moe", **toy.EXPERTS}
ODD = {"vocab_size": 163, "tie_word_embeddings": False}
"""Rows that two ranks cannot share evenly."""
RECOMPUTE = "model.enable_gradient_checkpointing=true"
CPU = "trainer.device=cpu"
LORA = "model.lora_rank=4"
OFFLOAD = "model.fsdp_config.cpu_offload=true"


def tokens(number, max_length, *, batch=64):
    limits = {"train_batch_size": batch, "max_token_len_per_gpu": number, "max_length": max_length}
    return [f"data.{key}={value}" for key, value in limits.items()]


def planned(path, num_ranks, *words, **changes):
    """Plan for a model that consists only of config.json."""
    write_model_config(path, **changes)
    return plan_memory(load_config([f"model.partial_pretrain={path}", *words]), num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_parameters_and_optimizer_state_are_counted_to_the_byte(tmp_path, num_ranks):
    """hidden 64, ffn 96, 4 heads and 2 key heads of 16, vocabulary 163 (not a multiple of 8), not
    tied, two layers.
    """
    q = [(64, 64), (64,)]
    kv = [(32, 64), (32,)]
    mlp = [(96, 64), (96, 64), (64, 96)]
    layer = [*q, *kv, *kv, (64, 64), *mlp, (64,), (64,)]
    shapes = [*layer, *layer, (163, 64), (163, 64), (64,)]
    shard_bytes = sum(4 * math.ceil(rows / num_ranks) * math.prod(rest) for rows, *rest in shapes)
    found = planned(tmp_path, num_ranks, *tokens(64, 32), vocab_size=163, tie_word_embeddings=False)
    assert found.num_parameters == sum(math.prod(shape) for shape in shapes)
    assert found.device_bytes[OPTIMIZER] == 2 * shard_bytes + 4 * len(shapes)
    buffers = found.device_bytes[PARAMETERS] - shard_bytes
    assert 0 <= buffers <= 2 * 8 * 4, "only the rotary frequencies"


def test_muon_needs_a_moment_less_for_the_matrices_of_layers(tmp_path):
    words = tokens(64, 32)
    adamw, muon = (
        planned(tmp_path, 1, f"optim.name={name}", *words).device_bytes[OPTIMIZER]
        for name in ("adamw", "muon")
    )
    num_weights = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96)
    assert adamw - muon == 4 * (num_weights + 2 * 7), "and it does not count their steps"


def test_one_card_holds_a_frozen_model_once(tmp_path):
    """Each of two GPUs holds half of the model and gathers it; so does one GPU whose layers are
    offloaded.
    """
    words = [*tokens(64, 32), LORA]
    one, two = (planned(tmp_path, num_ranks, *words, **WIDE) for num_ranks in (1, 2))
    offloaded = planned(tmp_path, 1, *words, OFFLOAD, **WIDE)
    base_bytes = 2 * (one.num_parameters - one.num_trained)
    assert one.device_bytes[FROZEN] == base_bytes
    assert one.device_bytes[GATHERED] <= 4 * one.num_trained
    assert two.device_bytes[FROZEN] == pytest.approx(base_bytes / 2, rel=1e-3)
    assert base_bytes <= offloaded.host_bytes[FROZEN] < 2 * base_bytes
    assert min(found.device_bytes[GATHERED] for found in (two, offloaded)) > base_bytes / 4


def test_recomputation_lowers_activations(tmp_path):
    """With offload the inputs of the layers are in host memory, except the two in use."""
    kept = {}
    on_host = {}
    for how in ("false", "selective", "true", "offload"):
        words = [*tokens(4096, 512), f"model.enable_gradient_checkpointing={how}"]
        found = planned(tmp_path, 8, *words, num_hidden_layers=4, **WIDE)
        kept[how] = found.device_bytes[ACTIVATIONS]
        on_host[how] = found.host_bytes.get(HOST_INPUTS, 0)
    assert kept["true"] < 0.4 * kept["false"]
    assert kept["true"] < kept["selective"] < 0.8 * kept["false"]
    assert [how for how, size_bytes in on_host.items() if size_bytes] == ["offload"]
    hidden_bytes = on_host["offload"] // 4
    assert kept["true"] - kept["offload"] == pytest.approx(2 * hidden_bytes, abs=hidden_bytes)


@pytest.mark.parametrize("words", [[RECOMPUTE], [OFFLOAD]], ids=str)
def test_four_and_five_layers_tell_all_of_nine(tmp_path, words):
    with patch.object(memory, "measure", wraps=memory.measure) as measured:
        found = planned(tmp_path, 8, *tokens(512, 64), *words, num_hidden_layers=9, vocab_size=1024)
    assert [call.args[1] for call in measured.call_args_list] == [4, 5]
    job = memory._job(
        load_config([f"model.partial_pretrain={tmp_path}", *tokens(512, 64), *words]), 8
    )
    whole = fake_step.measure(job, 9)
    fullest = max(whole[fake_step.DEVICE].values(), key=lambda held: held.total())
    assert found.device_bytes == {name: fullest[name] for name in found.device_bytes}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_attention_of_a_gpu_holds_nothing_quadratic(tmp_path, device):
    """With longer documents in equally many tokens, a GPU pads fewer rows, and a CPU keeps
    probabilities.
    """
    short, long = (
        planned(tmp_path, 1, *tokens(4096, length), f"trainer.device={device}", num_hidden_layers=1)
        for length in (64, 512)
    )
    ratio = long.device_bytes[ACTIVATIONS] / short.device_bytes[ACTIVATIONS]
    assert 0.8 < ratio <= 1 if device == "cuda" else ratio > 2


def real_step(world, source, is_recomputed):
    """Return bytes by category at the memory peak of a second step on real tensors."""
    model = build_toy_model(world, source, enable_gradient_checkpointing=is_recomputed)
    routers = Routers(model, world.device)
    optimizer = OPTIMIZERS["adamw"](model, optim_config())
    batches = [fake_step.full_batch((64, 64, 64))] * 2
    fake_step.run_step(model, routers, optimizer, batches)
    # so that the second step makes them, as the one that is planned
    cpu_attention._mask.cache_clear()
    live = LiveStorages()
    with live:
        fake_step.follow(model, optimizer, live)
        fake_step.run_step(model, routers, optimizer, batches)
    return dict(max(live.peaks().values(), key=lambda held: held.total()))


@pytest.mark.parametrize(
    ("num_ranks", "is_recomputed", "changes"),
    [(1, False, {}), (1, True, {}), (2, False, ODD), (2, False, EXPERTS)],
)
def test_a_real_step_takes_what_was_planned(tmp_path, num_ranks, is_recomputed, changes):
    words = [*tokens(192, 64, batch=6 * num_ranks), CPU, "model.fsdp_config.param_dtype=float32"]
    words += [RECOMPUTE] * is_recomputed
    found = planned(tmp_path, num_ranks, *words, **changes)
    assert found.job.workload == fake_step.Workload((64, 64, 64), 2)
    source = write_model_config(tmp_path, **changes)
    real = run_ranks(real_step, num_ranks, source, is_recomputed)[0]
    assert found.peak_bytes == pytest.approx(sum(real.values()), rel=0.01)
    for name in (PARAMETERS, OPTIMIZER):
        assert found.device_bytes[name] == real[name], name
    for name in (GATHERED, ACTIVATIONS, HEAD):
        expected = pytest.approx(real.get(name, 0), rel=0.01, abs=2048)
        assert found.device_bytes[name] == expected, name


def test_living_storages_are_counted_once_and_only_while_they_live():
    live = LiveStorages()
    with live:
        live.enter(0, "a")
        first = torch.zeros(1000)
        view = first[10:]
        second = first + 1
        del first
        live.enter(0, "b")
        del view
        second.untyped_storage().resize_(400)
        third = torch.zeros(1000)
        live.mark([third], HEAD)
        del third
    assert dict(live.peaks()[0, "a"]) == {ACTIVATIONS: 8000}
    assert dict(live.peaks()[0, "b"]) == {ACTIVATIONS: 400, HEAD: 4000}
    assert live.peaks(elsewhere=frozenset({ACTIVATIONS}))[0, "b"].total() == 4000
    assert torch.UntypedStorage.resize_ is live._resize, "the watch is taken off again"


def test_memory_that_flash_attention_takes_inside_is_counted():
    """It adds gradients of queries in fp32, and gradients per head for keys that heads share."""
    query = torch.empty(100, 4, 16, dtype=torch.bfloat16)
    alone = 4 * (100 + 2 * 128) * 4 * (16 + 1)
    assert flash_backward_bytes(query, query, num_documents=2) == alone
    shared = flash_backward_bytes(query, query[:, :2], num_documents=2)
    assert shared == alone + 2 * 100 * 4 * 16 * 2


@pytest.mark.parametrize(
    ("words", "num_ranks", "is_packed", "expected"),
    [
        (tokens(1000, 300), 2, True, ((300, 300, 300, 100), 11)),
        (tokens(1000, 300, batch=2), 8, True, ((300,), 1)),
        ([*tokens(1000, 300), "data.micro_batch_size_per_gpu=2"], 2, True, ((300, 300), 16)),
        (tokens(1000, 300), 2, False, ((300,), 32)),
    ],
)
def test_the_heaviest_micro_batch(words, num_ranks, is_packed, expected):
    found = heaviest_workload(load_config(words).data, num_ranks, is_packed=is_packed)
    assert (found.seqlens, found.num_micro_batches) == expected


def a_plan(num_ranks, *, is_cuda=True):
    """Return a plan of 1 GiB on each rank, with checkpoints of 1 GB for each rank."""
    job = Mock(num_ranks=num_ranks, is_cuda=is_cuda)
    job.design.source.path = "none"
    return MemoryPlan(job, 0, 0, 0, {PARAMETERS: 2**30}, {}, saved_bytes=10**9)


def run(capsys, *words):
    """Return exit code, lines and errors of `plan`."""
    code = plan.main(list(words))
    output = capsys.readouterr()
    return code, output.out.splitlines(), output.err


@pytest.mark.parametrize(
    ("words", "change"),
    [
        (tokens(2048, 512), Change(8, ("data.max_token_len_per_gpu=1024",))),
        (tokens(4096, 4096, batch=8), Change(8, (RECOMPUTE,))),
        ([*tokens(64, 64, batch=8), RECOMPUTE], Change(16)),
    ],
)
def test_the_change_it_names_makes_it_fit(tmp_path, capsys, words, change):
    write_model_config(tmp_path, **WIDE)
    words = [f"model.partial_pretrain={tmp_path}", *words]
    needed_gib = planner(load_config(words))(change).needed_gib
    limit = ["--memory-gib", str(needed_gib + 1e-6)]
    code, lines, _ = run(capsys, "8", *words, *limit)
    assert code == 1 and lines[-2].startswith("fail  memory: ")
    advice = change.overrides or (f"on {change.num_ranks} ranks",)
    assert lines[-1].startswith(f"      fix: {' '.join(advice)} (needs")
    code, lines, _ = run(capsys, str(change.num_ranks), *words, *change.overrides, *limit)
    assert code == 0 and lines[-1].startswith("ok    memory: ")


@pytest.mark.parametrize(
    ("num_ranks", "word", "message"),
    [
        (8, "fsdp_config.fsdp_size=3", "fsdp_size=3"),
        (4, "expert_parallel_size=3", "expert_parallel_size=3 does not divide the 4 ranks"),
        (3, "expert_parallel_size=3", "8 experts cannot be divided evenly among the 3 ranks"),
    ],
)
def test_ranks_that_a_run_refuses_end_with_2(tmp_path, capsys, num_ranks, word, message):
    write_model_config(tmp_path, **EXPERTS)
    words = [f"model.partial_pretrain={tmp_path}", f"model.{word}"]
    code, lines, errors = run(capsys, str(num_ranks), *words)
    assert (code, lines) == (2, []) and message in errors


def test_what_cuda_and_nccl_take_grows_with_the_ranks_of_a_machine():
    """The estimate was 1.5 GiB for any number of ranks, but eight ranks of a machine take 2 to 4
    GiB.
    """
    needed = [a_plan(ranks).needed_gib - 1.05 for ranks in (1, 2, 4, 8, 16, 512)]
    assert needed == pytest.approx([1.5, 2.0, 2.5, 3.0, 3.0, 3.0])
    assert len({a_plan(ranks, is_cuda=False).needed_gib for ranks in (1, 8)}) == 1


@pytest.mark.parametrize(("free_gb", "level"), [(10, "ok"), (3, "warn"), (2, "fail")])
def test_a_disk_needs_room_for_checkpoints(free_gb, level, monkeypatch):
    """The kept checkpoint and the one being written take 2 GB each."""
    monkeypatch.setattr(checks.fsio, "free_bytes", lambda path: free_gb * 10**9)
    config = load_config(["trainer.max_ckpt_to_keep=1"])
    assert checks.check_disk(config, a_plan(2)).level == level


def test_the_limit_of_a_container_is_the_memory_that_may_be_used(tmp_path, monkeypatch):
    machine_bytes = psutil.virtual_memory().total
    monkeypatch.setattr(memory, "CONTAINER_LIMIT", tmp_path / "memory.max")
    assert memory.host_memory_bytes() == machine_bytes
    sizes = {"max": machine_bytes, machine_bytes + 1: machine_bytes, 3 * 2**30: 3 * 2**30}
    for text, expected in sizes.items():
        (tmp_path / "memory.max").write_text(f"{text}\n")
        assert memory.host_memory_bytes() == expected


def test_what_a_run_with_experts_refuses_is_no_advice(tmp_path):
    """A plan of 512 ranks with 8 experts was refused, and so was offloaded state. Either refusal
    ended the command.
    """
    now = planned(tmp_path, 2, "model.expert_parallel_size=2", **EXPERTS)
    changes = list(chain.from_iterable(change_series(now.job.config, now)))
    assert {change.num_ranks for change in changes} == {2, 4, 8}
    assert not any(OFFLOAD in change.overrides for change in changes)


def test_nf4_takes_four_and_a_half_bits_for_a_frozen_weight(tmp_path):
    words = (LORA, "model.random_weights=false")
    plain, held = (
        planned(tmp_path, 1, *words, f"model.load_in_4bit={value}") for value in ("false", "true")
    )
    saved_bytes = plain.device_bytes[FROZEN] - held.device_bytes[FROZEN]
    # rows of the MLP's down projection, of 96 weights, are no whole blocks
    num_held = 2 * 64 * (2 * 64 + 2 * 32 + 2 * 96)
    assert plain.num_parameters == held.num_parameters and plain.num_base == held.num_base
    assert saved_bytes == num_held * (16 - 4.5) / 8


def test_an_adapter_holds_a_tied_weight_under_both_names(tmp_path):
    words = ("model.random_weights=false", LORA)
    plain, saved = (
        planned(tmp_path, 1, *words, f"model.modules_to_save={names}")
        for names in ("[]", "[lm_head]")
    )
    plain_bytes, bytes_saved = (disk.export_bytes(plan.job.config, plan) for plan in (plain, saved))
    assert bytes_saved - plain_bytes == 2 * 160 * 64 * 2
