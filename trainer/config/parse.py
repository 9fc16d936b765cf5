"""Builds and checks a `Config` from the values of keys. Each value is converted to its key's type.

The message for a mistyped key suggests the closest known one.
"""

import dataclasses
import difflib
import os
from collections.abc import Iterator, Mapping
from configparser import ConfigParser
from contextlib import suppress
from dataclasses import MISSING, Field, is_dataclass
from operator import attrgetter
from types import UnionType
from typing import Any, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config.data import QUICKSTART, column_problem, sources_of
from trainer.config.keys import ConfigError, declared, is_group, keys_of, one_of
from trainer.config.schema import ALWAYS_SAVED, Config

Implementations = Mapping[str, Mapping[str, object]]
"""{key whose value names an implementation: {name: implementation}}."""
BOOLEANS = ConfigParser.BOOLEAN_STATES
"""{text: its value}: true, yes, on, 1 and their opposites."""
EXPECTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def default_tree() -> DictConfig:
    """Return all keys with their defaults."""
    defaults = dataclasses.asdict(Config())
    del defaults["resolved"]
    tree: DictConfig = OmegaConf.create(defaults)
    return tree


def assign(
    tree: DictConfig,
    values: Mapping[str, Any],
    cls: type = Config,
    prefix: str = "",
) -> list[str]:
    """Set keys of a tree from nested mappings. Return a problem for each wrong key."""
    problems = []
    keys = declared(cls)
    for name, value in values.items():
        own = keys.get(name)
        dotted = f"{prefix}{name}"
        if own is None:
            problems.append(unknown_key(dotted, [f"{prefix}{key}" for key in keys]))
        elif is_group(own.type) and isinstance(value, Mapping):
            problems += assign(tree[name], value, own.type, f"{dotted}.")
        else:
            problems += _set(tree, own, value, dotted)
    return problems


def _set(
    tree: DictConfig,
    own: "Field[Any]",
    value: Any,
    dotted: str,
) -> list[str]:
    """Set one key. Return its problems."""
    problems: list[str] = []
    converted = _converted(own.type, value, dotted, problems)
    is_reference = "${" in str(value)  # it is converted when it is resolved
    if problems and not is_reference:
        return problems
    has_entries = isinstance(converted, list) and any(map(is_dataclass, converted))
    if not (is_reference or has_entries):
        value = converted
    try:
        OmegaConf.update(tree, own.name, value, merge=get_origin(own.type) is dict)
    except (OmegaConfBaseException, ValueError) as error:
        return [f"'{dotted}': {str(error).splitlines()[0]}"]
    return []


def unknown_key(dotted: str, siblings: list[str]) -> str:
    """Return the message for an unknown key. It suggests the key whose last part is most similar,
    preferably from the same group.
    """
    known = {name.rpartition(".")[2]: name for name in [*keys_of(Config), *siblings]}
    near = difflib.get_close_matches(dotted.rpartition(".")[2], known, n=1, cutoff=0.7)
    hint = (
        "no key has a similar name. `train --help` lists all keys, and docs/coming_from.md those of "
        "other trainers"
    )
    if near:
        hint = f"did you mean '{known[near[0]]}'?"
    return f"unknown configuration key '{dotted}': {hint}"


def to_config(tree: DictConfig, implementations: Implementations | None = None) -> Config:
    """Check a tree of keys and return it as a `Config`. Raises `ConfigError` with all problems."""
    try:
        resolved: Any = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"'{error.full_key}': {str(error).splitlines()[0]}") from error
    problems: list[str] = []
    config = dataclasses.replace(_build(Config, resolved, "", problems), resolved=resolved)
    for dotted, known in (implementations or {}).items():
        if problem := one_of(*known)(attrgetter(dotted)(config)):
            problems.append(f"'{dotted}' {problem}")
    problems = problems or list(contradictions(config))
    if problems:
        raise ConfigError("\n".join(problems))
    for name in ("train_files", "val_files"):
        sources_of(config.data, name)
    return config


def _build(
    cls: type,
    values: Mapping[str, Any],
    prefix: str,
    problems: list[str],
) -> Any:
    """Build a group, or an entry of a list, from the values of its keys. Append errors to
    `problems`.
    """
    keys = declared(cls)
    siblings = [f"{prefix}{key}" for key in keys]
    problems += [unknown_key(f"{prefix}{name}", siblings) for name in values if name not in keys]
    arguments = {}
    for name, own in keys.items():
        dotted = f"{prefix}{name}"
        if name in values:
            found: list[str] = []
            value = _converted(own.type, values[name], dotted, found)
            if value is not None and not found:
                results = (check(value) for check in own.metadata["checks"])
                found = [f"'{dotted}' {problem}" for problem in results if problem][:1]
            problems += found
            arguments[own.name] = value
        elif own.default is MISSING and own.default_factory is MISSING:
            problems.append(f"'{dotted}' is missing")
            arguments[own.name] = None
    return cls(**arguments)


