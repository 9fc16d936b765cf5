"""What is trained: a loss of logits and labels with its own gradient, by name (floor 1, imports no torch).

A loss is a function (logits [C, V], labels int64 [C]) -> (losses float32 [C], gradient of their sum by the logits, in
the logits' dtype [C, V]). It sees the supervised positions of one chunk of a micro-batch, so it must treat every
position by itself: then the step's loss, their sum over the global count, depends on no chunk, micro-batch or rank.
Validation always measures cross-entropy, whatever is trained.

Shape suffixes: C positions of one chunk, V vocabulary.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Loss = Callable[["Tensor", "Tensor"], tuple["Tensor", "Tensor"]]


def cross_entropy(logits_CV: "Tensor", labels_C: "Tensor") -> tuple["Tensor", "Tensor"]:
    """-log p(label); its gradient is softmax(logits) - onehot(label)."""
    losses_C, grad_CV = _cross_entropy(logits_CV, labels_C)
    return losses_C, grad_CV.to(logits_CV.dtype)


def dft(logits_CV: "Tensor", labels_C: "Tensor") -> tuple["Tensor", "Tensor"]:
    """Dynamic Fine-Tuning: -p log p(label) where the weight p = p(label) is a constant to the gradient.

    Tokens that the model finds unlikely no longer dominate the update. Source: arXiv 2508.05629, equation 9.
    """
    losses_C, grad_CV = _cross_entropy(logits_CV, labels_C)
    weights_C = losses_C.neg().exp()
    return losses_C * weights_C, (grad_CV * weights_C[:, None]).to(logits_CV.dtype)


LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy, "dft": dft}


def _cross_entropy(logits_CV: "Tensor", labels_C: "Tensor") -> tuple["Tensor", "Tensor"]:
    """Both in float32."""
    label_C1 = labels_C[:, None]
    log_probs_CV = logits_CV.float().log_softmax(dim=-1)
    losses_C = -log_probs_CV.gather(1, label_C1)[:, 0]
    grad_CV = log_probs_CV.exp_()
    return losses_C, grad_CV.scatter_(1, label_C1, grad_CV.gather(1, label_C1) - 1.0)
