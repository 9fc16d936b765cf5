"""Before training: our loss and its gradient must agree with transformers' own, and no document may feel its neighbour.

A wrong mask, norm or rotary position, a leak between documents, a missed transform of the logits, or a backward pass of
ours that is not that of its forward pass shows here, for any architecture.
"""

import re
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from trainer.batch import PackedBatch
from trainer.losses import Formula
from trainer.model import rope
from trainer.model.packed_lm import run_plain, sequence_group

_LENGTHS = (13, 8)
_BEYOND = (9, 5)
"""How far two documents go beyond each limit: what the first leaves behind would be met by the second."""
MAX_LIMIT = 1024
"""Tokens of the longest limit that is crossed, so that the check stays cheap; above it, rules alone decide."""
_LIMITS = re.compile(
    "(window|window_size|chunk_size|chunk_length|block_size|floor_scale|topk|budget|original_max_position_embeddings)$"
)
"""Names of lengths in configurations: of windows, of what is scanned or attended at a time, of what is chosen."""
_LINEAR_CHUNK = 64
"""What transformers' linear attention takes at a time, which no configuration names."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative difference of losses: rounding of fp32, and of bf16 where kernels round in another order."""
GRADIENT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.3}
"""Relative difference of a kind of parameter's gradient. Rounding gives up to 7e-6 and 0.1 in 32 layers, and 0.2 where
it changes which experts a token goes to; half a gradient, or one of another document beside it, is more.
"""
MAX_GRADIENT_LENGTH = 256
"""Tokens of the longest document whose gradient is compared: eager attention keeps their square, per head and layer."""
LEAST_SHARE = 1e-3
"""Of the whole gradient's norm, added to that of each kind: some gradients are rounding alone, as a key's bias."""


def document_lengths(config: PretrainedConfig, *, max_length: int) -> tuple[int, ...]:
    """Two short documents, and two beyond each length from which on the architecture computes something else, as far
    as documents of up to `max_length` tokens reach: what holds for those need not hold for longer ones.
    """
    named = vars(config) | (getattr(config, "rope_parameters", None) or {})
    limits = {limit for name, limit in named.items() if _LIMITS.search(name)} | {rope.length_limit(config)}
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        limits.add(_LINEAR_CHUNK)
    reached = min(max_length, MAX_LIMIT + 1)
    crossed = sorted(limit for limit in limits if isinstance(limit, int) and min(_LENGTHS) <= limit < reached)
    lengths = _LENGTHS + tuple(limit + beyond for limit in crossed for beyond in _BEYOND)
    return tuple(min(length, max(max_length, 2)) for length in lengths)


class Errors(NamedTuple):
    """Relative differences; those of the gradients are equal on all ranks."""

    loss: float
    gradients: dict[str, float]
    """By kind of parameter: its name without the numbers of layers."""
    foresight: float = 0.0
    """Of logits when a later token is another."""


