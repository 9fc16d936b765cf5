"""Compilation, recomputation and bf16 change the execution of a step, but not its result."""

from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from ranks import each, run_ranks
from sweeps import short_or_full
from test_adapters import plain_model, write_adapter
from torch._dynamo.utils import counters
from torch.nn.utils import get_total_norm
from torch.utils._python_dispatch import TorchDispatchMode
from toy import (
    EXPERTS,
    ToySamples,
    build_toy_model,
    differing,
    full_parameters,
    model_config,
    optim_config,
    whole,
    write_model_config,
)
from toy_runs import source as source  # a fixture

from trainer.config import ConfigError
from trainer.data.loader import pack
from trainer.model import assemble, attention, packed_lm
from trainer.model import parallelize as sharding
from trainer.model.experts import Routers
from trainer.model.parallelize import parallelize
from trainer.optim import OPTIMIZERS
from trainer.tools.plan.fake_step import run_step

SAMPLES = ToySamples()
PRODUCTS = [getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "_grouped_mm")]
SHAPES = [[0, 1, 2], [], [5], [6, 7, 8, 9], [3, 4], [1], [20, 21, 22, 23, 19, 18, 17, 16, 15]]
"""Micro-batches of 0 to 9 documents, with different counts and lengths each time, as in training.
"""


def loss_and_gradients(model, members):
    loss = model(pack(SAMPLES, members)).loss_sum
    loss.backward()
    grads = [whole(parameter.grad) for parameter in model.parameters() if parameter.requires_grad]
    model.zero_grad()
    return loss.item(), grads


def worst(ours, theirs):
    """Return the largest relative difference of the loss, and of any gradient relative to the norm
    of all gradients.
    """
    norm = get_total_norm(theirs[1])
    differences = [float((a - b).norm() / norm) for a, b in zip(ours[1], theirs[1], strict=True)]
    return max(*differences, abs(ours[0] - theirs[0]) / abs(theirs[0]))


class Compiled(NamedTuple):
    """The comparison of a compiled model with the uncompiled one."""

    difference: float
    """The largest difference of losses and gradients."""
    num_frames: int
    num_ok: int
    """Frames that did not fall back to running uncompiled."""
    num_products: int
    """Matrix products of a backward pass after all shapes."""


def compiled_like_plain(world, source, shapes, *, backend="eager", **changes):
    """The eager backend runs captured graphs unchanged, so this tests the capture for any compiler."""
    torch.compiler.reset()
    plain = build_toy_model(world, source, **changes)
    with patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        model = build_toy_model(world, source, compile=True, **changes)
    model.train()
    counters.clear()
    difference = 0.0
    for members in shapes:
        ours, theirs = (loss_and_gradients(m, members) for m in (model, plain))
        if members:
            difference = max(difference, worst(ours, theirs))
        if len(shapes) > 1:
            with torch.no_grad():
                model(pack(SAMPLES, members))
    frames = counters["frames"]["total"], counters["frames"]["ok"]
    loss = model(pack(SAMPLES, shapes[0])).loss_sum
    with Calls(*PRODUCTS) as products:
        loss.backward()
    return Compiled(difference, *frames, products.count)


def all_compiled(world, root):
    """Run `compiled_like_plain` on each case in one process, because importing the compiler takes
    longer than a case.
    """
    window = {
        "sliding_window": 4,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    windowed = write_model_config(root / "window", "gemma3_text", **window)
    looped = write_model_config(root / "loop", "lfm2", layer_types=["conv", "full_attention"])
    one_layer = write_model_config(root / "plain", num_hidden_layers=1)
    path = write_adapter(plain_model(one_layer.path), root / "adapter")
    loop_shapes = short_or_full([[0, 1, 2, 3]], full=[[0, 1, 2, 3], []])
    found = {
        "windows": compiled_like_plain(world, windowed, SHAPES, enable_gradient_checkpointing=True),
        "loop": compiled_like_plain(world, looped, loop_shapes),
        "adapters": compiled_like_plain(
            world, one_layer, SHAPES[:3], lora_adapter_path=path, loss="dft"
        ),
    }
    torch.compiler.reset()
    with patch.object(torch, "compile", partial(torch.compile, backend="eager")):
        try:
            design = assemble.design_model(SELECTIVE_COMPILED, one_layer, max_length=64)
            assemble.build_model(design, world=world, seed=1)
        except ConfigError as error:
            found["refused"] = str(error)
    with patch.object(attention, "_grouped", traceable):
        found["selective"] = compiled_like_plain(
            world,
            one_layer,
            [[1, 2]],
            backend=PARTITIONED,
            enable_gradient_checkpointing="selective",
        )
    return found


SELECTIVE_COMPILED = model_config(compile=True, enable_gradient_checkpointing="selective")
PARTITIONED = "aot_eager_decomp_partition"
"""The choice between keeping and recomputing is made before code is generated."""


def traceable(lengths, query, key, value, scoring):
    """In the place of a CPU's attention, as the GPU's kernel is one operation of a graph; of
    all documents as one.
    """
    scores = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scoring.scaling, enable_gqa=True
    )
    return scores.transpose(1, 2)


