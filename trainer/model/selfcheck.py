"""Before training: the packed forward must agree with transformers' own, document by document.

A wrong mask, a leak between documents or a missed transform of the logits shows here, for any architecture.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from trainer.batch import PackedBatch

_LENGTHS = (13, 8)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative difference of the summed loss: rounding of fp32, and of bf16 where kernels round in another order."""


@torch.no_grad()
def packing_error(model: PreTrainedModel, device: torch.device) -> float:
    """Relative difference between the loss of our forward and of transformers' plain one. Collective."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    documents = [
        torch.randint(0, model.config.get_text_config().vocab_size, (n,), generator=generator) for n in _LENGTHS
    ]
    batches = [_packed(documents)] if model.is_packed else [_packed([document]) for document in documents]
    ours = sum(model(batch.to(device)).item() for batch in batches)
    return abs(ours - _reference(model, documents, device)) / abs(ours)


def _reference(model: PreTrainedModel, documents: list[Tensor], device: torch.device) -> float:
    """Summed next-token loss from the architecture's own forward, one document at a time, eager attention."""
    ours: Any = model.forward
    implementation = model.config._attn_implementation
    plain: Any = model.original_forward
    total = 0.0
    try:
        model.forward = plain
        if model.is_packed:
            model.set_attn_implementation("eager")
        for document in documents:
            logits_TV = model(input_ids=document[None].to(device), use_cache=False).logits[0]
            total += F.cross_entropy(logits_TV[:-1].float(), document[1:].to(device), reduction="sum").item()
    finally:
        model.forward = ours
        if model.is_packed:
            model.set_attn_implementation(implementation)
    return total


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
