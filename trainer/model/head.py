"""The output projection with the loss inside: the full logits never exist.

Shape suffixes: S supervised positions, C positions of one chunk, H hidden size, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LossAndGradient = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
CHUNK_TOKENS = 1024
"""Positions per chunk: a chunk's logits in fp32 are `CHUNK_TOKENS * V * 4` bytes, 0.6 GB for V = 152k."""


class LossHead(nn.Linear):
    """`lm_head` under its own name and parameters; given labels it returns the summed cross-entropy instead of logits.

    Being one module call, it is one all-gather and one reduce-scatter under FSDP however many chunks it takes.
    """

    loss_and_gradient: "LossAndGradient"
    """This file's function of that name, or its compiled form: one pass over the logits instead of several."""
    losses_S: Tensor
    """Cross-entropy of each position of the last forward pass, float32: what there is to say about single samples."""
    hits_S: Tensor
    """Whether the label was the likeliest token, of the last forward pass without gradients: it costs a pass more."""

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> "LossHead":
        """Take over the parameters of `linear` (tied ones stay tied)."""
        head = cls(1, 1, bias=False, device="meta")
        head.in_features, head.out_features = linear.in_features, linear.out_features
        head.loss_and_gradient = loss_and_gradient
        head.weight = linear.weight
        if linear.bias is not None:
            head.bias = linear.bias
        return head

    def forward(self, hidden_SH: Tensor, labels_S: Tensor | None = None) -> Tensor:
        """Sum over S of -log softmax(hidden @ weight.T)[label] as a float64 scalar; logits [.., V] without labels."""
        if labels_S is None:
            return super().forward(hidden_SH)
        total: Tensor
        if torch.is_grad_enabled():
            total, self.losses_S = _ChunkedCrossEntropy.apply(
                hidden_SH, self.weight, self.bias, labels_S, self.loss_and_gradient
            )
            return total
        losses, hits = [], []
        for hidden_CH, labels_C in zip(hidden_SH.split(CHUNK_TOKENS), labels_S.split(CHUNK_TOKENS), strict=True):
            log_probs_CV = _log_probs(super().forward(hidden_CH))
            losses.append(_losses(log_probs_CV, labels_C))
            hits.append(log_probs_CV.argmax(dim=-1) == labels_C)
        self.losses_S, self.hits_S = torch.cat(losses), torch.cat(hits)
        return self.losses_S.sum(dtype=torch.float64)


def loss_and_gradient(logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
    """(losses float32 [C], their sum's gradient by the logits in their dtype): softmax(logits) - onehot(label)."""
    log_probs_CV = _log_probs(logits_CV)
    losses_C = _losses(log_probs_CV, labels_C)
    grad_logits_CV = log_probs_CV.exp_()
    grad_logits_CV[torch.arange(len(labels_C), device=labels_C.device), labels_C] -= 1.0
    return losses_C, grad_logits_CV.to(logits_CV.dtype)


def _log_probs(logits_CV: Tensor) -> Tensor:
    return torch.log_softmax(logits_CV.float(), dim=-1)


def _losses(log_probs_CV: Tensor, labels_C: Tensor) -> Tensor:
    return -log_probs_CV.gather(1, labels_C[:, None])[:, 0]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy whose gradients are computed chunk by chunk in the forward pass.

    d loss / d logits = softmax(logits) - onehot(label); the weight's gradient is summed over chunks in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_SH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        labels_S: Tensor,
        loss_and_gradient: LossAndGradient,
    ) -> tuple[Tensor, Tensor]:
        grad_hidden_SH = torch.empty_like(hidden_SH)
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        losses_S = torch.empty(len(labels_S), dtype=torch.float32, device=hidden_SH.device)
        for start in range(0, len(labels_S), CHUNK_TOKENS):
            part = slice(start, start + CHUNK_TOKENS)
            hidden_CH, labels_C = hidden_SH[part], labels_S[part]
            logits_CV = torch.nn.functional.linear(hidden_CH, weight_VH, bias_V)
            losses_S[part], grad_logits_CV = loss_and_gradient(logits_CV, labels_C)
            if grad_bias_V is not None:
                grad_bias_V += grad_logits_CV.sum(0, dtype=torch.float32)
            grad_hidden_SH[part] = grad_logits_CV @ weight_VH
            grad_weight_VH += grad_logits_CV.T @ hidden_CH
        ctx.save_for_backward(grad_hidden_SH, grad_weight_VH, grad_bias_V)
        ctx.dtypes = weight_VH.dtype, None if bias_V is None else bias_V.dtype
        ctx.mark_non_differentiable(losses_S)
        return losses_S.sum(dtype=torch.float64), losses_S

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        grad_hidden_SH, grad_weight_VH, grad_bias_V = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        scale = grad_total.float()
        return (
            grad_hidden_SH.mul_(scale),
            grad_weight_VH.mul_(scale).to(weight_dtype),  # in place: it is as large as the weight, in fp32
            None if grad_bias_V is None else grad_bias_V.mul_(scale).to(bias_dtype),
            None,
            None,
        )