def compare(model: PreTrainedModel, device: torch.device, *, max_length: int, formula: Formula) -> Errors:
    """What is measured, with documents up to each length that matters, then what is trained. Collective."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    lengths = document_lengths(model.config, max_length=max_length)
    documents = [torch.randint(0, model.config.vocab_size, (n,), generator=generator) for n in (*lengths, lengths[0])]
    *documents, other = documents
    with _forgotten(model):
        packing = packing_error(model, documents, other, device)
        foresight = _foresight(model, documents[0], device)
    short = [document for document in documents if len(document) <= MAX_GRADIENT_LENGTH]
    training, gradients = training_errors(model, short, device, formula)
    return Errors(max(packing, training), gradients, foresight)


@torch.no_grad()
def packing_error(model: PreTrainedModel, documents: list[Tensor], other: Tensor, device: torch.device) -> float:
    """The larger of two relative differences. Collective.

    The summed loss of our forward against transformers' plain one shows what is computed wrongly; the logits of a
    document beside different neighbours show a leak far below what the rounding of bf16 lets the loss show.
    """
    expected = _reference(model, documents, device)
    ours = sum(_whole(model, model(batch.to(device)).loss_sum).item() for batch in _batches(model, documents))
    error = abs(ours - expected) / abs(expected)
    if not model.is_packed:
        return error
    first, second, *longer = documents
    beside = [[neighbour, second] for neighbour in (first, other, *longer[-1:])]
    return max(error, _influence(model, beside, slice(-len(second), None), device))


def training_errors(
    model: PreTrainedModel, documents: list[Tensor], device: torch.device, formula: Formula
) -> tuple[float, dict[str, float]]:
    """Relative differences of the trained loss and of its gradient from autograd of `formula` over transformers' own
    forward pass, with eager attention and one document at a time. Collective.

    No gradient is kept: of each, sharded as it is, one product with a fixed random vector, as soon as it is there.
    """
    expected, ours = torch.zeros((), dtype=torch.float64, device=device), 0.0
    num_sharing = 1 if (group := sequence_group(model)) is None else group.size()
    with _plain(model), _gradient_sketches(model, device) as expected_sketches, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing is changed in place here
        for document in documents:
            with _forgotten(model):
                logits_TV = model(input_ids=document[None].to(device), use_cache=False).logits[0]
            loss = formula(logits_TV[:-1].float(), document[1:].to(device)).sum()
            (loss / num_sharing).backward()  # which all of them find, and the ranks' gradients are added up
            expected += loss.detach()
    with _gradient_sketches(model, device) as sketches:
        for batch in _batches(model, documents):
            loss = model(batch.to(device)).loss_sum
            loss.backward()
            ours += _whole(model, loss.detach()).item()
    error = abs(ours - expected.item()) / abs(expected.item())
    return error, _gradient_errors(model, sketches, expected_sketches, device)


@contextmanager
def _gradient_sketches(model: PreTrainedModel, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """{parameter: what is kept of this rank's part of its gradient}, added up over backward passes."""
    sketches: dict[str, Tensor] = {}

    def keep(name: str, parameter: Tensor) -> None:
        sketch = _sketch(parameter.grad).to(device)
        sketches[name] = sketches[name] + sketch if name in sketches else sketch
        parameter.grad = None

    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(keep, name))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    try:
        yield sketches
    finally:
        for hook in hooks:
            hook.remove()


def _sketch(gradient: Any) -> Tensor:
    """A vector as it is; of anything larger the products of its rows with one random vector, which differ by as much
    as the rows do, on average.
    """
    local: Tensor = (gradient.to_local() if isinstance(gradient, DTensor) else gradient).detach().float()
    if local.ndim == 1:
        return local.clone()
    size = local.shape[-1]
    return local @ torch.randn(size, generator=torch.Generator().manual_seed(size)).to(local.device)


def _gradient_errors(
    model: PreTrainedModel, ours: dict[str, Tensor], expected: dict[str, Tensor], device: torch.device
) -> dict[str, float]:
    """{kind of parameter: norm of the difference over norm of what is expected}, all ranks' parts together."""
    kinds = {name: re.sub(r"\d+", "*", name) for name, _ in model.named_parameters()}
    columns = {kind: column for column, kind in enumerate(dict.fromkeys(kinds.values()))}
    squares_2K = torch.zeros(2, len(columns), dtype=torch.float64, device=device)
    nothing = torch.zeros((), device=device)
    for name, kind in kinds.items():
        theirs = expected.get(name, nothing)
        for row, values in enumerate((ours.get(name, nothing) - theirs, theirs)):
            squares_2K[row, columns[kind]] += values.double().square().sum()
    dist.all_reduce(squares_2K)
    differences_K, norms_K = squares_2K.sqrt()
    errors_K = differences_K / (norms_K + LEAST_SHARE * norms_K.norm())
    return dict(zip(columns, errors_K.tolist(), strict=True))


def _batches(model: PreTrainedModel, documents: list[Tensor]) -> list[PackedBatch]:
    return [_packed(model, documents)] if model.is_packed else [_packed(model, [document]) for document in documents]