def _converted(
    kind: Any,
    value: Any,
    dotted: str,
    problems: list[str],
) -> Any:
    """Return a value in the type of its key. If that is impossible, append a problem and return
    None.
    """
    origin = get_origin(kind)
    members = get_args(kind)
    if origin is list:
        if not isinstance(value, list):
            return [_converted(members[0], value, dotted, problems)]
        return [
            _converted(members[0], item, f"{dotted}[{number}]", problems)
            for number, item in enumerate(value)
        ]
    if value is None and type(None) in members:
        return None
    if origin is UnionType:
        by_type = {
            dict if is_group(member) else get_origin(member) or member: member for member in members
        }
        kind = by_type.get(type(value), by_type.get(list, members[0]))
        return _converted(kind, value, dotted, problems)
    if isinstance(value, dict) and is_group(kind):
        return _build(kind, value, f"{dotted}.", problems)
    if isinstance(value, dict) and origin is dict:
        return value
    is_scalar = type(value) in (str, int, float)
    with suppress(ValueError, OverflowError, KeyError):
        if kind is bool:
            return BOOLEANS[str(value).lower()]
        if kind is str and is_scalar:
            text = str(value)
            return os.path.expanduser(text) if "/" in text else text  # a path may begin with `~`
        if kind in (int, float) and is_scalar:
            number = kind(value)
            if isinstance(value, str) or number == value:
                return number
    expected = EXPECTED.get(kind, "a group of keys")
    problems.append(f"'{dotted}' must be {expected}, got {value!r:.80}")
    return None


def parse_recorded(values: Mapping[str, Any]) -> Config:
    """Return the `Config` that a run recorded. Keys that this version does not have are ignored.
    Raises `ConfigError`.
    """
    tree = default_tree()
    assign(tree, values)
    return to_config(tree)


def contradictions(config: Config) -> Iterator[str]:
    """Yield a message with a fix for each contradiction between individually valid keys."""
    data = config.data
    model = config.model
    trainer = config.trainer
    max_tokens = config.max_micro_batch_tokens
    if max_tokens is not None and max_tokens < data.max_length:
        yield (
            f"data.max_token_len_per_gpu={data.max_token_len_per_gpu} times "
            f"model.ulysses_sequence_parallel_size={model.ulysses_sequence_parallel_size} is less "
            f"than data.max_length={data.max_length}, so the longest samples would not fit. Fix: "
            f"raise data.max_token_len_per_gpu or lower data.max_length"
        )
    if problem := column_problem(data, "data."):
        yield problem
    has_lora = model.has_adapters
    is_used = {
        "LoRA": has_lora,
        "model.expert_parallel_size": model.expert_parallel_size > 1,
    }
    excluding = (
        ("model.expert_parallel_size", "model.compile"),
        ("model.expert_parallel_size", "LoRA"),
        ("model.expert_parallel_size", "model.fsdp_config.cpu_offload"),
        ("model.freeze", "LoRA"),
        ("model.new_tokens", "LoRA"),
        ("model.modules_to_save", "model.lora_adapter_path"),
    )
    for pair in excluding:
        if all(is_used[name] if name in is_used else attrgetter(name)(config) for name in pair):
            name, other = pair
            yield f"'{name}' does not work with {other}. Fix: remove one of them"
    for name in ("modules_to_save", "load_in_4bit"):
        if getattr(model, name) and not has_lora:
            yield f"'model.{name}' only works with LoRA. Fix: set model.lora_rank, or remove it"
    if model.has_adapters and (model.random_weights or model.partial_pretrain == QUICKSTART):
        yield (
            "LoRA ('model.lora_rank', 'model.lora_adapter_path') needs pretrained weights, because "
            "its checkpoints contain only adapters. Fix: set model.partial_pretrain to a pretrained "
            "model, and model.random_weights=false"
        )
    if (trainer.resume_mode == "resume_path") != (trainer.resume_from_path is not None):
        yield (
            "'trainer.resume_from_path' and 'trainer.resume_mode=resume_path' work only together. "
            "Fix: set both or neither"
        )
    if not set(ALWAYS_SAVED) <= set(trainer.checkpoint.save_contents):
        yield (
            "'trainer.checkpoint.save_contents' must contain model, optimizer and extra, because a "
            "run cannot resume without them"
        )
