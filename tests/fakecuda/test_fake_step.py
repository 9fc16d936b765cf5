"""The step as a GPU would run it, without a GPU: every operation is recorded and none is computed.

Fake tensors have no numbers, no speed and no kernel limits; other tests cover these, or they need a
GPU.
"""

from collections import Counter

import pytest
from toy import EXPERTS

_SLIDING = {
    "sliding_window": 4,
    "query_pre_attn_scalar": 64,
    "layer_types": ["sliding_attention", "full_attention"],
}
FAMILIES = {
    "llama": {},
    "qwen3": {},
    "gpt2": {},
    "gemma3_text": _SLIDING,
    "granite": {"logits_scaling": 3.0},
    "qwen3_moe": EXPERTS,
}
CASES = {
    **{name: {"model_type": name, "changes": changes} for name, changes in FAMILIES.items()},
    "qwen3, three layers": {"changes": {"num_hidden_layers": 3}},
    "llama, three layers": {"model_type": "llama", "changes": {"num_hidden_layers": 3}},
    "untied": {"changes": {"tie_word_embeddings": False}},
    "replicas": {"num_ranks": 32, "fsdp_size": 8},
    "offload": {"offload": True},
    "recompute": {"recompute": True},
    "selective": {"recompute": "selective"},
    "layer inputs": {"recompute": "offload", "changes": {"num_hidden_layers": 3}},
    "bfloat16": {"kept": "bfloat16"},
    "one rank": {"num_ranks": 1},
    "muon": {"optimizer": "muon"},
    "dft": {"loss": "dft"},
    "lora": {"lora_rank": 8},
    "nf4": {"lora_rank": 8, "load_in_4bit": True},
    "compiled nf4": {"model_type": "llama", "compile": True, "lora_rank": 8, "load_in_4bit": True},
    "compiled": {"model_type": "llama", "compile": True},
    "compiled, selective": {"model_type": "llama", "compile": True, "recompute": "selective"},
    "two share": {"sequence_size": 2},
    "four share": {"sequence_size": 4, "recompute": True},
}
LAYER_INPUTS = "trainer/model/layer_inputs.py"
SHARED_TOKENS = (75, 74)
"""Documents of both micro-batches, before ranks share them."""


@pytest.fixture
def steps(fake_runs):
    """Return a function from the name of a case to the record of its step."""
    return lambda name: fake_runs(kind="step", **CASES[name])


def collectives(step, kind, **wanted):
    return [c for c in step["collectives"] if c["kind"] == kind and wanted.items() <= c.items()]


@pytest.mark.parametrize("name", [name for name in CASES if name != "offload"])
def test_no_operation_waits_for_the_device(steps, name):
    """An optimizer on the host cannot continue before gradients are there. test_fake_whole_run.py
    shows that a read is detected.
    """
    step = steps(name)
    assert step["is_packed"] and step["num_micro_batches"] == 2
    assert step["reads"] == {} and step["waits"] == {}
    assert [copy for copy in step["copies"] if copy["how"] == "blocking"] == []
    assert [
        c for c in step["copies"] if c["way"] == "cuda to cpu" and LAYER_INPUTS not in c["where"]
    ] == []


def test_gradients_of_offloaded_parameters_hold_up_all_micro_batches_but_the_first(steps):
    """This is why a few large micro-batches are faster, as docs/gpu.md and the plan state."""
    back = [
        copy
        for copy in steps("offload")["copies"]
        if copy["way"] == "cuda to cpu" and copy["where"] == "torch"
    ]
    waited = [copy for copy in back if copy["how"] == "blocking"]
    assert 2 * len(waited) == len(back) and steps("offload")["num_micro_batches"] == 2
    assert {(copy["host"], copy["how"]) for copy in back} == {
        ("pinned", "async"),
        ("pageable", "blocking"),
    }


