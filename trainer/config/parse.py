"""Builds and checks a `Config` from the values of keys. OmegaConf converts each value to its key's type.

The message for a mistyped key suggests the nearest known one.
"""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, field, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any, get_args, get_origin

import omegaconf
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config.data import QUICKSTART, column_problem, sources_of
from trainer.config.keys import ConfigError, declared, is_group, keys_of, one_of
from trainer.config.schema import ALWAYS_SAVED, Config

Implementations = Mapping[str, Mapping[str, object]]
"""{key whose value names an implementation: {name: implementation}}."""


def default_tree(cls: type = Config) -> DictConfig:
    """Return the keys of a group with their defaults, in a tree that converts assigned values."""
    tree: DictConfig = OmegaConf.structured(_schema(cls))
    return tree


@cache
def _schema(cls: type) -> type:
    """Return a group in the form that OmegaConf needs: not frozen, and without unions that contain
    a list.
    """
    members: list[Any] = []
    for own in declared(cls).values():
        kind = own.type
        default = own.default
        if is_group(kind):
            kind = _schema(kind)
            default = field(default_factory=kind)
        elif own.default_factory is not MISSING:
            default = field(default_factory=own.default_factory)
        elif default is MISSING:
            default = omegaconf.MISSING
        members.append((own.name, Any if _has_entries(own) else kind, default))
    return dataclasses.make_dataclass(cls.__name__, members)


def _has_entries(own: "Field[Any]") -> bool:
    """Return True for a key whose value is a list of groups, or either a string or a list."""
    return any(get_origin(kind) is list or is_dataclass(kind) for kind in get_args(own.type))


def assign(
    tree: DictConfig, values: Mapping[str, Any], cls: type = Config, prefix: str = ""
) -> list[str]:
    """Set keys of a tree of `cls` from nested mappings. Return a problem for each wrong key."""
    problems = []
    keys = declared(cls)
    for name, value in values.items():
        own = keys.get(name)
        dotted = f"{prefix}{name}"
        if own is None:
            problems.append(unknown_key(dotted, [f"{prefix}{key}" for key in keys]))
        elif is_group(own.type):
            if isinstance(value, Mapping):
                problems += assign(tree[own.name], value, own.type, f"{dotted}.")
            else:
                problems.append(f"'{dotted}' must be a group of keys, got {value!r:.80}")
        else:
            problems += _set(tree, own, value, dotted)
    return problems


def _set(tree: DictConfig, own: "Field[Any]", value: Any, dotted: str) -> Iterator[str]:
    """Set one key. Yield the problem, if any."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # OmegaConf converts it back if the key's type is float
    elif get_origin(own.type) is list and not isinstance(value, list):
        value = [value]
    try:
        OmegaConf.update(tree, own.name, value, merge=get_origin(own.type) is dict)
    except (OmegaConfBaseException, ValueError) as error:
        yield f"'{dotted}': {str(error).splitlines()[0]}"


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


def _build(cls: type, values: Mapping[str, Any], prefix: str, problems: list[str]) -> Any:
    """Build a group from the values of its fields. Append the problems that its checks find."""
    arguments = {}
    for name, own in declared(cls).items():
        value = values[own.name]
        dotted = f"{prefix}{name}"
        if is_group(own.type):
            value = _build(own.type, value, f"{dotted}.", problems)
        elif _has_entries(own):
            value = _with_entries(value, own, dotted, problems)
        checks = own.metadata["checks"] if value is not None else ()
        found = (check(value) for check in checks)
        problems += [f"'{dotted}' {problem}" for problem in filter(None, found)][:1]
        arguments[own.name] = value
    return cls(**arguments)


def _with_entries(value: Any, own: "Field[Any]", dotted: str, problems: list[str]) -> Any:
    """Return the value of a key with entries: a string, or a list in which mappings have become
    groups.
    """
    kinds = own.type, *get_args(own.type)
    if type(value) in kinds:
        return value
    (item_kind,) = (get_args(kind)[0] for kind in kinds if get_origin(kind) is list)
    item_kinds = item_kind, *get_args(item_kind)
    group = item_kinds[-1]  # in a union the text comes first
    found = []
    for number, item in enumerate(value if isinstance(value, list) else [value]):
        if isinstance(item, Mapping) and is_dataclass(group):
            found.append(_entry(group, item, f"{dotted}[{number}].", problems))
        elif type(item) in item_kinds:
            found.append(item)
        else:
            problems.append(f"'{dotted}' does not accept {item!r:.80}")
    return found


def _entry(cls: Any, values: Mapping[str, Any], prefix: str, problems: list[str]) -> Any:
    """Return the group for an entry of a list; None if it has problems."""
    tree = default_tree(cls)
    found = assign(tree, values, cls, prefix)
    found += [f"'{prefix}{name}' is missing" for name in OmegaConf.missing_keys(tree)]
    problems += found
    return None if found else _build(cls, OmegaConf.to_container(tree), prefix, problems)  # type: ignore[arg-type]


def parse_recorded(values: Mapping[str, Any]) -> Config:
    """Return the `Config` that a run recorded. Keys that this version does not have are ignored.
    Raises `ConfigError`.
    """
    tree = default_tree()
    assign(tree, values)
    return to_config(tree)


def contradictions(config: Config) -> Iterator[str]:
    """Yield a message with a fix for each contradiction between keys that are each valid on their
    own.
    """
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
    has_experts = model.expert_parallel_size > 1
    has_lora = model.has_adapters
    excluding = (
        ("model.expert_parallel_size", "model.compile", has_experts and model.compile),
        ("model.expert_parallel_size", "LoRA", has_experts and has_lora),
        (
            "model.expert_parallel_size",
            "model.fsdp_config.cpu_offload",
            has_experts and model.fsdp_config.cpu_offload,
        ),
        ("model.freeze", "LoRA", model.freeze and has_lora),
        ("model.new_tokens", "LoRA", model.new_tokens and has_lora),
        (
            "model.modules_to_save",
            "model.lora_adapter_path",
            model.modules_to_save and model.lora_adapter_path,
        ),
    )
    for name, other, are_both_set in excluding:
        if are_both_set:
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
