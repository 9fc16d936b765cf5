"""The typed configuration (floor 0): every key, its type, and all checks that need no model and no data.

`conf/sft.yaml` holds the defaults and one comment per key; this file holds types and rules. It imports neither
torch nor hydra, so a mistyped key fails before anything slow starts.
"""

import dataclasses
import difflib
import math
import re
import types
import typing
from dataclasses import dataclass, field
from typing import Any

QUICKSTART = "quickstart"
BACKENDS = ("console", "wandb", "tensorboard", "mlflow")
SAVE_CONTENTS = ("model", "optimizer", "extra", "hf_model")
DTYPES = ("float32", "bfloat16", "float16")
RESUME_ALLOW = ("data", "train_batch_size", "seed", "tokenizer", "model_config")
AUTO, SELECTIVE = "auto", "selective"


class ConfigError(ValueError):
    """The user's configuration is wrong; the message names the key and a fix. Exit code 2."""


@dataclass(frozen=True)
class DataConfig:
    train_files: str | list[str]
    val_files: str | list[str] | None
    val_ratio: float
    train_batch_size: int
    micro_batch_size_per_gpu: int | None
    max_token_len_per_gpu: int | None
    max_length: int
    truncation: str
    messages_key: str
    tools_key: str
    prompt_key: str | None
    response_key: str | None
    chat_template: str | None
    apply_chat_template_kwargs: dict[str, Any]
    train_max_samples: int
    val_max_samples: int
    on_bad_row: str
    max_bad_fraction: float
    num_workers: int
    cache_dir: str


@dataclass(frozen=True)
class FsdpConfig:
    param_dtype: str
    reduce_dtype: str
    cpu_offload: bool
    reshard_after_forward: bool | str
    fsdp_size: int


@dataclass(frozen=True)
class ModelConfig:
    partial_pretrain: str
    random_weights: bool
    trust_remote_code: bool
    enable_gradient_checkpointing: bool | str
    compile: bool
    attention: str
    fsdp_config: FsdpConfig


@dataclass(frozen=True)
class OptimConfig:
    lr: float | None
    betas: list[float]
    eps: float
    weight_decay: float
    clip_grad: float
    lr_scheduler: str
    lr_warmup_steps_ratio: float
    min_lr_ratio: float
    stable_ratio: float


@dataclass(frozen=True)
class CheckpointConfig:
    save_contents: list[str]
    load_contents: list[str]
    export_dtype: str
    async_save: bool
    save_timeout_s: int


@dataclass(frozen=True)
class TrainerConfig:
    project_name: str
    experiment_name: str
    default_local_dir: str
    logger: list[str]
    total_epochs: int
    total_training_steps: int | None
    save_freq: int
    test_freq: int
    max_ckpt_to_keep: int | None
    resume_mode: str
    resume_from_path: str | None
    resume_allow: list[str]
    max_time: str | None
    seed: int
    device: str
    max_nonfinite_steps: int
    dist_timeout_s: int
    hang_timeout_s: int
    checkpoint: CheckpointConfig


@dataclass(frozen=True)
class Config:
    data: DataConfig
    model: ModelConfig
    optim: OptimConfig
    trainer: TrainerConfig
    resolved: dict[str, Any] = field(default_factory=dict, compare=False)
    """The same tree as plain containers: what is printed, stored with the run and sent to trackers."""


def parse_config(tree: dict[str, Any]) -> Config:
    """Turn a resolved mapping into a checked `Config`. Raises `ConfigError` naming the key, the cause and a fix."""
    if "experiment" in tree:
        tree = {key: value for key, value in tree.items() if key != "experiment"}
    config = dataclasses.replace(_build(Config, tree, prefix="", skip=("resolved",)), resolved=tree)
    _check_data(config.data)
    _check_model(config.model)
    _check_optim(config.optim)
    _check_trainer(config.trainer)
    return config


def known_keys(cls: Any = Config, prefix: str = "") -> list[str]:
    """All dotted leaf keys, in the order of the schema."""
    keys: list[str] = []
    for name, hint in typing.get_type_hints(cls).items():
        if name == "resolved":
            continue
        dotted = f"{prefix}{name}"
        keys += known_keys(hint, f"{dotted}.") if dataclasses.is_dataclass(hint) else [dotted]
    return keys


def nearest_key(dotted: str) -> str | None:
    """The known key closest to a mistyped one, judged by its last part first, then as a whole."""
    keys = known_keys()
    by_leaf = {key.rsplit(".", 1)[-1]: key for key in keys}
    leaf = difflib.get_close_matches(dotted.rsplit(".", 1)[-1], by_leaf, n=1, cutoff=0.6)
    if leaf:
        return by_leaf[leaf[0]]
    whole = difflib.get_close_matches(dotted, keys, n=1, cutoff=0.5)
    return whole[0] if whole else None


