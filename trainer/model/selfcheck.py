"""Checks before training that loss and gradient agree with transformers.

The check also covers packed documents, which must not influence each other. For any architecture,
it finds a wrong mask, norm or rotary position, a leak between documents, a missed transform of the
logits, or a backward pass that does not match its forward pass.
"""

import re
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.data.batch import PackedBatch
from trainer.model import state_mixers
from trainer.model.experts import compute_without_exchange, experts_of
from trainer.model.losses import Formula
from trainer.model.packed_lm import num_known_tokens, run_plain, sequence_group
from trainer.model.weights import local

LENGTHS = (13, 8)
"""Lengths of the two documents in tokens."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Allowed relative difference of losses: rounding in fp32, and in bf16, where kernels round in a
different order.
"""
GRADIENT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.3}
"""Allowed relative difference of the gradient of a kind of parameter. Rounding causes up to 7e-6 in
fp32 and 0.1 in bf16 over 32 layers, and 0.2 where it changes which experts a token goes to. Real
faults, such as half a gradient or the gradient of a second document, differ by more.
"""
LEAST_SHARE = 1e-3
"""This share of the whole gradient's norm is added to the norm of each kind, because some
gradients, such as those of a key's bias, are only rounding errors.
"""


class Errors(NamedTuple):
    """Relative differences from transformers' results. Those of the gradients are equal on all
    ranks.
    """

    loss: float
    gradients: dict[str, float]
    """{kind of parameter (its name without layer numbers): relative difference}."""
    foresight: float
    """Relative change of the logits when a later token changes."""


def compare(
    model: PreTrainedModel,
    device: torch.device,
    *,
    lengths: tuple[int, ...] = LENGTHS,
    formula: Formula,
) -> Errors:
    """Compare documents of `lengths` with transformers' own forward pass of each document alone.
    Collective.

    The documents are packed if the model is. `loss` also covers the largest change of a document's
    logits when its neighbour changes: this reveals a leak far below the rounding of bf16 losses.
    Gradients are cleared afterwards.
    """
    model.eval()
    generator = torch.Generator().manual_seed(0)
    vocabulary = num_known_tokens(model)
    *documents, other = (
        torch.randint(0, vocabulary, (n,), generator=generator) for n in (*lengths, lengths[0])
    )
    with _forgotten(model):
        expected_loss, expected_gradients = _reference(model, documents, device, formula)
        with state_mixers.as_in_training(model):
            loss, gradients = _ours(model, documents, device)
        error = abs(loss - expected_loss) / abs(expected_loss)
        *before, last = documents
        changed = torch.cat([last[:-1], (last[-1:] + 1) % vocabulary])
        if model.is_packed:
            forms = [[*before, last], [other, *before[1:], last], [*before, changed]]
            with state_mixers.as_in_training(model):
                leak, foresight = _influence(model, forms, device)
            error = max(error, leak)
        else:
            (foresight,) = _influence(model, [[last], [changed]], device)
    return Errors(error, _gradient_errors(model, gradients, expected_gradients, device), foresight)


def _reference(
    model: PreTrainedModel,
    documents: list[Tensor],
    device: torch.device,
    formula: Formula,
) -> tuple[float, dict[str, Tensor]]:
    """Return the summed loss and its gradient, by autograd of `formula` over the logits of
    transformers' own model.

    That model uses eager attention, and its state is reset for each document.
    """
    total = 0.0
    num_sharing = 1 if (group := sequence_group(model)) is None else group.size()
    with _plain(model), warnings.catch_warnings():
        # nothing is changed in place here
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
        for document in documents:
            with _forgotten(model):
                logits_TV = model(input_ids=document[None].to(device), use_cache=False).logits[0]
            loss = formula(logits_TV[:-1].float(), document[1:].to(device)).sum()
            # every sharing rank computes the whole loss, and their gradients are added up
            (loss / num_sharing).backward()
            total += loss.item()
    return total, _take_gradients(model)


def _ours(
    model: PreTrainedModel, documents: list[Tensor], device: torch.device
) -> tuple[float, dict[str, Tensor]]:
    """Return the summed loss and its gradient as training computes them. Collective."""
    total = 0.0
    batches = [documents] if model.is_packed else [[document] for document in documents]
    for batch in batches:
        loss = model(_packed(model, batch).to(device)).loss_sum
        loss.backward()
        total += _whole(model, loss.detach()).item()
    return total, _take_gradients(model)


