"""The loss inside the head against full logits in float64.

Shape suffixes: S supervised positions, H hidden size, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from toy import ToySamples, build_toy_model, write_model_config

from trainer.data.loader import pack
from trainer.model import head as head_module
from trainer.model.head import LossHead, train
from trainer.model.losses import LOSSES, Loss, Term, cross_entropy

Formula = Callable[[Tensor, Tensor], Tensor]

H, V = 24, 61
SCALE = 0.37
"""What the loss is multiplied by before its gradient is taken: the division by the token count."""


def inputs(
    num_positions: int, *, has_bias: bool, dtype: torch.dtype
) -> tuple[LossHead, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_positions)
    linear = nn.Linear(H, V, bias=has_bias)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    hidden_SH = torch.randn(num_positions, H, generator=generator, dtype=dtype).requires_grad_()
    labels_S = torch.randint(0, V, (num_positions,), generator=generator)
    return LossHead.from_linear(linear.to(dtype), LOSSES["cross_entropy"]), hidden_SH, labels_S


def weighted_by_probability(logits_SV: Tensor, labels_S: Tensor) -> Tensor:
    """DFT as its paper has it: the probability of each label, detached, times its
    cross-entropy; summed.
    """
    losses_S = F.cross_entropy(logits_SV, labels_S, reduction="none")
    probabilities_S = torch.softmax(logits_SV, dim=-1)[torch.arange(len(labels_S)), labels_S]
    return (probabilities_S.detach() * losses_S).sum()


LOSS_TOLERANCE = {"cross_entropy": 1e-7, "dft": 5e-7}
"""float32 rounds a probability by as much as its logarithm is large."""
FORMULAS = {
    "cross_entropy": partial(F.cross_entropy, reduction="sum"),
    "dft": weighted_by_probability,
}


def reference(
    head: LossHead,
    hidden_SH: Tensor,
    labels_S: Tensor,
    formula: Formula = FORMULAS["cross_entropy"],
) -> tuple[Tensor, list[Tensor]]:
    """(summed loss, gradients of SCALE * loss for hidden, weight and bias) from full logits in
    float64.
    """
    leaves = [t.detach().double().requires_grad_() for t in (hidden_SH, *head.parameters())]
    loss = formula(F.linear(*leaves), labels_S)
    return loss, list(torch.autograd.grad(SCALE * loss, leaves))


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs).norm() / theirs.norm())


@pytest.mark.covers("S3.9")
@pytest.mark.parametrize(
    ("block_tokens", "chunks"), [(1, 8), (3, 1), (10, 4), (1000, 8), (1000, 1000)]
)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_equal_full_logits(monkeypatch, block_tokens, chunks, has_bias, name):
    monkeypatch.setattr(head_module, "BLOCK_TOKENS", block_tokens)
    monkeypatch.setattr(head_module, "CHUNKS", chunks)
    head, hidden_SH, labels_S = inputs(20, has_bias=has_bias, dtype=torch.float32)
    head.loss = LOSSES[name]
    output = head(hidden_SH, labels_S)
    loss = output.loss_sum
    (SCALE * loss).backward()
    expected, gradients = reference(head, hidden_SH, labels_S, FORMULAS[name])
    assert loss.dtype == torch.float64
    assert relative(loss.detach(), expected.detach()) < LOSS_TOLERANCE[name]
    ours = [t.grad for t in (hidden_SH, *head.parameters())]
    assert len(ours) == len(gradients) == 2 + has_bias
    for gradient, theirs in zip(ours, gradients, strict=True):
        assert gradient is not None and relative(gradient, theirs) < 1e-6
    shown = output.losses_S.sum(dtype=torch.float64)
    assert (
        relative(shown, reference(head, hidden_SH, labels_S)[0].detach())
        < LOSS_TOLERANCE["cross_entropy"]
    )
    assert name != "cross_entropy" or shown.item() == loss.item()
    best_S = F.linear(hidden_SH, head.weight, head.bias).argmax(dim=-1)
    assert torch.equal(output.hits_S, best_S == labels_S)
    assert head(hidden_SH, best_S).hits_S.all()


def test_a_term_is_trained_with_its_weight_and_measured_by_itself(
    monkeypatch,
):
    """The z-loss beside cross-entropy, over several chunks, against full logits in float64."""

    def z_loss(logits_CV: Tensor, labels_C: Tensor) -> Tensor:
        return logits_CV.logsumexp(dim=-1) ** 2

    def total(logits_SV: Tensor, labels_S: Tensor) -> Tensor:
        return (
            F.cross_entropy(logits_SV, labels_S, reduction="sum")
            + 0.01 * z_loss(logits_SV, labels_S).sum()
        )

    monkeypatch.setattr(head_module, "BLOCK_TOKENS", 8)
    head, hidden_SH, labels_S = inputs(20, has_bias=True, dtype=torch.float32)
    head.loss = Loss(cross_entropy, terms={"z": Term(z_loss, 0.01)})
    output = head(hidden_SH, labels_S)
    (SCALE * output.loss_sum).backward()
    expected, gradients = reference(head, hidden_SH, labels_S, total)
    assert relative(output.loss_sum.detach(), expected.detach()) < 5e-7
    for tensor, theirs in zip((hidden_SH, *head.parameters()), gradients, strict=True):
        assert tensor.grad is not None and relative(tensor.grad, theirs) < 1e-6
    logits_SV = F.linear(hidden_SH, head.weight, head.bias).detach().double()
    (z_sum,) = output.terms_K.tolist()
    assert z_sum == pytest.approx(z_loss(logits_SV, labels_S).sum().item(), rel=1e-6)
    plain = F.cross_entropy(logits_SV, labels_S, reduction="none")
    assert relative(output.losses_S, plain) < 1e-6, "cross-entropy is shown whatever is trained"


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_measured_without_gradients_is_cross_entropy_whatever_is_trained(name):
    head, hidden_SH, labels_S = inputs(20, has_bias=True, dtype=torch.float32)
    head.loss = LOSSES[name]
    with torch.no_grad():
        output = head(hidden_SH, labels_S)
        logits_SV = F.linear(hidden_SH, head.weight, head.bias).double()
    expected = F.cross_entropy(logits_SV, labels_S, reduction="sum")
    assert output.loss_sum.item() == pytest.approx(expected.item(), rel=1e-7)
    assert torch.equal(output.hits_S, logits_SV.argmax(dim=-1) == labels_S)


@pytest.mark.parametrize("name", LOSSES)
def test_whole_logits_get_the_same_loss_and_gradient(name):
    """The path of models that transform what the head gives."""
    _, _, labels_S = inputs(20, has_bias=False, dtype=torch.float32)
    logits_SV = torch.randn(20, V, generator=torch.Generator().manual_seed(2)).requires_grad_()
    output = train(logits_SV, labels_S, LOSSES[name])
    (SCALE * output.loss_sum).backward()
    leaf_SV = logits_SV.detach().double().requires_grad_()
    expected = FORMULAS[name](leaf_SV, labels_S)
    (gradient,) = torch.autograd.grad(SCALE * expected, leaf_SV)
    assert relative(output.loss_sum.detach(), expected.detach()) < LOSS_TOLERANCE[name]
    assert (
        relative(output.losses_S.sum(), FORMULAS["cross_entropy"](leaf_SV, labels_S).detach())
        < 1e-6
    )
    assert logits_SV.grad is not None and relative(logits_SV.grad, gradient) < 1e-6


def test_bfloat16_differs_by_its_rounding_alone():
    """8 bits of mantissa: each logit is off by up to 2**-9 of itself, the sums average that out."""
    head, hidden_SH, labels_S = inputs(200, has_bias=True, dtype=torch.bfloat16)
    loss = head(hidden_SH, labels_S).loss_sum
    (SCALE * loss).backward()
    expected, gradients = reference(head, hidden_SH, labels_S)
    assert relative(loss.detach(), expected.detach()) < 1e-3
    for tensor, theirs in zip((hidden_SH, *head.parameters()), gradients, strict=True):
        assert tensor.grad is not None and tensor.grad.dtype == torch.bfloat16
        assert relative(tensor.grad, theirs) < 2e-2


def test_weight_gradient_sums_its_blocks_in_float32(monkeypatch):
    """A thousand blocks added up in bfloat16 would lose whole percents."""
    monkeypatch.setattr(head_module, "BLOCK_TOKENS", 2)
    head, hidden_SH, labels_S = inputs(2000, has_bias=False, dtype=torch.bfloat16)
    head(hidden_SH, labels_S).loss_sum.mul(SCALE).backward()
    _, gradients = reference(head, hidden_SH, labels_S)
    assert head.weight.grad is not None and relative(head.weight.grad, gradients[1]) < 1e-2


def test_no_supervised_position_gives_zero_and_zero_gradients():
    head, hidden_SH, labels_S = inputs(0, has_bias=True, dtype=torch.float32)
    loss = head(hidden_SH, labels_S).loss_sum
    loss.backward()
    assert loss.item() == 0.0 and loss.dtype == torch.float64
    for parameter in head.parameters():
        assert parameter.grad is not None and not parameter.grad.any()
    with torch.no_grad():
        assert head(hidden_SH, labels_S).loss_sum.item() == 0.0


def test_without_labels_it_is_the_linear_layer():
    head, hidden_SH, _ = inputs(5, has_bias=True, dtype=torch.float32)
    torch.testing.assert_close(
        head(hidden_SH), F.linear(hidden_SH, head.weight, head.bias), rtol=0, atol=0
    )


def test_tied_weight_stays_tied_and_sums_both_gradients():
    embedding, linear = nn.Embedding(V, H), nn.Linear(H, V, bias=False)
    linear.weight = embedding.weight
    head = LossHead.from_linear(linear, LOSSES["cross_entropy"])
    assert head.weight is embedding.weight
    ids = torch.arange(6)
    head(embedding(ids), ids + 1).loss_sum.backward()
    tied = embedding.weight.detach().double().requires_grad_()
    F.cross_entropy(tied[ids] @ tied.T, ids + 1, reduction="sum").backward()
    assert embedding.weight.grad is not None and tied.grad is not None
    assert relative(embedding.weight.grad, tied.grad) < 1e-6


class _LargestOutput(TorchDispatchMode):
    """Elements of the largest tensor any operation returns; matrix products."""

    num_elements = num_products = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_products += func is torch.ops.aten.mm.default
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


@pytest.mark.parametrize("is_training", [True, False])
def test_full_logits_never_exist(monkeypatch, is_training):
    monkeypatch.setattr(head_module, "BLOCK_TOKENS", 8)
    num_positions = 200
    head, hidden_SH, labels_S = inputs(num_positions, has_bias=False, dtype=torch.float32)
    with _LargestOutput() as largest, torch.set_grad_enabled(is_training):
        loss = head(hidden_SH, labels_S).loss_sum
        if is_training:
            loss.backward()
    biggest_needed = max(8 * V, num_positions * H, V * H)
    assert 0 < largest.num_elements <= biggest_needed < num_positions * V


@pytest.mark.parametrize(
    ("vocabulary", "dtype", "num_blocks"),
    [
        (152064, torch.bfloat16, 2),
        (152064, torch.float32, 4),
        (262144, torch.bfloat16, 4),
        (1000, torch.bfloat16, 2),
    ],
)
def test_blocks_are_as_long_as_the_memory_of_their_logits_allows(vocabulary, dtype, num_blocks):
    """Of 8,192 positions: each costs three products, one of which rewrites the gradient of the
    weight.
    """
    with FakeTensorMode():
        linear = nn.Linear(H, vocabulary, bias=False, dtype=dtype)
        hidden_SH = torch.zeros(8192, H, dtype=dtype, requires_grad=True)
        head = LossHead.from_linear(linear, LOSSES["cross_entropy"])
        with _LargestOutput() as seen:
            head(hidden_SH, torch.zeros(8192, dtype=torch.int64))
    assert seen.num_products == 3 * num_blocks
    assert (
        seen.num_elements
        == 8192 // num_blocks * vocabulary
        <= head_module.LOGITS_BYTES // dtype.itemsize
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("is_chunked", [True, False])
def test_division_by_the_token_count_is_not_rounded_to_bfloat16(is_chunked, device):
    """One over 470 is off by 0.4 % there, and the gradient of the whole model with it."""
    head, hidden_SH, labels_S = inputs(200, has_bias=False, dtype=torch.bfloat16)
    head, labels_S = head.to(device), labels_S.to(device)
    leaf = (
        (hidden_SH if is_chunked else head(hidden_SH.to(device)))
        .detach()
        .to(device)
        .requires_grad_()
    )

    def gradient(num_tokens: int) -> Tensor:
        leaf.grad = None
        output = head(leaf, labels_S) if is_chunked else train(leaf, labels_S, head.loss)
        (output.loss_sum / num_tokens).backward()
        assert leaf.grad is not None
        return leaf.grad.double()

    whole, share = gradient(1), gradient(470)
    # what is about -1, a label that was not foreseen, is rounded alike everywhere
    whole *= whole.abs() < 0.5
    assert (470 * (share * whole).sum() / whole.square().sum()).item() == pytest.approx(1, abs=1e-3)


def measured(world: Any, source: Any, losses: list[str]) -> list[float]:
    """Loss of a batch without gradients, by a model that trains each of `losses`."""
    models = (build_toy_model(world, source, loss=loss) for loss in losses)
    with torch.no_grad():
        return [model(pack(ToySamples(), [1, 2])).loss_sum.item() for model in models]


def test_a_model_that_transforms_its_logits_is_validated_with_cross_entropy_whatever_is_trained(
    tmp_path,
):
    """Its losses are computed beside the head."""
    source = write_model_config(tmp_path, "granite", logits_scaling=4.0)
    ((cross_entropy, dft),) = run_ranks(measured, 1, source, ["cross_entropy", "dft"])
    assert dft == cross_entropy
