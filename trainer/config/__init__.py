"""The typed configuration: every key, its type, and all checks that need neither model nor data.

Nothing here imports torch, so a mistyped key fails before slow imports.
"""

from trainer.config.data import QUICKSTART, DataConfig, RowKeys, Source, SourceConfig, sources_of
from trainer.config.keys import ConfigError, did_you_mean, keys_of, names_matching, parse_duration_s
from trainer.config.parse import assign, default_tree, parse_recorded, to_config
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
    GuardRule,
    ModelConfig,
    OptimConfig,
    OptimGroup,
    TrainerConfig,
)