def _take_gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return {parameter: this rank's shard of its gradient} and clear the gradients.

    Two copies take no more memory than gradients and optimizer state do later.
    """
    gradients: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = local(parameter.grad)
            parameter.grad = None
    return gradients


def _gradient_errors(
    model: PreTrainedModel,
    ours: dict[str, Tensor],
    expected: dict[str, Tensor],
    device: torch.device,
) -> dict[str, float]:
    """Return {kind of parameter: norm of the difference / norm of the expected gradient} over all
    ranks.
    """
    kinds = {name: re.sub(r"\d+", "*", name) for name, _ in model.named_parameters()}
    columns = {kind: column for column, kind in enumerate(dict.fromkeys(kinds.values()))}
    squares_2K = torch.zeros(2, len(columns), dtype=torch.float64, device=device)
    nothing = torch.zeros(())  # on the host: works with gradients on any device
    for name, kind in kinds.items():
        theirs = expected.get(name, nothing)
        difference = ours.get(name, nothing) - theirs
        for row, tensor in enumerate((difference, theirs)):
            squares_2K[row, columns[kind]] += torch.linalg.vector_norm(
                tensor, dtype=torch.float64
            ).square()
    dist.all_reduce(squares_2K)
    differences_K, norms_K = squares_2K.sqrt()
    errors_K = differences_K / (norms_K + LEAST_SHARE * norms_K.norm())
    return dict(zip(columns, errors_K.tolist(), strict=True))


def _whole(model: PreTrainedModel, part: Tensor) -> Tensor:
    """Return the sum over the ranks that share a batch. Collective."""
    if (group := sequence_group(model)) is not None:
        dist.all_reduce(part, group=group)
    return part


@contextmanager
def _plain(model: PreTrainedModel) -> Iterator[None]:
    """Run every module with the forward of its class, and the head as a linear layer.

    This replaces and restores the forwards of the same modules instead of using a second model,
    because the sharding hooks run when these modules are called.
    """
    attention = model.config._attn_implementation
    experts = model.config._experts_implementation
    head = model.get_output_embeddings()
    ours = {
        module: vars(module).pop("forward")
        for module in model.modules()
        if "forward" in vars(module)
    }
    head.forward = types.MethodType(nn.Linear.forward, head)
    exchanging = [module for module in experts_of(model) if "exchange" in vars(module)]
    for module in exchanging:
        module.forward = types.MethodType(compute_without_exchange, module)
    model.set_attn_implementation("eager")
    # `set_experts_implementation` ignores classes that FSDP has derived
    model.config._experts_implementation = "eager"
    try:
        yield
    finally:
        model.set_attn_implementation(attention)
        model.config._experts_implementation = experts
        for module in (head, *exchanging):
            del module.forward
        for module, forward in ours.items():
            module.forward = forward


@contextmanager
def _forgotten(model: PreTrainedModel) -> Iterator[None]:
    """Restore on exit the state that modules without parameters keep from a forward pass, such as
    rotary frequencies.
    """
    kept = [(m, dict(vars(m)), dict(m._buffers)) for m in model.modules() if not [*m.parameters()]]
    try:
        yield
    finally:
        for module, attributes, buffers in kept:
            vars(module).clear()
            vars(module).update(attributes, _buffers=buffers)


@torch.no_grad()
def _influence(
    model: PreTrainedModel, forms: list[list[Tensor]], device: torch.device
) -> list[float]:
    """Return the relative change of the last document's logits from the first form to each other
    form.

    The document's last token is excluded, because it may differ.
    """
    tokens = slice(-len(forms[0][-1]), -1)
    plain: Any = model.original_forward

    def logits(batch: PackedBatch) -> Tensor:
        own_TV = run_plain(model, plain, batch).logits[0]
        behind = sum(batch.seqlens) - batch.start - len(own_TV)
        return _whole(model, F.pad(own_TV, (0, 0, batch.start, behind)))

    ours: Any = model.forward
    model.forward = logits  # sharding hooks belong to the module's call
    try:
        batches = [_packed(model, form).to(device) for form in forms]
        expected_TV, *found = (model(batch)[tokens].float() for batch in batches)
    finally:
        model.forward = ours
    return [((logits_TV - expected_TV).norm() / expected_TV.norm()).item() for logits_TV in found]


def _packed(model: PreTrainedModel, documents: list[Tensor]) -> PackedBatch:
    """Return this rank's share of the packed documents. Every token except a document's first is a
    label.
    """
    input_ids_T = torch.cat(documents)
    labels_T = torch.cat([F.pad(document[1:], (0, 1), value=-100) for document in documents])
    batch = PackedBatch.of(
        input_ids_T,
        labels_T,
        seqlens=tuple(map(len, documents)),
        sample_ids=tuple(range(len(documents))),
    )
    group = sequence_group(model)
    return batch if group is None else batch.share(group.rank(), group.size())
