"""Every key of the configuration and its type; `conf/sft.yaml` holds the defaults and one comment per key."""

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
    special_in_content: str
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
    loss: str
    attention: str
    fsdp_config: FsdpConfig


@dataclass(frozen=True)
class OptimConfig:
    name: str
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
class GuardConfig:
    on_nonfinite: str
    on_severe: str
    on_diverging: str
    rules: list[str]


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
    early_stop_patience: int | None
    early_stop_min_delta: float
    roll_detail: str
    trace: bool
    guard: GuardConfig
    checkpoint: CheckpointConfig


@dataclass(frozen=True)
class Config:
    data: DataConfig
    model: ModelConfig
    optim: OptimConfig
    trainer: TrainerConfig
    resolved: dict[str, Any] = field(default_factory=dict, compare=False)
    """The same tree as plain containers: what is printed, stored with the run and sent to trackers."""
