"""The loss inside the head compared with full logits in float64.

Shape suffixes: S supervised positions, H hidden size, V vocabulary.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.model import head as head_module
from trainer.model.head import LossHead
from trainer.model.losses import LOSSES, Loss, Term, cross_entropy

H = 24
V = 61
SCALE = 0.37
"""Factor on the loss before its gradient is taken, in place of the division by the token count."""


def inputs(num_positions, *, has_bias, dtype):
    generator = torch.Generator().manual_seed(num_positions)
    linear = nn.Linear(H, V, bias=has_bias)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    hidden_SH = torch.randn(num_positions, H, generator=generator, dtype=dtype).requires_grad_()
    labels_S = torch.randint(0, V, (num_positions,), generator=generator)
    return LossHead.from_linear(linear.to(dtype), LOSSES["cross_entropy"]), hidden_SH, labels_S


def weighted_by_probability(logits_SV, labels_S):
    """DFT as in its paper: the probability of each label, detached, times its cross-entropy,
    summed.
    """
    losses_S = F.cross_entropy(logits_SV, labels_S, reduction="none")
    return (losses_S.detach().neg().exp() * losses_S).sum()


LOSS_TOLERANCE = {"cross_entropy": 1e-7, "dft": 5e-7, "z": 5e-7}
"""In float32, the relative error of a probability is proportional to its logarithm."""


def z_loss(logits_CV, labels_C):
    return logits_CV.logsumexp(dim=-1) ** 2


def with_z_loss(logits_SV, labels_S):
    cross_entropy = F.cross_entropy(logits_SV, labels_S, reduction="sum")
    return cross_entropy + 0.01 * z_loss(logits_SV, labels_S).sum()


FORMULAS = {
    "cross_entropy": partial(F.cross_entropy, reduction="sum"),
    "dft": weighted_by_probability,
    "z": with_z_loss,
}


def relative(ours, theirs):
    return float((ours.double() - theirs).norm() / theirs.norm())


TRAINED = {**LOSSES, "z": Loss(cross_entropy, terms={"z": Term(z_loss, 0.01)})}


def check(output, leaves, formula, tolerance):
    """Compare loss and gradients with full logits in float64.

    `leaves`: hidden states, labels and the head's parameters.
    """
    hidden_SH, labels_S, *parameters = leaves
    (SCALE * output.loss_sum).backward()
    exact = [leaf.detach().double().requires_grad_() for leaf in (hidden_SH, *parameters)]
    expected = formula(F.linear(*exact), labels_S)
    gradients = torch.autograd.grad(SCALE * expected, exact)
    assert output.loss_sum.dtype == torch.float64
    assert not output.loss_sum._is_view(), "FSDP would warn of it"
    assert relative(output.loss_sum.detach(), expected.detach()) < tolerance
    for leaf, gradient in zip((hidden_SH, *parameters), gradients, strict=True):
        assert leaf.grad.dtype == leaf.dtype
        assert relative(leaf.grad, gradient) < max(tolerance, 1e-6)


@pytest.mark.covers("S3.9")
@pytest.mark.parametrize(
    ("block_tokens", "chunks"), [(1, 8), (3, 1), (10, 4), (1000, 8), (1000, 1000)]
)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", TRAINED)
def test_loss_and_gradients_equal_full_logits(monkeypatch, block_tokens, chunks, has_bias, name):
    """Cross-entropy, hits and additional terms are measured with any training loss."""
    monkeypatch.setattr(head_module, "BLOCK_TOKENS", block_tokens)
    monkeypatch.setattr(head_module, "CHUNKS", chunks)
    head, hidden_SH, labels_S = inputs(20, has_bias=has_bias, dtype=torch.float32)
    head.loss = TRAINED[name]
    output = head(hidden_SH, labels_S)
    leaves = [hidden_SH, labels_S, *head.parameters()]
    check(output, leaves, FORMULAS[name], LOSS_TOLERANCE[name])
    logits_SV = F.linear(hidden_SH, head.weight, head.bias).detach()
    assert_measured(output, logits_SV, labels_S)
    if name == "z":
        z_sum = z_loss(logits_SV.double(), labels_S).sum().item()
        assert output.terms_K.tolist() == pytest.approx([z_sum], rel=1e-6)
    with torch.no_grad():
        unlearned = head(hidden_SH, labels_S)
        assert_measured(unlearned, logits_SV, labels_S)
        assert unlearned.loss_sum.item() == pytest.approx(unlearned.losses_S.double().sum().item())


def assert_measured(output, logits_SV, labels_S):
    losses_S = F.cross_entropy(logits_SV.double(), labels_S, reduction="none")
    assert relative(output.losses_S, losses_S) < 1e-6
    assert torch.equal(output.hits_S, logits_SV.argmax(dim=-1) == labels_S)


def test_weight_gradient_sums_its_blocks_in_float32(monkeypatch):
    """Summing a thousand blocks in bfloat16 would lose several percent."""
    monkeypatch.setattr(head_module, "BLOCK_TOKENS", 2)
    head, hidden_SH, labels_S = inputs(2000, has_bias=False, dtype=torch.bfloat16)
    output = head(hidden_SH, labels_S)
    check(output, [hidden_SH, labels_S, head.weight], FORMULAS["cross_entropy"], 1e-2)


class _LargestOutput(TorchDispatchMode):
    """Return the number of elements of the largest tensor that any operation returns, and the
    number of matrix products.
    """

    num_elements = num_products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.num_products += func is torch.ops.aten.mm.default
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


def test_full_logits_never_exist_without_gradients(monkeypatch):
    monkeypatch.setattr(head_module, "BLOCK_TOKENS", 8)
    head, hidden_SH, labels_S = inputs(200, has_bias=False, dtype=torch.float32)
    with _LargestOutput() as largest, torch.no_grad():
        head(hidden_SH, labels_S)
    assert 0 < largest.num_elements <= max(8 * V, 200 * H) < 200 * V


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
    """In a batch of 8,192 positions, each block costs three products, one of which rewrites the
    gradient of the weight.
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
def test_division_by_the_token_count_is_not_rounded_to_bfloat16(device):
    """1 / 470 is off by 0.4 % in that dtype, and the gradient of the whole model with it."""
    head, hidden_SH, labels_S = inputs(200, has_bias=False, dtype=torch.bfloat16)
    head = head.to(device)
    leaf = hidden_SH.detach().to(device).requires_grad_()

    def gradient(num_tokens):
        leaf.grad = None
        (head(leaf, labels_S.to(device)).loss_sum / num_tokens).backward()
        return leaf.grad.double()

    whole = gradient(1)
    share = gradient(470)
    # what is about -1, a label that was not foreseen, is rounded alike everywhere
    whole *= whole.abs() < 0.5
    assert (470 * (share * whole).sum() / whole.square().sum()).item() == pytest.approx(1, abs=1e-3)
