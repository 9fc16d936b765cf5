"""The typed configuration (floor 0): every key, its type, and all checks that need no model and no data.

It imports neither torch nor hydra, so a mistyped key fails before anything slow starts.
"""

from trainer.config.data import QUICKSTART, DataConfig, RowKeys, Source, SourceConfig, sources_of
from trainer.config.foreign import find_foreign, own_words
from trainer.config.keys import ConfigError, did_you_mean, parse_duration_s
from trainer.config.parse import known_keys, parse_config, problem_with_key
from trainer.config.schema import (
    AUTO,
    DTYPES,
    MAX_TOKENS,
    OFFLOAD,
    RECOMPUTE,
    RESUME_ALLOW,
    SELECTIVE,
    CheckpointConfig,
    Config,
    FsdpConfig,
    GuardConfig,
    ModelConfig,
    OptimConfig,
    TrainerConfig,
)

__all__ = [
    "AUTO",
    "DTYPES",
    "MAX_TOKENS",
    "OFFLOAD",
    "QUICKSTART",
    "RECOMPUTE",
    "RESUME_ALLOW",
    "SELECTIVE",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "FsdpConfig",
    "GuardConfig",
    "ModelConfig",
    "OptimConfig",
    "RowKeys",
    "Source",
    "SourceConfig",
    "TrainerConfig",
    "did_you_mean",
    "find_foreign",
    "known_keys",
    "own_words",
    "parse_config",
    "parse_duration_s",
    "problem_with_key",
    "sources_of",
]
