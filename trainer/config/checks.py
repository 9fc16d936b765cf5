"""What must hold between values: all checks that need no model and no data."""

import difflib
import re
from collections.abc import Collection
from typing import Any

from trainer.config.schema import (
    AUTO,
    BACKENDS,
    DTYPES,
    RESUME_ALLOW,
    SAVE_CONTENTS,
    SELECTIVE,
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    OptimConfig,
    TrainerConfig,
)

MAX_WORKERS = 64
YEAR_S = 365 * 24 * 3600


def check(config: Config) -> None:
    """Raises `ConfigError` naming the key, the cause and a fix."""
    _check_data(config.data)
    _check_model(config.model)
    _check_optim(config.optim)
    _check_trainer(config.trainer)


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


def one_of(dotted: str, value: bool | str, allowed: Collection[str]) -> None:
    """Raises `ConfigError` naming what is allowed and what is near."""
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


def _at_most(group: str, section: Any, limit: int, why: str, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        _require(value <= limit, f"'{group}.{name}' must be at most {limit} ({why}), got {value}")


def _check_data(data: DataConfig) -> None:
    one_of("data.truncation", data.truncation, ("error", "left", "right", "drop"))
    one_of("data.special_in_content", data.special_in_content, ("error", "text", "parse"))
    one_of("data.on_bad_row", data.on_bad_row, ("error", "skip"))
    _at_least_1("data", data, "train_batch_size", "max_length")
    _at_least_1("data", data, "micro_batch_size_per_gpu", "max_token_len_per_gpu", other=None, meaning="null")
    _at_least_1("data", data, "train_max_samples", "val_max_samples", other=-1, meaning="-1 (all)")
    _require(data.num_workers >= 0, f"'data.num_workers' must not be negative, got {data.num_workers}")
    _at_most("data", data, MAX_WORKERS, "each is a process beside every rank", "num_workers")
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
    one_of("model.attention", model.attention, (AUTO, "packed", "per_document"))
    one_of("model.enable_gradient_checkpointing", model.enable_gradient_checkpointing, ("true", "false", SELECTIVE))
    one_of("model.fsdp_config.reshard_after_forward", fsdp.reshard_after_forward, ("true", "false", AUTO))
    one_of("model.fsdp_config.param_dtype", fsdp.param_dtype, (AUTO, *DTYPES[:2]))
    one_of("model.fsdp_config.reduce_dtype", fsdp.reduce_dtype, DTYPES[:2])
    _at_least_1("model.fsdp_config", fsdp, "fsdp_size", other=-1, meaning="-1 (all ranks)")
    _require(
        not (model.compile and model.enable_gradient_checkpointing == SELECTIVE),
        "'model.enable_gradient_checkpointing=selective' and 'model.compile=true' exclude each other: compiled "
        "layers already compute again what is cheap; use false or true",
    )


def _check_optim(optim: OptimConfig) -> None:
    one_of("optim.lr_scheduler", optim.lr_scheduler, ("cosine", "linear", "constant", "wsd"))
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
    one_of("trainer.resume_mode", trainer.resume_mode, ("auto", "disable", "resume_path"))
    one_of("trainer.device", trainer.device, (AUTO, "cuda", "cpu"))
    for name in ("project_name", "experiment_name", "default_local_dir"):
        value = getattr(trainer, name)
        _require(bool(value.strip()), f"'trainer.{name}' is empty")
        is_path = name == "default_local_dir"
        _require(
            is_path or ".." not in value.split("/"), f"'trainer.{name}' must not lead out of checkpoints/: {value}"
        )
    for backend in trainer.logger:
        one_of("trainer.logger", backend, BACKENDS)
    _at_least_1("trainer", trainer, "save_freq", "test_freq", other=-1, meaning="-1 (only at the end)")
    _at_least_1("trainer", trainer, "total_training_steps", "max_ckpt_to_keep", other=None, meaning="null")
    _at_least_1("trainer", trainer, "total_epochs", "max_nonfinite_steps", "dist_timeout_s", "hang_timeout_s")
    _at_most("trainer", trainer, YEAR_S, "a year", "dist_timeout_s", "hang_timeout_s")
    _require(
        (trainer.resume_mode == "resume_path") == (trainer.resume_from_path is not None),
        "'trainer.resume_from_path' and 'trainer.resume_mode=resume_path' go together: set both or neither",
    )
    _require(
        trainer.hang_timeout_s < trainer.dist_timeout_s,
        f"'trainer.hang_timeout_s' ({trainer.hang_timeout_s}) must be below 'trainer.dist_timeout_s' "
        f"({trainer.dist_timeout_s}): the hang must be found before a collective gives up",
    )
    _at_least_1("trainer", trainer, "early_stop_patience", other=None, meaning="null")
    _require(
        trainer.early_stop_min_delta >= 0,
        f"'trainer.early_stop_min_delta' must not be negative, got {trainer.early_stop_min_delta}",
    )
    one_of("trainer.roll_detail", trainer.roll_detail, ("off", "checkpoint", "step"))
    one_of("trainer.guard.on_nonfinite", trainer.guard.on_nonfinite, ("stop", "rollback"))
    one_of("trainer.guard.on_severe", trainer.guard.on_severe, ("warn", "skip", "rollback", "stop"))
    one_of("trainer.guard.on_diverging", trainer.guard.on_diverging, ("warn", "rollback", "stop"))
    for name in trainer.resume_allow:
        one_of("trainer.resume_allow", name, RESUME_ALLOW)
    if trainer.max_time is not None:
        parse_duration_s(trainer.max_time)
    _check_checkpoint(trainer)


def _check_checkpoint(trainer: TrainerConfig) -> None:
    checkpoint = trainer.checkpoint
    for name in ("save_contents", "load_contents"):
        for item in getattr(checkpoint, name):
            one_of(f"trainer.checkpoint.{name}", item, SAVE_CONTENTS if name == "save_contents" else SAVE_CONTENTS[:3])
    one_of("trainer.checkpoint.export_dtype", checkpoint.export_dtype, DTYPES)
    _at_least_1("trainer.checkpoint", checkpoint, "save_timeout_s")
    _at_most("trainer.checkpoint", checkpoint, YEAR_S, "a year", "save_timeout_s")
    _require("model" in checkpoint.load_contents, "'trainer.checkpoint.load_contents' must contain 'model'")
    _require(
        "extra" in checkpoint.load_contents or trainer.resume_mode == "resume_path",
        "'trainer.checkpoint.load_contents' without extra starts at step 1 again: only with resume_mode=resume_path",
    )
    _require(
        {"model", "optimizer", "extra"} <= set(checkpoint.save_contents),
        "'trainer.checkpoint.save_contents' must contain model, optimizer and extra: without them a run cannot resume",
    )
