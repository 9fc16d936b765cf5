"""The output projection with the loss inside: the full logits never exist.

Shape suffixes: S supervised positions, C positions of one chunk, H hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

CHUNK_TOKENS = 1024
"""Positions per chunk: a chunk's logits in fp32 are `CHUNK_TOKENS * V * 4` bytes, 0.6 GB for V = 152k."""


class LossHead(nn.Linear):
    """`lm_head` under its own name and parameters; given labels it returns the summed cross-entropy instead of logits.

    Being one module call, it is one all-gather and one reduce-scatter under FSDP however many chunks it takes.
    """

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> "LossHead":
        """Take over the parameters of `linear` (tied ones stay tied)."""
        head = cls(1, 1, bias=False, device="meta")
        head.in_features, head.out_features = linear.in_features, linear.out_features
        head.weight = linear.weight
        if linear.bias is not None:
            head.bias = linear.bias
        return head

    def forward(self, hidden_SH: Tensor, labels_S: Tensor | None = None) -> Tensor:
        """Sum over S of -log softmax(hidden @ weight.T)[label] as a float64 scalar; logits [.., V] without labels."""
        if labels_S is None:
            return super().forward(hidden_SH)
        if torch.is_grad_enabled():
            total: Tensor = _ChunkedCrossEntropy.apply(hidden_SH, self.weight, self.bias, labels_S)
            return total
        chunks = zip(hidden_SH.split(CHUNK_TOKENS), labels_S.split(CHUNK_TOKENS), strict=True)
        losses = [_chunk_loss(hidden_CH, self.weight, self.bias, labels_C)[0] for hidden_CH, labels_C in chunks]
        return torch.stack(losses).sum() if losses else hidden_SH.new_zeros((), dtype=torch.float64)


def _chunk_loss(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, labels_C: Tensor) -> tuple[Tensor, Tensor]:
    """(summed loss float64, log-probabilities [C, V] fp32)."""
    logits_CV = torch.nn.functional.linear(hidden_CH, weight_VH, bias_V).float()
    log_probs_CV = torch.log_softmax(logits_CV, dim=-1)
    return -log_probs_CV.gather(1, labels_C[:, None]).sum(dtype=torch.float64), log_probs_CV


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy whose gradients are computed chunk by chunk in the forward pass.

    d loss / d logits = softmax(logits) - onehot(label); the weight's gradient is summed over chunks in fp32.
    """

    @staticmethod
    def forward(ctx: Any, hidden_SH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, labels_S: Tensor) -> Tensor:
        grad_hidden_SH = torch.empty_like(hidden_SH)
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        total = hidden_SH.new_zeros((), dtype=torch.float64)
        for start in range(0, len(labels_S), CHUNK_TOKENS):
            part = slice(start, start + CHUNK_TOKENS)
            hidden_CH, labels_C = hidden_SH[part], labels_S[part]
            loss, log_probs_CV = _chunk_loss(hidden_CH, weight_VH, bias_V, labels_C)
            total += loss
            grad_logits_CV = log_probs_CV.exp_()
            grad_logits_CV[torch.arange(len(labels_C), device=labels_C.device), labels_C] -= 1.0
            if grad_bias_V is not None:
                grad_bias_V += grad_logits_CV.sum(0)
            grad_logits_CV = grad_logits_CV.to(weight_VH.dtype)
            grad_hidden_SH[part] = grad_logits_CV @ weight_VH
            grad_weight_VH += grad_logits_CV.T @ hidden_CH
        ctx.save_for_backward(grad_hidden_SH, grad_weight_VH, grad_bias_V)
        ctx.dtypes = weight_VH.dtype, None if bias_V is None else bias_V.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        grad_hidden_SH, grad_weight_VH, grad_bias_V = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        scale = grad_total.float()
        return (
            (grad_hidden_SH * scale).to(grad_hidden_SH.dtype),
            (grad_weight_VH * scale).to(weight_dtype),
            None if grad_bias_V is None else (grad_bias_V * scale).to(bias_dtype),
            None,
        )
