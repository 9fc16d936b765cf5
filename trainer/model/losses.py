"""Training losses by name, as functions of logits and labels.

A loss sees the supervised positions of one chunk of a micro-batch, so it must treat every position
separately. This makes the step's loss, the sum over positions divided by their global count,
independent of chunks, micro-batches and ranks. `train/loss` and validation always show
cross-entropy, regardless of the training loss.

Shape suffixes: C positions of one chunk, V vocabulary, K additional terms.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Formula = Callable[["Tensor", "Tensor"], "Tensor"]
"""(logits [C, V] in float32 or wider, labels int64 [C]) -> values [C], differentiable by torch."""
LossAndGradient = Callable[["Tensor", "Tensor"], tuple["Tensor", "Tensor", "Tensor"]]
"""(logits, labels) -> (training losses float32 [C], gradient of their sum with respect to the
logits, in the logits' dtype [C, V], logged values float32 [1 + K, C]: cross-entropy and the K
additional terms).
"""


@dataclass(frozen=True)
class Term:
    """An additional, weighted term of the training loss."""

    formula: Formula
    weight: float


@dataclass(frozen=True)
class Loss:
    """The training loss: a main term and weighted additional terms.

    A call returns the tuple that `LossAndGradient` describes.
    """

    main: Formula
    fused: LossAndGradient | None = None
    """A fused version of `main` that returns losses and gradient in fewer passes over the logits,
    without the additional terms. At startup, every run compares it with autograd of the formula.
    """
    terms: Mapping[str, Term] = field(default_factory=dict)
    """{name: term}. Each term is logged as `train/objective/<name>`, without its weight."""

    @property
    def is_cross_entropy(self) -> bool:
        """True if the training loss is the loss logged as `train/loss`."""
        return self.main is cross_entropy and not self.terms

    def formula(self, logits_CV: "Tensor", labels_C: "Tensor") -> "Tensor":
        """Return the training losses [C], differentiable by autograd."""
        losses_C = self.main(logits_CV, labels_C)
        for term in self.terms.values():
            losses_C = losses_C + term.weight * term.formula(logits_CV, labels_C)
        return losses_C

    def __call__(
        self, logits_CV: "Tensor", labels_C: "Tensor"
    ) -> tuple["Tensor", "Tensor", "Tensor"]:
        if self.fused is not None and not self.terms:
            return self.fused(logits_CV, labels_C)
        import torch

        with torch.enable_grad():
            leaf_CV = logits_CV.detach().float().requires_grad_()
            losses_C = self.formula(leaf_CV, labels_C)
            (grad_CV,) = torch.autograd.grad(losses_C.sum(), leaf_CV)
        formulas = [cross_entropy, *(term.formula for term in self.terms.values())]
        plain_CV = logits_CV.detach().float()
        measured = torch.stack([formula(plain_CV, labels_C) for formula in formulas])
        return losses_C.detach(), grad_CV.to(logits_CV.dtype), measured


def cross_entropy(logits_CV: "Tensor", labels_C: "Tensor") -> "Tensor":
    """Return -log p(label)."""
    return -logits_CV.log_softmax(dim=-1).gather(1, labels_C[:, None])[:, 0]


def dft(logits_CV: "Tensor", labels_C: "Tensor") -> "Tensor":
    """Return the Dynamic Fine-Tuning loss: -p log p(label), where the gradient treats the weight p
    = p(label) as a constant.

    Tokens that the model finds unlikely no longer dominate the update. Source: arXiv 2508.05629,
    equation 9.
    """
    losses_C = cross_entropy(logits_CV, labels_C)
    return losses_C * losses_C.detach().neg().exp()


def _fused_cross_entropy(
    logits_CV: "Tensor", labels_C: "Tensor"
) -> tuple["Tensor", "Tensor", "Tensor"]:
    losses_C, grad_CV = _softmax_minus_onehot(logits_CV, labels_C)
    return losses_C, grad_CV.to(logits_CV.dtype), losses_C[None]


def _fused_dft(logits_CV: "Tensor", labels_C: "Tensor") -> tuple["Tensor", "Tensor", "Tensor"]:
    cross_entropy_C, grad_CV = _softmax_minus_onehot(logits_CV, labels_C)
    weights_C = cross_entropy_C.neg().exp()
    return (
        cross_entropy_C * weights_C,
        (grad_CV * weights_C[:, None]).to(logits_CV.dtype),
        cross_entropy_C[None],
    )


def _softmax_minus_onehot(logits_CV: "Tensor", labels_C: "Tensor") -> tuple["Tensor", "Tensor"]:
    """Return cross-entropy and its gradient, both in float32."""
    label_C1 = labels_C[:, None]
    log_probs_CV = logits_CV.float().log_softmax(dim=-1)
    losses_C = -log_probs_CV.gather(1, label_C1)[:, 0]
    grad_CV = log_probs_CV.exp_()
    return losses_C, grad_CV.scatter_(1, label_C1, grad_CV.gather(1, label_C1) - 1.0)


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, _fused_cross_entropy),
    "dft": Loss(dft, _fused_dft),
}