def unknown_key_error(dotted: str) -> ConfigError:
    nearest = nearest_key(dotted)
    hint = f"did you mean '{nearest}'?" if nearest else "see conf/sft.yaml for all keys"
    return ConfigError(f"unknown configuration key '{dotted}': {hint}")


def _build(cls: Any, tree: Any, *, prefix: str, skip: tuple[str, ...] = ()) -> Any:
    if not isinstance(tree, dict):
        raise ConfigError(f"'{prefix.rstrip('.')}' must be a group of keys, got {tree!r}")
    hints = {name: hint for name, hint in typing.get_type_hints(cls).items() if name not in skip}
    for name in tree:
        if name not in hints:
            raise unknown_key_error(f"{prefix}{name}")
    values = {}
    for name, hint in hints.items():
        dotted = f"{prefix}{name}"
        if name not in tree:
            raise ConfigError(f"missing configuration key '{dotted}' (conf/sft.yaml holds its default)")
        if dataclasses.is_dataclass(hint):
            values[name] = _build(hint, tree[name], prefix=f"{dotted}.")
        else:
            values[name] = _coerce(tree[name], hint, dotted)
    return cls(**values)


def _coerce(value: Any, hint: Any, dotted: str) -> Any:
    """Check `value` against `hint`; numbers written as text (`1e-5`) and whole floats are accepted where they fit."""
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in typing.get_args(hint):
            return None
        for option in typing.get_args(hint):
            if option is not type(None):
                try:
                    return _coerce(value, option, dotted)
                except ConfigError:
                    continue
    elif origin is list:
        if isinstance(value, list | tuple):
            return [_coerce(item, typing.get_args(hint)[0], dotted) for item in value]
    elif origin is dict:
        if isinstance(value, dict):
            return value
    elif hint is bool:
        if isinstance(value, bool):
            return value
    elif hint in (int, float) and not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = float("nan")
        if hint is float and number == number:
            return number
        if hint is int and math.isfinite(number) and number == int(number):
            return int(number)
    elif hint is str and isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    name = getattr(hint, "__name__", None) or str(hint)
    raise ConfigError(f"'{dotted}' must be {name if origin is None else hint}, got {value!r}")


def parse_duration_s(text: str) -> float:
    """Seconds in a time such as `3h30m`, `90m` or `45s`. Raises `ConfigError`."""
    match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text.strip())
    numbers = [int(part or 0) for part in match.groups()] if match else []
    _require(any(numbers), f"'trainer.max_time' must be a time such as 3h30m, 90m or 45s; got '{text}'")
    days, hours, minutes, seconds = numbers
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _one_of(dotted: str, value: bool | str, allowed: tuple[str, ...]) -> None:
    value = str(value).lower() if isinstance(value, bool) else value
    if value not in allowed:
        close = difflib.get_close_matches(value, allowed, n=1)
        hint = f" (did you mean '{close[0]}'?)" if close else ""
        raise ConfigError(f"'{dotted}' must be one of {', '.join(allowed)}; got '{value}'{hint}")


def _at_least_1(group: str, section: Any, *names: str, other: int | None = 1, meaning: str = "") -> None:
    """Each of the keys is at least 1, or the `other` value, which has a meaning of its own."""
    for name in names:
        value = getattr(section, name)
        allowed = f"{meaning} or at least 1" if meaning else "at least 1"
        _require(
            value == other or (value is not None and value >= 1), f"'{group}.{name}' must be {allowed}, got {value}"
        )


def _check_data(data: DataConfig) -> None:
    _one_of("data.truncation", data.truncation, ("error", "left", "right", "drop"))
    _one_of("data.on_bad_row", data.on_bad_row, ("error", "skip"))
    _at_least_1("data", data, "train_batch_size", "max_length")
    _at_least_1("data", data, "micro_batch_size_per_gpu", "max_token_len_per_gpu", other=None, meaning="null")
    _at_least_1("data", data, "train_max_samples", "val_max_samples", other=-1, meaning="-1 (all)")
    _require(data.num_workers >= 0, f"'data.num_workers' must not be negative, got {data.num_workers}")
    _require(0 <= data.val_ratio < 1, f"'data.val_ratio' must be in [0, 1), got {data.val_ratio}")
    _require(0 <= data.max_bad_fraction <= 1, f"'data.max_bad_fraction' must be in [0, 1], got {data.max_bad_fraction}")
    _require(
        data.max_token_len_per_gpu is None or data.max_token_len_per_gpu >= data.max_length,
        f"'data.max_token_len_per_gpu' ({data.max_token_len_per_gpu}) is below 'data.max_length' ({data.max_length}): "
        f"a single sample would not fit; raise the first or lower the second",
    )
    _require(
        (data.prompt_key is None) == (data.response_key is None),
        "'data.prompt_key' and 'data.response_key' go together: set both or neither",
    )
    _require(bool(data.train_files), "'data.train_files' is empty: give a path, a glob or a list")