def test_offloaded_state_goes_and_comes_as_computed_by_hand(steps):
    """Each micro-batch gathers float32 shards of the layers twice and everything else once, and
    reduces gradients, as `plan` counts.
    """
    step = steps("offload")
    moved = Counter[str]()
    for copy in step["copies"]:
        if not copy["where"].startswith(
            (
                "trainer/data/batch.py",
                "trainer/train/packet.py",
                "trainer/train/parts.py",  # the places of samples in the batch
                "trainer/optim/clip.py",
            )
        ):
            moved[copy["way"]] += copy["bytes"]
    once = step["num_micro_batches"] * 4 // 8
    layers = sum(step["layer_numels"])
    assert moved == {
        "cpu to cuda": once * (step["num_parameters"] + layers),
        "cuda to cpu": once * step["num_parameters"],
    }


def test_each_matrix_of_muon_is_computed_by_one_rank(steps):
    """14 matrices on 8 ranks take two rounds. A matrix takes five iterations of three products."""
    plain = steps("qwen3")
    muon = steps("muon")
    num_products = muon["operations"]["aten.mm.default"] - plain["operations"]["aten.mm.default"]
    assert num_products == 2 * 5 * 3
    exchanges = collectives(muon, "alltoall_base", ranks=8, dtype="float32")
    assert len(exchanges) == 2 * 2, "the shards of a round go to their owners, and come back"
    assert len(muon["collectives"]) == len(plain["collectives"]) + len(exchanges)


def test_inputs_of_layers_go_and_come_beside_the_step(steps):
    """With three layers and two micro-batches, the input of the last layer is still on the device
    when the backward pass begins.
    """
    copies = [copy for copy in steps("layer inputs")["copies"] if LAYER_INPUTS in copy["where"]]
    assert Counter(
        (copy["way"], copy["how"], copy["host"], copy["stream"] > 0) for copy in copies
    ) == {
        ("cuda to cpu", "async", "pinned", True): 2 * 3,
        ("cpu to cuda", "async", "pinned", True): 2 * 2,
    }


@pytest.mark.parametrize("name", CASES)
def test_what_ranks_tell_each_other_is_one_sum(steps, name):
    sums = [c for c in steps(name)["collectives"] if c["dtype"] == "float64"]
    assert [(c["kind"], c["ranks"]) for c in sums] == [
        ("allreduce", CASES[name].get("num_ranks", 8))
    ]


@pytest.mark.parametrize(
    "name",
    ["qwen3", "untied", "recompute", "replicas", "qwen3_moe", "lora", "compiled", "two share"],
)
def test_each_micro_batch_moves_what_was_computed_by_hand(steps, name):
    """Parameters in bfloat16, gradients in float32. Layers are gathered for the forward and again for
    the backward pass, embeddings and head once; all gradients are reduced once, those of adapters
    alone where there are any. Counts are those of the toy models: every size divides by 8 ranks.
    """
    step = steps(name)
    layers = step["layer_numels"]
    rest = step["num_parameters"] - sum(step["layer_numels"])
    num_calls = step["operations"]["torch_attn._varlen_attn.default"]
    assert num_calls == step["num_micro_batches"] * len(layers) * (1 + (name == "recompute")), (
        "a mask over the whole batch would give the same numbers"
    )
    for kind, dtype, numel in (
        ("allgather_base", "bfloat16", 2 * sum(layers) + rest),
        ("reduce_scatter_base", "float32", step["num_trained"]),
    ):
        found = collectives(step, kind)
        assert {(c["dtype"], c["ranks"]) for c in found} == {(dtype, 8)}
        assert sum(c["numel"] for c in found) == step["num_micro_batches"] * numel


def test_nf4_weights_are_gathered_in_the_bytes_that_hold_them(steps):
    """Gathers 4.5 bits per weight for the forward and again for the backward pass, and everything
    else in bfloat16.
    """
    plain = steps("lora")
    step = steps("nf4")
    num_all = sum(plain["layer_numels"])
    num_kept = sum(step["layer_numels"])
    num_nf4 = (num_all - num_kept) * 16 // 7
    rest = step["num_parameters"] - num_kept
    sizes = {"uint8": 1, "bfloat16": 2}
    gathered = sum(c["numel"] * sizes[c["dtype"]] for c in collectives(step, "allgather_base"))
    in_layers = 2 * (num_all - num_nf4) + num_nf4 * 9 // 16
    assert num_nf4 > num_all / 2
    assert gathered == step["num_micro_batches"] * (2 * in_layers + 2 * rest)


