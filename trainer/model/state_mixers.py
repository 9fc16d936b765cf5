"""Runs modules that would mix packed documents once per document; the rest of their layer stays
packed.

A module that passes information between tokens takes a cache in transformers, because it could not
generate without one. This identifies such modules regardless of their names. Attention through
`AttentionInterface` knows the document bounds. Linear attention, Mamba, short convolutions and
special attention (ALiBi, indexers) do not know them, so these modules are looped over documents,
unless an installed package computes them with document bounds.

Shape suffixes: T packed tokens, D documents of a group, L its padded length.
"""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from trainer.model import attention
from trainer.model.attention import DocumentLengths
from trainer.model.cpu_attention import group_by_length

_CACHES = {
    "cache",  # since transformers 5.24; the other names are older, or of single architectures
    "past_key_values",
    "layer_past",
    "cache_params",
    "use_cache",
    "state",
    "mlstm_state",
}
_IS_LOOPED = "_is_looped_over_documents"
_USES_KERNELS = "_uses_kernels_with_bounds"
BOUNDS = ("cu_seq_lens_q", "max_length_q", "lengths", "seq_idx")
"""Arguments that are not passed to a looped module, because its kernels and its fallbacks read
different arguments.
"""


def loop_over_documents(model: PreTrainedModel, *, uses_kernels: bool) -> bool:
    """Make modules loop over documents in place, where necessary.

    `uses_kernels`: modules whose kernels take document bounds stay packed. Return True if some
    attention stays packed. Otherwise all attention is looped and uses the mask of the longest
    document.
    """
    looped = list(_looped(model))
    for module in filter(_has_kernels, looped if uses_kernels else ()):
        setattr(module, _USES_KERNELS, True)
    looped = [module for module in looped if not hasattr(module, _USES_KERNELS)]
    attends_packed = any(map(_attends, model.modules())) and not any(
        _attends(m) and _inner(m) for m in looped
    )
    if not attends_packed:
        looped = [module for module in model.modules() if module in looped or _attends(module)]
        for name, make in (("sdpa", sdpa_mask), ("eager", eager_mask)):
            AttentionMaskInterface.register(name, functools.partial(_mask_of_longest, make))
    for module in looped:
        loop = functools.partial(_forward, forward=module.forward, is_alone=_attends(module))
        module.forward = types.MethodType(loop, module)
        setattr(module, _IS_LOOPED, True)
    return attends_packed


def looped_kinds(model: nn.Module, *, only_attention: bool = False) -> list[str]:
    """Return the names of the looped classes, or only of those with attention."""
    looped = [module for module in model.modules() if hasattr(module, _IS_LOOPED)]
    return _kinds(filter(_attends, looped) if only_attention else looped)


def kernel_kinds(model: nn.Module) -> list[str]:
    """Return the names of the classes whose kernels take document bounds."""
    return _kinds(module for module in model.modules() if hasattr(module, _USES_KERNELS))


def package_kinds(model: nn.Module) -> list[str]:
    """Return the names of the classes with a function from an installed package."""
    return _kinds(
        module
        for module in _mixers(model)
        if not all(map(_is_reference, _replaceable(module).values()))
    )


def _kinds(modules: Iterable[nn.Module]) -> list[str]:
    return sorted({type(module).__name__ for module in modules})