def _check_model(model: ModelConfig) -> None:
    fsdp = model.fsdp_config
    _one_of("model.attention", model.attention, (AUTO, "packed", "per_document"))
    _one_of("model.enable_gradient_checkpointing", model.enable_gradient_checkpointing, ("true", "false", SELECTIVE))
    _one_of("model.fsdp_config.reshard_after_forward", fsdp.reshard_after_forward, ("true", "false", AUTO))
    _one_of("model.fsdp_config.param_dtype", fsdp.param_dtype, (AUTO, *DTYPES[:2]))
    _one_of("model.fsdp_config.reduce_dtype", fsdp.reduce_dtype, DTYPES[:2])
    _at_least_1("model.fsdp_config", fsdp, "fsdp_size", other=-1, meaning="-1 (all ranks)")
    _require(
        not (model.compile and model.enable_gradient_checkpointing == SELECTIVE),
        "'model.enable_gradient_checkpointing=selective' and 'model.compile=true' exclude each other: compiled "
        "layers already compute again what is cheap; use false or true",
    )


def _check_optim(optim: OptimConfig) -> None:
    _one_of("optim.lr_scheduler", optim.lr_scheduler, ("cosine", "linear", "constant", "wsd"))
    _require(optim.lr is None or 0 < optim.lr < 1, f"'optim.lr' must be in (0, 1), got {optim.lr}")
    _require(
        len(optim.betas) == 2 and all(0 <= b < 1 for b in optim.betas), "'optim.betas' must be two numbers in [0, 1)"
    )
    _require(optim.eps > 0, f"'optim.eps' must be positive, got {optim.eps}")
    _require(optim.weight_decay >= 0, f"'optim.weight_decay' must not be negative, got {optim.weight_decay}")
    _require(optim.clip_grad > 0, f"'optim.clip_grad' must be positive (large: never clips), got {optim.clip_grad}")
    for name in ("lr_warmup_steps_ratio", "min_lr_ratio", "stable_ratio"):
        value = getattr(optim, name)
        _require(0 <= value <= 1, f"'optim.{name}' must be in [0, 1], got {value}")


def _check_trainer(trainer: TrainerConfig) -> None:
    _one_of("trainer.resume_mode", trainer.resume_mode, ("auto", "disable", "resume_path"))
    _one_of("trainer.device", trainer.device, (AUTO, "cuda", "cpu"))
    for name in ("project_name", "experiment_name", "default_local_dir"):
        value = getattr(trainer, name)
        _require(bool(value.strip()), f"'trainer.{name}' is empty")
        is_path = name == "default_local_dir"
        _require(
            is_path or ".." not in value.split("/"), f"'trainer.{name}' must not lead out of checkpoints/: {value}"
        )
    for backend in trainer.logger:
        _one_of("trainer.logger", backend, BACKENDS)
    _at_least_1("trainer", trainer, "save_freq", "test_freq", other=-1, meaning="-1 (only at the end)")
    _at_least_1("trainer", trainer, "total_training_steps", "max_ckpt_to_keep", other=None, meaning="null")
    _at_least_1("trainer", trainer, "total_epochs", "max_nonfinite_steps", "dist_timeout_s", "hang_timeout_s")
    _require(
        (trainer.resume_mode == "resume_path") == (trainer.resume_from_path is not None),
        "'trainer.resume_from_path' and 'trainer.resume_mode=resume_path' go together: set both or neither",
    )
    _require(
        trainer.hang_timeout_s < trainer.dist_timeout_s,
        f"'trainer.hang_timeout_s' ({trainer.hang_timeout_s}) must be below 'trainer.dist_timeout_s' "
        f"({trainer.dist_timeout_s}): the hang must be found before a collective gives up",
    )
    for name in trainer.resume_allow:
        _one_of("trainer.resume_allow", name, RESUME_ALLOW)
    if trainer.max_time is not None:
        parse_duration_s(trainer.max_time)
    _check_checkpoint(trainer)


def _check_checkpoint(trainer: TrainerConfig) -> None:
    checkpoint = trainer.checkpoint
    for name in ("save_contents", "load_contents"):
        for item in getattr(checkpoint, name):
            _one_of(f"trainer.checkpoint.{name}", item, SAVE_CONTENTS if name == "save_contents" else SAVE_CONTENTS[:3])
    _one_of("trainer.checkpoint.export_dtype", checkpoint.export_dtype, DTYPES)
    _at_least_1("trainer.checkpoint", checkpoint, "save_timeout_s")
    _require("model" in checkpoint.load_contents, "'trainer.checkpoint.load_contents' must contain 'model'")
    _require(
        "extra" in checkpoint.load_contents or trainer.resume_mode == "resume_path",
        "'trainer.checkpoint.load_contents' without extra starts at step 1 again: only with resume_mode=resume_path",
    )
    _require(
        {"model", "optimizer", "extra"} <= set(checkpoint.save_contents),
        "'trainer.checkpoint.save_contents' must contain model, optimizer and extra: without them a run cannot resume",
    )