@pytest.fixture(scope="module")
def compiled(root):
    return run_ranks(all_compiled, 1, root, timeout_s=400)[0]


@pytest.mark.parametrize("case", ["windows", "loop", "adapters"])
def test_compiled_layers_are_the_same_and_none_runs_uncompiled(compiled, case):
    """A compiled layer omits the loop over documents; adapters bring a different loss."""
    found = compiled[case]
    assert found.difference < 1e-6
    assert 0 < found.num_frames == found.num_ok


def test_a_compiled_backward_pass_is_the_same_and_repeats_no_product(compiled):
    """The model has one layer. Each of its 7 matrices takes part in two products, for the gradients
    of its input and of itself. The head computes its gradients earlier, in the forward pass.
    """
    found = compiled["selective"]
    assert found.difference < 1e-5 and 0 < found.num_frames == found.num_ok
    assert found.num_products == 2 * 7


def test_selective_recomputation_of_layers_that_are_not_one_graph_is_refused(compiled):
    """Otherwise torch would run them uncompiled without a message."""
    refused = compiled.get("refused", "")
    assert "needs each layer in a single graph, but the layers of Qwen2ForCausalLM" in refused
    assert "`torch.compiler.disable()`d function" in refused


def two_steps(world, source, **changes):
    """(gathers of each step, parameters afterwards), of two steps of three micro-batches."""
    model = build_toy_model(world, source, **changes)
    routers = Routers(model, world.device)
    optimizer = OPTIMIZERS["adamw"](model, optim_config())
    gathers = []
    for step in range(2):
        batches = [pack(ToySamples(), [6 * step + 2 * n, 6 * step + 2 * n + 1]) for n in range(3)]
        with Calls(torch.ops.c10d._allgather_base_.default) as calls:
            run_step(model, routers, optimizer, batches)
        gathers.append(calls.count)
    return gathers, full_parameters(model)


def test_what_stays_gathered_is_gathered_once_a_step(source):
    """Two layers and the rest; freed ones again in each forward and backward pass. Bit-equal."""
    kept, freed = (
        run_ranks(two_steps, 2, source, reshard_after_forward=reshard)[0]
        for reshard in (False, True)
    )
    assert kept[0] == [3, 3]
    assert freed[0] == [3 * (2 + 2 + 1)] * 2
    assert differing(kept[1], freed[1]) == []


class Calls(TorchDispatchMode):
    """Counts the calls of some operations."""

    def __init__(self, *operations):
        super().__init__()
        self.operations = operations
        self.count = 0

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in self.operations
        return func(*args, **(kwargs or {}))


def backward_costs(world, source, how):
    """(bytes kept for the backward pass, matrix products in it)."""
    model = build_toy_model(world, source, enable_gradient_checkpointing=how)
    model.train()
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(pack(ToySamples(), [0, 1, 2, 3])).loss_sum
    with Calls(*PRODUCTS) as products:
        loss.backward()
    return sum(kept.values()), products.count


@pytest.mark.parametrize(("model_type", "changes"), [("qwen2", {}), ("qwen3_moe", EXPERTS)])
def test_selective_recomputation_repeats_no_matrix_product(tmp_path, model_type, changes):
    source = write_model_config(tmp_path, model_type, **changes)
    variants = {how: {"how": how} for how in (False, True, "selective")}
    (most, few), (least, many), (_, selective) = run_ranks(
        each, 1, backward_costs, source, variants
    )[0].values()
    assert selective == few < many
    assert least < most / 2


def gathers_of_a_step(world, source, members=(0,)):
    """How often parameters are gathered in the forward and in the backward pass."""
    model = build_toy_model(world, source, reshard_after_forward=True)
    model.train()
    with Calls(torch.ops.c10d._allgather_base_.default) as gathers:
        loss = model(pack(SAMPLES, members)).loss_sum
        num_forward = gathers.count
        loss.backward()
    return num_forward, gathers.count - num_forward


def frees_layers(world, source, reshard, kept_bytes):
    """Return whether layers are gathered again for the backward pass."""
    sharding.KEPT_BYTES = kept_bytes
    return build_toy_model(world, source, reshard_after_forward=reshard).frees_gathered


@pytest.mark.parametrize(
    ("world_size", "expected"),
    [
        (1, {("auto", 0): False}),
        (2, {("auto", 0): True, ("auto", 2**30): False, (False, 0): False, (True, 2**30): True}),
    ],
)
def test_auto_frees_gathered_parameters_where_several_ranks_share_many(
    source, world_size, expected
):
    variants = {case: {"reshard": case[0], "kept_bytes": case[1]} for case in expected}
    found = run_ranks(each, world_size, frees_layers, source, variants)
    assert found == [expected] * world_size


def refuses_to_recompute(world, source):
    model = packed_lm.build_on_meta(source, is_packed=True)
    type(model).supports_gradient_checkpointing = False
    with pytest.raises(ConfigError, match="enable_gradient_checkpointing=false"):
        parallelize(model, model_config(enable_gradient_checkpointing=True), world)


def test_recomputation_that_the_model_lacks_is_refused(source):
    run_ranks(refuses_to_recompute, 1, source)
