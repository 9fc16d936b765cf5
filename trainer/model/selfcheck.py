"""Before training: our forward must agree with transformers' own, and no document may feel its neighbour.

A wrong mask, a leak between documents or a missed transform of the logits shows here, for any architecture.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from trainer.batch import PackedBatch
from trainer.model.packed_lm import forward_arguments

_LENGTHS = (13, 8)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative difference: rounding of fp32, and of bf16 where kernels round in another order."""


@torch.no_grad()
def packing_error(model: PreTrainedModel, device: torch.device) -> float:
    """The larger of two relative differences. Collective.

    The summed loss of our forward against transformers' plain one shows what is computed wrongly; the logits of a
    document beside two different neighbours show a leak far below what the rounding of bf16 lets the loss show.
    """
    model.eval()
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.vocab_size
    first, second, other = (torch.randint(0, vocab_size, (n,), generator=generator) for n in (*_LENGTHS, _LENGTHS[0]))
    batches = [_packed([first, second])] if model.is_packed else [_packed([first]), _packed([second])]
    ours = sum(model(batch.to(device)).item() for batch in batches)
    error = abs(ours - _reference(model, [first, second], device)) / abs(ours)
    if not model.is_packed:
        return error
    return max(error, _neighbour_influence(model, second, neighbours=(first, other), device=device))


def _reference(model: PreTrainedModel, documents: list[Tensor], device: torch.device) -> float:
    """Summed next-token loss from the architecture's own forward, one document at a time, eager attention."""
    implementation, plain = model.config._attn_implementation, cast(Any, model.original_forward)
    total = 0.0
    with _forward_replaced(model, plain):
        model.set_attn_implementation("eager")
        try:
            for document in documents:
                logits_TV = model(input_ids=document[None].to(device), use_cache=False).logits[0]
                total += F.cross_entropy(logits_TV[:-1].float(), document[1:].to(device), reduction="sum").item()
        finally:
            model.set_attn_implementation(implementation)
    return total


def _neighbour_influence(
    model: PreTrainedModel, document: Tensor, *, neighbours: tuple[Tensor, Tensor], device: torch.device
) -> float:
    """Relative change of a document's logits when the document packed before it is another of the same length."""
    plain: Any = model.original_forward
    with _forward_replaced(model, lambda batch: plain(**forward_arguments(model, batch)).logits[0]):
        one_TV, two_TV = (
            model(_packed([neighbour, document]).to(device))[-len(document) :].float() for neighbour in neighbours
        )
    return ((one_TV - two_TV).norm() / one_TV.norm()).item()


@contextmanager
def _forward_replaced(model: PreTrainedModel, forward: Callable[..., Any]) -> Iterator[None]:
    """Sharding hooks belong to the module's call, so another forward has to be called through the module."""
    ours: Any = model.forward
    model.forward = forward
    try:
        yield
    finally:
        model.forward = ours


def _packed(documents: list[Tensor]) -> PackedBatch:
    """Documents end to end, every token but the first of each a label."""
    seqlens = tuple(len(document) for document in documents)
    input_ids_T = torch.cat(documents)
    labels_T = torch.cat([torch.cat([document[1:], document.new_tensor([-100])]) for document in documents])
    supervised_S = (labels_T != -100).nonzero()[:, 0]
    return PackedBatch(
        input_ids_T=input_ids_T,
        labels_T=labels_T,
        position_ids_T=torch.cat([torch.arange(n) for n in seqlens]),
        cu_seqlens_D1=torch.tensor((0, *seqlens)).cumsum(0).to(torch.int32),
        seqlens=seqlens,
        supervised_S=supervised_S,
        num_loss_tokens=len(supervised_S),
        sample_ids=tuple(range(len(documents))),
    )
