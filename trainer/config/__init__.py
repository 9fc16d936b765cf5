"""The typed configuration (floor 0): every key, its type, and all checks that need no model and no data.

It imports neither torch nor hydra, so a mistyped key fails before anything slow starts.
"""

import dataclasses
from typing import Any

from trainer.config.checks import check, parse_duration_s
from trainer.config.foreign import find_foreign, own_words
from trainer.config.parse import build, known_keys, nearest_key, unknown_key_error
from trainer.config.schema import (
    AUTO,
    BACKENDS,
    DTYPES,
    QUICKSTART,
    RESUME_ALLOW,
    SAVE_CONTENTS,
    SELECTIVE,
    CheckpointConfig,
    Config,
    ConfigError,
    DataConfig,
    FsdpConfig,
    GuardConfig,
    ModelConfig,
    OptimConfig,
    TrainerConfig,
)

__all__ = [
    "AUTO",
    "BACKENDS",
    "DTYPES",
    "QUICKSTART",
    "RESUME_ALLOW",
    "SAVE_CONTENTS",
    "SELECTIVE",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "FsdpConfig",
    "GuardConfig",
    "ModelConfig",
    "OptimConfig",
    "TrainerConfig",
    "find_foreign",
    "known_keys",
    "nearest_key",
    "own_words",
    "parse_config",
    "parse_duration_s",
    "unknown_key_error",
]


def parse_config(tree: dict[str, Any]) -> Config:
    """Turn a resolved mapping into a checked `Config`. Raises `ConfigError` naming the key, the cause and a fix."""
    if "experiment" in tree:
        tree = {key: value for key, value in tree.items() if key != "experiment"}
    config = dataclasses.replace(build(Config, tree, prefix="", skip=("resolved",)), resolved=tree)
    check(config)
    return config