@pytest.mark.parametrize(
    ("name", "size", "num_forward"),
    [("two share", 2, 1), ("four share", 4, 2)],
)
def test_ranks_that_share_documents_exchange_what_was_computed_by_hand(
    steps, name, size, num_forward
):
    """With 4 query heads and 2 key heads of 64, and T positions of which a rank holds T_own, each
    layer sends queries, keys and values of T_own positions and all heads, and outputs of all
    positions and its share of the heads.

    The backward pass sends their gradients in the other direction. With four ranks, each key head
    is sent twice. Recomputation repeats the exchange.
    """
    step = steps(name)
    heads = 4
    head_size = 64
    num_layers = len(steps(name)["layer_numels"])
    found = collectives(step, "all_to_all_single")
    keys = 2 * max(2, size)
    expected = 0
    for num_own, num_tokens in zip(step["num_tokens"], SHARED_TOKENS, strict=True):
        there = num_own * (heads + keys) * head_size + num_tokens * heads // size * head_size
        back = num_tokens * (heads + keys) // size * head_size + num_own * heads * head_size
        expected += num_layers * (num_forward * there + back)
    assert sum(c["numel"] for c in found) == expected
    assert {(c["dtype"], c["ranks"], c["device"]) for c in found} == {("bfloat16", size, "cuda")}
    assert len(found) == num_layers * step["num_micro_batches"] * 4 * (num_forward + 1)


@pytest.mark.parametrize("name", ["compiled", "compiled, selective", "compiled nf4"])
def test_compiled_graphs_take_no_number_from_the_host(steps, name):
    """Layers are one graph, the loss another. Two micro-batches of other shapes, each forward and backward, are
    compiled once. The scale of LoRA and the epsilon of a norm were float64 tensors on the host: each
    graph ran a kernel there, which needs a C++ compiler.
    """
    step = steps(name)
    assert step["host_inputs"] == []
    assert step["num_graphs"] == 2 or "nf4" in name


def test_replicas_add_their_gradients_once_a_step(steps):
    step = steps("replicas")
    assert len(collectives(step, "reduce_scatter_base", ranks=8)) == 2 * 3, (
        "two layers and the rest, twice"
    )
    found = collectives(step, "allreduce", dtype="float32")
    assert [c["ranks"] for c in found] == [4] * 3
    assert sum(c["numel"] for c in found) == step["num_parameters"] // 8


def test_one_rank_does_not_divide_its_gradients_by_one(steps):
    """Any factor, even 1, makes torch write every gradient buffer once more."""
    divisions = [steps(name)["operations"]["aten.div.Tensor"] for name in ("one rank", "qwen3")]
    assert divisions[0] == divisions[1]


@pytest.mark.parametrize(("model_type", "budget"), [("qwen3", 89.5), ("llama", 84.5)])
def test_kernels_of_a_layer_stay_within_their_budget(steps, model_type, budget):
    """Forward and backward, uncompiled. Torch's kernels for norms saved 72 and 34 launches."""
    more = steps(f"{model_type}, three layers")
    less = steps(model_type)
    assert (more["num_kernels"] - less["num_kernels"]) / 2 <= budget


PLANS = {
    "plain": {},
    "selective, documents shared": {"recompute": "selective", "sequence_size": 2},
    "inputs put away": {"recompute": "offload"},
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_on_cpu_tensors_is_that_of_cuda_tensors(fake_runs, name):
    """In every phase, except for the batch itself."""
    case = PLANS[name]
    plan = fake_runs(kind="plan", **case)
    pretended = plan["pretended"]
    found = plan["found"]
    batch_bytes = 3 * 8 * 512 * case.get("sequence_size", 1)
    assert pretended.keys() == found.keys() and len(found) > 8
    for phase, held in pretended.items():
        for category in held.keys() | found[phase].keys():
            difference = held.get(category, 0) - found[phase].get(category, 0)
            assert abs(difference) <= batch_bytes * (category == "activations"), (phase, category)
