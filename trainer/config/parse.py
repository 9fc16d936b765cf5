"""Turn a resolved mapping into a checked `Config`. A mistyped key is answered with the nearest
known key.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from trainer.config.data import QUICKSTART, column_problem, sources_of
from trainer.config.keys import Check, ConfigError, declared, keys_of, one_of
from trainer.config.schema import LOADED, SELECTIVE, Config

TYPE_NAMES: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    types.NoneType: "null",
}


def parse_config(
    tree: dict[str, Any], parts: Mapping[str, Mapping[str, object]] | None = None
) -> Config:
    """Turn a resolved mapping into a checked `Config`. Raises `ConfigError` naming the key, the
    cause and a fix.

    `parts`: for keys whose values are names of parts, the parts by name.
    """
    tree = {name: value for name, value in tree.items() if name != "experiment"}
    config = dataclasses.replace(_build(Config, tree), resolved=tree)
    for dotted, named in (parts or {}).items():
        _check(attrgetter(dotted)(config), dotted, (one_of(*named),))
    require_consistent(config)
    for name in ("train_files", "val_files"):
        sources_of(config.data, name)
    return config


def parse_recorded(tree: Mapping[str, Any]) -> Config:
    """Turn the configuration that a run recorded into a `Config`, without the keys that this
    version no longer has. Raises `ConfigError`.
    """
    return parse_config(_without_unknown_keys(Config, tree))


def _without_unknown_keys(cls: Any, tree: Mapping[str, Any]) -> dict[str, Any]:
    known = {}
    for name, own in declared(cls).items():
        if name in tree:
            is_group = dataclasses.is_dataclass(own.type)
            known[name] = _without_unknown_keys(own.type, tree[name]) if is_group else tree[name]
    return known


def require_consistent(config: Config) -> None:
    """Raises `ConfigError` for values that do not go together."""
    if found := list(contradictions(config)):
        raise ConfigError("\n".join(found))


def known_keys() -> list[str]:
    """All dotted keys, in the order of the schema."""
    return list(keys_of(Config))


def problem_with_key(dotted: str) -> str | None:
    """Return None for a key, a group of keys, or a name inside a user-defined mapping; else the
    error message.
    """
    for name, key in keys_of(Config).items():
        is_mapping = typing.get_origin(key.type) is dict
        if f"{name}.".startswith(f"{dotted}.") or (is_mapping and dotted.startswith(f"{name}.")):
            return None
    return str(_unknown_key(dotted))


def _unknown_key(dotted: str, *, of_entry: Sequence[str] = ()) -> ConfigError:
    """Name the known key whose last part is nearest, of the same group if there is one.

    `of_entry`: the keys of an entry of a list, where `dotted` is in one.
    """
    group, _, leaf = dotted.rpartition(".")
    known = [*known_keys(), *of_entry]
    known.sort(key=lambda key: key.rpartition(".")[0] != group)  # the same group first
    leaves = [key.rpartition(".")[2] for key in known]
    if near := difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.7):
        hint = f"did you mean '{known[leaves.index(near[0])]}'?"
    elif "[" in dotted:
        names = ", ".join(key.rpartition(".")[2] for key in of_entry)
        hint = f"no key has a similar name; an entry has {names}"
    else:
        hint = (
            "no key has a similar name; `train --help` lists all, docs/coming_from.md those of "
            "other trainers"
        )
    return ConfigError(f"unknown configuration key '{dotted}': {hint}")


def _build(cls: Any, tree: dict[str, Any], prefix: str = "") -> Any:
    own = declared(cls)
    for name in tree:
        if name not in own:
            raise _unknown_key(f"{prefix}{name}", of_entry=[f"{prefix}{key}" for key in own])
    values, problems = {}, []
    for name, key in own.items():
        dotted = f"{prefix}{name}"
        if name in tree:
            try:
                value = _coerce(tree[name], key.type, dotted)
                _check(value, dotted, key.metadata["checks"])
            except ConfigError as error:
                problems.append(str(error))
            else:
                values[key.name] = value
        elif key.default is key.default_factory:  # both are missing
            problems.append(
                f"missing configuration key '{dotted}': it has no default, give it a value"
            )
    if problems:
        raise ConfigError("\n".join(problems))
    return cls(**values)


def _check(value: Any, dotted: str, checks: Iterable[Check]) -> None:
    for check in checks if value is not None else ():
        if problem := check(value):
            raise ConfigError(f"'{dotted}' {problem}")


def _coerce(value: Any, hint: Any, dotted: str) -> Any:
    """`value` as the type of its key; numbers written as text (`1e-5`) and whole floats are
    accepted where they fit.
    """
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        try:
            return _fit(value, option, dotted)
        except ConfigError:  # of an item: it says more than that the whole does not fit
            raise
        except (TypeError, ValueError):
            continue
    raise ConfigError(f"'{dotted}' must be {_type_name(hint)}, got {value!r}")


def _type_name(hint: Any) -> str:
    """Return the values of a type in words."""
    if isinstance(hint, types.UnionType):
        return " or ".join(map(_type_name, typing.get_args(hint)))
    if typing.get_origin(hint) is list:
        return "a list"
    return TYPE_NAMES.get(hint, "a group of keys")


def _fit(value: Any, hint: Any, dotted: str) -> Any:
    """Raises `ValueError` or `TypeError` where it does not fit, `ConfigError` for an item that
    does not.
    """
    origin = typing.get_origin(hint)
    if value is None and hint is types.NoneType:
        return None
    if isinstance(value, bool):
        if hint is bool:
            return value
        raise ValueError
    if isinstance(value, dict) and origin is dict:
        return value
    if isinstance(value, dict) and dataclasses.is_dataclass(hint):
        return _build(hint, value, f"{dotted}.")
    if origin is list and value is not None:
        (item_hint,) = typing.get_args(hint)
        items = value if isinstance(value, list) else [value]
        places = [f"{dotted}[{n}]" if isinstance(i, dict) else dotted for n, i in enumerate(items)]
        return [_coerce(item, item_hint, place) for item, place in zip(items, places, strict=True)]
    if not isinstance(value, str | int | float):
        raise ValueError
    if hint is str:
        return str(value)
    number = float(value)
    if hint is float and not math.isnan(number):
        return number
    if hint is int and number.is_integer():
        return int(number)
    raise ValueError


def contradictions(config: Config) -> Iterator[str]:
    """Yield what is wrong between keys that are each right, with a fix."""
    data, model, trainer = config.data, config.model, config.trainer
    checkpoint, max_tokens = trainer.checkpoint, config.max_micro_batch_tokens
    if max_tokens is not None and max_tokens < data.max_length:
        size = model.ulysses_sequence_parallel_size
        together = (
            f" on each of {size} ranks (model.ulysses_sequence_parallel_size)" if size > 1 else ""
        )
        yield (
            f"'data.max_token_len_per_gpu' ({data.max_token_len_per_gpu}){together} is below "
            f"'data.max_length' ({data.max_length}): a single sample would not fit; raise the "
            f"first or lower the second"
        )
    if problem := column_problem(data, "data."):
        yield problem
    is_selective = model.enable_gradient_checkpointing == SELECTIVE
    if model.compile and is_selective and trainer.device == "cpu":
        yield (
            "'model.enable_gradient_checkpointing=selective' and 'model.compile=true' go together "
            "on a GPU alone: attention on a CPU is no part of a compiled layer; use false or true"
        )
    if model.expert_parallel_size > 1:
        others = {
            "model.compile=true": model.compile,
            "model.fsdp_config.cpu_offload=true": model.fsdp_config.cpu_offload,
            "LoRA": model.has_adapters,
        }
        for name in (name for name, is_set in others.items() if is_set):
            yield (
                f"'model.expert_parallel_size={model.expert_parallel_size}' does not go with {name}; "
                f"remove one of the two"
            )
    if model.has_adapters and model.freeze:
        yield "'model.freeze' goes with full fine-tuning: LoRA freezes the whole model; remove one of the two"
    if model.has_adapters and model.new_tokens:
        yield "'model.new_tokens' goes with full fine-tuning: LoRA would leave the rows of new tokens untrained"
    if model.has_adapters and (model.random_weights or model.partial_pretrain == QUICKSTART):
        yield (
            "LoRA ('model.lora_rank', 'model.lora_adapter_path') needs pretrained weights, which "
            "its checkpoints do not hold: name a model in 'model.partial_pretrain', without "
            "'model.random_weights'"
        )
    if (trainer.resume_mode == "resume_path") != (trainer.resume_from_path is not None):
        yield "'trainer.resume_from_path' and 'trainer.resume_mode=resume_path' go together: set both or neither"
    if trainer.hang_timeout_s >= trainer.dist_timeout_s:
        yield (
            f"'trainer.hang_timeout_s' ({trainer.hang_timeout_s}) must be below "
            f"'trainer.dist_timeout_s' ({trainer.dist_timeout_s}): the hang must be found before a "
            f"collective gives up"
        )
    if "model" not in checkpoint.load_contents:
        yield "'trainer.checkpoint.load_contents' must contain 'model'"
    elif "extra" not in checkpoint.load_contents and trainer.resume_mode != "resume_path":
        yield (
            "'trainer.checkpoint.load_contents' without extra starts at step 1 again: only with "
            "resume_mode=resume_path"
        )
    if not set(LOADED) <= set(checkpoint.save_contents):
        yield (
            "'trainer.checkpoint.save_contents' must contain model, optimizer and extra: without "
            "them a run cannot resume"
        )
