"""The output projection with a fused loss, which never materialises the full logits.

Shape suffixes: S supervised positions, B positions of a block (their logits exist at once), C
positions of a chunk (the unit of the loss), H hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainer.data.batch import LossOutput
from trainer.model.losses import Loss, LossAndGradient

BLOCK_TOKENS = 4096
LOGITS_BYTES = 5 * 2**28
"""Largest number of positions whose logits exist at once, and largest size of these logits in
bytes. Each block rewrites the weight's gradient: 6.5 GB of memory traffic for a 7B model with V =
152k, little compared with the products of 4,096 positions. The block size depends on vocabulary and
dtype, not on the GPU, so the sum over blocks rounds identically on every machine.
"""
CHUNKS = 8
"""Number of chunks in a block. The loss needs several times the memory of a chunk's logits, in
float32, so it is computed chunk by chunk.
"""


class LossHead(nn.Linear):
    """A replacement for `lm_head` with the same name and parameters. Given labels, it returns their
    loss instead of logits.

    One module call computes all blocks, so FSDP needs one all-gather and one reduce-scatter for any
    number of blocks.
    """

    loss: LossAndGradient
    """The training loss, or its compiled form, which passes over the logits once instead of several
    times.
    """

    @classmethod
    def from_linear(cls, linear: nn.Linear, loss: Loss) -> "LossHead":
        """Take over the parameters of `linear`; tied parameters stay tied."""
        head = cls.__new__(cls)
        vars(head).update(vars(linear), loss=loss)
        return head

    def forward(  # type: ignore[override]  # a linear layer gives a tensor; so does this one without labels
        self, hidden_SH: Tensor, labels_S: Tensor | None = None
    ) -> Tensor | LossOutput:
        """Return the training loss of the labels and their cross-entropy.

        Without gradients, return the cross-entropy as both. Without labels, return logits.
        """
        if labels_S is None:
            return super().forward(hidden_SH)
        if torch.is_grad_enabled():
            return _chunked(hidden_SH, self.weight, self.bias, labels_S, self.loss)
        _, size = _sizes(self.out_features, hidden_SH.dtype)
        chunks = zip(hidden_SH.split(size), labels_S.split(size), strict=True)
        outputs = [
            measure(super(LossHead, self).forward(hidden_CH), labels_C)
            for hidden_CH, labels_C in chunks
        ]
        _, losses, hits, _ = zip(*outputs, strict=True)
        losses_S = torch.cat(losses)
        return LossOutput(losses_S.sum(dtype=torch.float64), losses_S, torch.cat(hits))


def _sizes(vocabulary: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the number of positions in a block and in a chunk. A block is a power of two, like
    many micro-batch sizes.
    """
    num_fitting = LOGITS_BYTES // (vocabulary * dtype.itemsize)
    # the largest power of two up to `num_fitting`
    block_size = min(BLOCK_TOKENS, 1 << num_fitting.bit_length() >> 1)
    return block_size, max(1, block_size // CHUNKS)


def measure(logits_SV: Tensor, labels_S: Tensor) -> LossOutput:
    """Return the cross-entropy, and for each position whether the label is the most likely token."""
    log_probs_SV = torch.log_softmax(logits_SV.float(), dim=-1)
    losses_S = -log_probs_SV.gather(1, labels_S[:, None])[:, 0]
    return LossOutput(losses_S.sum(dtype=torch.float64), losses_S, likeliest(logits_SV, labels_S))


def likeliest(logits_SV: Tensor, labels_S: Tensor) -> Tensor:
    """Return True at each position where no token is more likely than the label. Comparing with the
    maximum costs a tenth of an argmax.
    """
    return logits_SV.gather(1, labels_S[:, None])[:, 0] >= logits_SV.amax(dim=-1)


def train(logits_SV: Tensor, labels_S: Tensor, loss: LossAndGradient) -> LossOutput:
    """Apply `loss` with its own gradient to logits that are in memory all at once."""
    with torch.no_grad():
        losses_S, grad_logits_SV, measured_KS = loss(logits_SV, labels_S)
        hits_S = likeliest(logits_SV, labels_S)
    return _output(losses_S, hits_S, [measured_KS], [logits_SV], [grad_logits_SV])


def _chunked(
    hidden_SH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    labels_S: Tensor,
    loss: LossAndGradient,
) -> LossOutput:
    """Compute the loss chunk by chunk, and its gradients block by block.

    The gradients are computed here, in the forward pass, while the logits exist. The backward pass
    only scales them (`_WithGradients`). With logits Z = X W^T + b of a block and the gradient G of
    the loss with respect to Z: dX = G W, dW = G^T X and db = sum over positions of G. The weight's
    gradient is summed in float32.
    """
    grad_hidden_SH = torch.empty_like(hidden_SH)
    grad_weight_VH, grad_bias_V = (
        torch.zeros_like(parameter, dtype=torch.float32)
        if parameter is not None and parameter.requires_grad
        else None
        for parameter in (weight_VH, bias_V)
    )
    losses_S = torch.empty(len(labels_S), dtype=torch.float32, device=hidden_SH.device)
    hits_S = torch.empty_like(losses_S, dtype=torch.bool)
    measured: list[Tensor] = []  # by chunk
    block_size, chunk_size = _sizes(len(weight_VH), hidden_SH.dtype)
    with torch.no_grad():
        for start in range(0, len(labels_S), block_size):
            block = slice(start, start + block_size)
            # the logits, until their gradient replaces them
            grad_logits_BV = torch.nn.functional.linear(hidden_SH[block], weight_VH, bias_V)
            parts = (
                tensor.split(chunk_size)
                for tensor in (grad_logits_BV, labels_S[block], losses_S[block], hits_S[block])
            )
            for logits_CV, labels_C, losses_C, hits_C in zip(*parts, strict=True):
                hits_C.copy_(likeliest(logits_CV, labels_C))
                found_C, grad_logits_CV, measured_KC = loss(logits_CV, labels_C)
                losses_C.copy_(found_C)
                logits_CV.copy_(grad_logits_CV)
                measured.append(measured_KC)
            if grad_bias_V is not None:
                grad_bias_V += grad_logits_BV.sum(0, dtype=torch.float32)
            grad_hidden_SH[block] = grad_logits_BV @ weight_VH
            if grad_weight_VH is not None:
                grad_weight_VH += grad_logits_BV.T @ hidden_SH[block]
    inputs = [hidden_SH, weight_VH, bias_V]
    gradients = [grad_hidden_SH, grad_weight_VH, grad_bias_V]
    return _output(losses_S, hits_S, measured, inputs, gradients)


def _output(
    losses_S: Tensor,
    hits_S: Tensor,
    measured: list[Tensor],
    inputs: list[Tensor | None],
    gradients: list[Tensor | None],
) -> LossOutput:
    """Return the output of a loss with these gradients with respect to `inputs`; the first has their
    dtype.

    `measured` holds the cross-entropy and the additional terms for each chunk, [1 + K, C]; it is
    empty if no position is supervised.
    """
    measured_KS = torch.cat(measured, dim=1) if measured else losses_S[None]
    total = _WithGradients.apply(losses_S, gradients, *inputs)
    return LossOutput(total, measured_KS[0], hits_S, measured_KS[1:].sum(1, dtype=torch.float64))


class _WithGradients(torch.autograd.Function):
    """The sum of losses whose gradients with respect to the inputs are already computed."""

    @staticmethod
    def forward(
        ctx: Any,
        losses_S: Tensor,
        gradients: list[Tensor | None],
        *inputs: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(*gradients)
        return losses_S.sum(dtype=torch.float64)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients in place, because the weight's gradient may be as large as the weight
        in float32.

        A zero-dimensional scalar would first be rounded to the gradient's dtype, which shifts the
        whole gradient by up to 0.4 %. A one-dimensional tensor is not rounded.
        """
        scale = grad_total.float()[None]
        dtype = ctx.saved_tensors[0].dtype
        grads = (None if grad is None else grad.mul_(scale).to(dtype) for grad in ctx.saved_tensors)
        return (None, None, *grads)