def _looped(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the innermost modules of a layer that take a cache. Attention that contains such a
    module, or that counts its own tokens, is looped as a whole.
    """
    inner = _inner(module)
    if (
        not _takes_cache(module)
        or isinstance(module, GradientCheckpointingLayer)
        or (inner and not _attends(module))
    ):
        for child in module.children():
            yield from _looped(child)
    elif inner or not _attends(module) or "arange" in _code(module).co_names:
        yield module


def _inner(module: nn.Module) -> bool:
    return any(map(_takes_cache, list(module.modules())[1:]))


def _takes_cache(module: nn.Module) -> bool:
    return not _CACHES.isdisjoint(inspect.signature(type(module).forward).parameters)


def _attends(module: nn.Module) -> bool:
    """Return True if a module calls attention through `AttentionInterface`."""
    return "ALL_ATTENTION_FUNCTIONS" in _code(module).co_names


def _has_kernels(module: nn.Module) -> bool:
    """Return True if packages such as flash-linear-attention and causal-conv1d provide all functions
    with which this module mixes tokens.

    The references in transformers for these functions refuse document bounds.
    """
    functions = _replaceable(module).values()
    return bool(functions) and not any(map(_is_reference, functions))


def _mixers(model: nn.Module) -> list[nn.Module]:
    """Return linear attention, Mamba and short convolutions."""
    return [module for module in _looped(model) if not _attends(module)]


def _replaceable(module: nn.Module) -> dict[str, Callable[..., Any]]:
    """Return {name: function} of the functions that this module calls and that transformers takes
    from an installed package. It wraps its own references for them.
    """
    methods = filter(inspect.isfunction, vars(type(module)).values())
    names = {name for method in methods for name in inspect.unwrap(method).__code__.co_names}
    place = type(module).__module__
    globals_ = vars(sys.modules[place])
    functions = {name: globals_[name] for name in names & globals_.keys()}
    return {
        name: function
        for name, function in functions.items()
        if hasattr(function, "__wrapped__") and inspect.unwrap(function).__module__ == place
    }


def _is_reference(function: Callable[..., Any]) -> bool:
    """Return True if a function runs transformers' own reference.

    Its wrapper then raises `ValueError` for `seq_idx` before it calls anything. A kernel is called,
    and raises a different error, because its other arguments are missing.
    """
    try:
        function(seq_idx=True)
    except ValueError:
        return True
    except Exception:  # a kernel lacks its other arguments
        pass
    return False


def use_references(model: nn.Module) -> None:
    """Let every module mix tokens with the references of transformers, even if packages are
    installed.

    This patches transformers' modules, so it affects the whole process.
    """
    for module in _mixers(model):
        for name, function in _replaceable(module).items():
            setattr(sys.modules[type(module).__module__], name, _reference_of(function))


def _reference_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the reference that transformers wraps. Like the wrapper, drop arguments that the
    reference does not accept.
    """
    reference = inspect.unwrap(function)
    names = inspect.signature(reference).parameters

    def call(*args: Any, **kwargs: Any) -> Any:
        return reference(*args, **{name: kwargs[name] for name in kwargs.keys() & names.keys()})

    return call


@contextmanager
def as_in_training(model: nn.Module) -> Iterator[None]:
    """Let a model in evaluation mode mix tokens as in training.

    Mamba has a separate kernel for training. These modules have no randomness.
    """
    mixers = [module for module in _mixers(model) if _replaceable(module)]
    for module in mixers:
        module.training = True
    try:
        yield
    finally:
        for module in mixers:
            module.training = False


def _code(module: nn.Module) -> types.CodeType:
    forward: Any = inspect.unwrap(type(module).forward)
    return forward.__code__


@torch.compiler.disable
def _forward(
    self: nn.Module,
    *args: Any,
    forward: Callable[..., Any],
    is_alone: bool,
    **kwargs: Any,
) -> Any:
    """Run documents of similar length as one batch, padded at their ends.

    1. Split every argument that has a row for each token by document.
    2. Pad the documents of a group to [D, L, ...], and call the module on them.
    3. Cut the outputs to the documents' lengths, and join them in their original order.

    State is only carried forward, so padding affects no token. If the module takes masks or biases,
    or has packed attention inside, documents run one by one. An output without a row for each token
    comes from the last call.

    Ranks that share the tokens gather them, run the module on all of them, and keep their share.
    """
    lengths = attention.running()
    if lengths is None:
        raise RuntimeError(f"{type(self).__name__} runs outside attention.documents")
    seqlens = lengths.seqlens
    num_tokens = sum(seqlens)
    exchange = lengths.exchange
    kept = {name: value for name, value in kwargs.items() if name not in BOUNDS}
    leaves, tree = tree_flatten((args, kept))
    if exchange is not None:
        leaves = [
            exchange.gathered(leaf) if _is_of_tokens(leaf, exchange.num_own) else leaf
            for leaf in leaves
        ]
    inputs = [_documents(leaf, seqlens) for leaf in leaves]
    groups = group_by_length(seqlens)
    if is_alone or any(isinstance(value, Tensor) for value in inputs):
        groups = [[index] for index in range(len(seqlens))]
    rows_of: list[dict[int, Tensor]] = [{} for _ in seqlens]
    for group in groups:
        own_lengths = tuple(seqlens[index] for index in group)
        own = [
            _padded(value, group, own_lengths[0], {num_tokens, max(seqlens)}) for value in inputs
        ]
        own_args, own_kwargs = tree_unflatten(own, tree)
        with attention.documents(DocumentLengths(own_lengths)):
            outputs, output_tree = tree_flatten(forward(*own_args, **own_kwargs))
        for place, output in enumerate(outputs):
            if isinstance(output, Tensor) and output.shape[:2] == (len(group), own_lengths[0]):
                for index, row in zip(group, output.unbind(0), strict=True):
                    rows_of[index][place] = row[: seqlens[index]]
    for place in rows_of[0]:
        joined = _joined([rows[place] for rows in rows_of])
        outputs[place] = joined if exchange is None else exchange.own(joined)
    return tree_unflatten(outputs, output_tree)


def _is_of_tokens(value: Any, num_tokens: int) -> bool:
    """Return True for a tensor with a row for each token, [1, T, ...]."""
    return isinstance(value, Tensor) and value.shape[:2] == (1, num_tokens)


def _documents(value: Any, seqlens: tuple[int, ...]) -> Any:
    """Split a tensor with a row for each token by document; return anything else unchanged."""
    return value[0].split(seqlens) if _is_of_tokens(value, sum(seqlens)) else value


def _padded(
    value: Any,
    group: list[int],
    longest: int,
    whole: set[int],
) -> Any:
    """Return a group's rows of a value as [D, L, ...]. A mask or bias over all tokens, or over
    those of the longest document, is cut to its top left corner.
    """
    if isinstance(value, tuple):
        return pad_sequence([value[index] for index in group], batch_first=True)
    if isinstance(value, Tensor):
        for dim in range(max(value.ndim - 2, 0), value.ndim):
            if value.shape[dim] in whole:
                value = value.narrow(dim, 0, longest)
    return value


def _joined(rows: list[Tensor]) -> Tensor:
    """Join the documents' rows [L, ...] into [1, T, ...].

    Rows of shorter documents may be narrower because there are fewer tokens to choose from; they
    are padded with zeros.
    """
    if rows[0].ndim > 1:
        width = max(row.shape[-1] for row in rows)
        rows = [
            row if row.shape[-1] == width else F.pad(row, (0, width - row.shape[-1]))
            for row in rows
        ]
    return torch.cat(rows)[None]


def _mask_of_longest(make: Callable[..., Tensor | None], **kwargs: Any) -> Tensor | None:
    """Return the mask of the longest document. A shorter document's mask is a corner of it; a mask
    over all T x T tokens would be too large.
    """
    if (lengths := attention.running()) is not None:
        longest = max(lengths.seqlens)
        start = sum(lengths.seqlens[: lengths.seqlens.index(longest)])
        kwargs |= {"q_length": longest, "kv_length": longest, "q_offset": start, "kv_offset": start}
    return make(**kwargs)