def _whole(model: PreTrainedModel, part: Tensor) -> Tensor:
    """The sum over the ranks that hold a batch between them. Collective."""
    if (group := sequence_group(model)) is not None:
        dist.all_reduce(part, group=group)
    return part


def _reference(model: PreTrainedModel, documents: list[Tensor], device: torch.device) -> float:
    """Summed next-token loss of transformers' own model, as new for each document, with eager attention."""
    total = 0.0
    with _plain(model):
        for document in documents:
            with _forgotten(model):
                logits_TV = model(input_ids=document[None].to(device), use_cache=False).logits[0]
            total += F.cross_entropy(logits_TV[:-1].float(), document[1:].to(device), reduction="sum").item()
    return total


@contextmanager
def _plain(model: PreTrainedModel) -> Iterator[None]:
    """Nothing of ours: every module runs the forward of its own class, the head that of a linear layer.

    Forwards are put back by name, not on another model, since sharding hooks belong to the calls of these modules.
    """
    attention, experts = model.config._attn_implementation, model.config._experts_implementation
    head = model.get_output_embeddings()
    ours = {module: vars(module).pop("forward") for module in model.modules() if "forward" in vars(module)}
    head.forward = types.MethodType(nn.Linear.forward, head)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(attention)
        model.set_experts_implementation(experts)
        del head.forward
        for module, forward in ours.items():
            module.forward = forward


@contextmanager
def _forgotten(model: PreTrainedModel) -> Iterator[None]:
    """What modules without parameters keep of a forward pass, such as rotary frequencies, is undone after it."""
    kept = [(m, dict(vars(m)), dict(m._buffers)) for m in model.modules() if not [*m.parameters()]]
    try:
        yield
    finally:
        for module, attributes, buffers in kept:
            vars(module).clear()
            vars(module).update(attributes, _buffers=buffers)


@torch.no_grad()
def _foresight(model: PreTrainedModel, document: Tensor, device: torch.device) -> float:
    """An encoder learns to read the token that it is to predict."""
    changed = torch.cat([document[:-1], (document[-1:] + 1) % model.config.vocab_size])
    return _influence(model, [[document], [changed]], slice(-1), device)


def _influence(model: PreTrainedModel, forms: list[list[Tensor]], tokens: slice, device: torch.device) -> float:
    """Largest relative change of the logits of `tokens` from the first of several packed forms to another."""
    plain: Any = model.original_forward

    def logits(batch: PackedBatch) -> Tensor:
        own_TV = run_plain(model, plain, batch).logits[0]
        behind = sum(batch.seqlens) - batch.start - len(own_TV)
        return _whole(model, F.pad(own_TV, (0, 0, batch.start, behind)))

    with _forward_replaced(model, logits):
        expected_TV, *found = (model(_packed(model, form).to(device))[tokens].float() for form in forms)
    return max(((logits_TV - expected_TV).norm() / expected_TV.norm()).item() for logits_TV in found)


@contextmanager
def _forward_replaced(model: PreTrainedModel, forward: Callable[..., Any]) -> Iterator[None]:
    """Sharding hooks belong to the module's call, so another forward has to be called through the module."""
    ours: Any = model.forward
    model.forward = forward
    try:
        yield
    finally:
        model.forward = ours


def _packed(model: PreTrainedModel, documents: list[Tensor]) -> PackedBatch:
    """Documents end to end, every token but the first of each a label; of them what this rank holds."""
    seqlens = tuple(len(document) for document in documents)
    input_ids_T = torch.cat(documents)
    labels_T = torch.cat([torch.cat([document[1:], document.new_tensor([-100])]) for document in documents])
    supervised_S = (labels_T != -100).nonzero()[:, 0]
    sample_ids, group = tuple(range(len(documents))), sequence_group(model)
    batch = PackedBatch.of(input_ids_T, labels_T, supervised_S, seqlens=seqlens, sample_ids=sample_ids)
    return batch if group is None else batch.share(group.rank(), group.size())
