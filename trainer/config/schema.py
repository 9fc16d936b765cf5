"""Declares every key of the configuration once: type, default, meaning, checks.

`python tests/architecture/config_table.py` writes `conf/sft.yaml` and the tables of docs/config.md
from these declarations. `train/start/compose.py` checks values that name an implementation, such as
`model.loss` and `trainer.logger`.
"""

from dataclasses import MISSING, dataclass, field
from typing import Any

from trainer.config.data import AUTO, QUICKSTART, DataConfig
from trainer.config.keys import (
    at_least,
    count_or_all,
    duration,
    group,
    inside_checkpoints,
    key,
    not_empty,
    not_negative,
    one_of,
    positive,
    where,
    within,
)

MAX_TOKENS = "data.max_token_len_per_gpu"
RECOMPUTE = "model.enable_gradient_checkpointing"
DTYPES = ("float32", "bfloat16", "float16")
RESUME_ALLOW = (
    "data",
    "validation",
    "data.order",
    "train_batch_size",
    "seed",
    "tokenizer",
    "model_config",
    "other_parts",
)
SELECTIVE = "selective"
OFFLOAD = "offload"
YEAR_S = 365 * 24 * 3600
MIN_DIST_TIMEOUT_S = 60
ALWAYS_SAVED = ("model", "optimizer", "extra")
EXPORTS = ("hf_model", "merged_model")
"""Values of `save_contents` that export weights. For LoRA: the adapter, or the merged model."""
_RATIO = within("[0, 1]")


@dataclass(frozen=True)
class FsdpConfig:
    """Sharding and precision of parameters."""

    param_dtype: str = key(
        AUTO,
        "dtype of computation and of frozen parameters: bfloat16 | float32 | auto (bfloat16 if the "
        "hardware supports it)",
        one_of(AUTO, *DTYPES[:2]),
    )
    cpu_offload: bool = key(False, "keep parameters and optimizer state in host memory")
    reshard_after_forward: bool | str = key(
        AUTO,
        "true: free gathered parameters after each layer's forward pass (ZeRO-3); false: keep them "
        "for the backward pass (ZeRO-2); auto = true if several ranks share layers of more than 1 "
        "GiB in the compute dtype",
        one_of("true", "false", AUTO),
    )
    fsdp_size: int = key(
        -1,
        "number of ranks that shard one copy of the parameters; -1 = all; fewer = HSDP",
        count_or_all,
    )


@dataclass(frozen=True)
class ModelConfig:
    """The model and its trained parts."""

    partial_pretrain: str = key(
        QUICKSTART,
        "local directory or Hub id (downloaded once) of a causal LM; quickstart = the embedded tiny "
        "model",
    )
    random_weights: bool = key(
        False, "use only the architecture of partial_pretrain, with random weights"
    )
    new_tokens: list[str] = key(
        [],
        'special tokens to add, e.g. for a chat template: ["<|im_start|>","<|im_end|>"]; their '
        "embeddings start at the mean of all others plus a little noise",
        where(all, "must not be empty"),
    )
    trust_remote_code: bool = key(False, "allow Python code that comes with the model")
    master_dtype: str = key(
        "float32",
        "dtype of trained parameters: float32 | bfloat16 (updates use stochastic rounding)",
        one_of(*DTYPES[:2]),
    )
    enable_gradient_checkpointing: bool | str = key(
        False,
        "recompute activations in the backward pass, which saves memory but is slower; selective = "
        "keep matrix products and attention, a compromise; offload = like true, but the inputs of "
        "layers are kept in host memory (docs/memory.md)",
        one_of("true", "false", SELECTIVE, OFFLOAD),
    )
    compile: bool = key(False, "apply torch.compile to each decoder layer")
    loss: str = key(
        "cross_entropy",
        "training loss: cross_entropy | dft (each token's loss weighted by its probability, for "
        "pretrained weights); train/loss, the guard and validation always use cross_entropy; "
        "train/objective is the training loss",
    )
    attention: str = key(
        AUTO,
        "auto | packed (several documents per forward pass) | per_document (one document per forward "
        "pass; for any architecture)",
        one_of(AUTO, "packed", "per_document"),
    )
    lora_rank: int = key(
        0,
        "above 0: freeze the model and train LoRA adapters of this rank (extra lora: needs peft)",
        not_negative,
    )
    lora_alpha: int = key(
        16, "LoRA: the adapters' output is scaled by lora_alpha / lora_rank", positive
    )
    lora_dropout: float = key(
        0.0,
        "LoRA: fraction of an adapter's inputs that training sets to zero, at random for each step and rank",
        within("[0, 1)"),
    )
    use_rslora: bool = key(False, "LoRA: scale by lora_alpha / sqrt(lora_rank)")
    target_modules: str | list[str] = key(
        "all-linear",
        "LoRA: layers with an adapter: all-linear (all except the head, experts and routers), name "
        "endings such as [q_proj,experts.down_proj], or a regular expression for whole names",
        not_empty,
    )
    load_in_4bit: bool = key(
        False,
        "LoRA: store the frozen weights of linear layers as NF4, 4.5 bits each (QLoRA)",
    )
    modules_to_save: list[str] = key(
        [],
        "LoRA: modules trained in full along with the adapters, by the last part of their names; only "
        "input embeddings and output head, e.g. [embed_tokens,lm_head]",
    )
    lora_adapter_path: str | None = key(
        None,
        "LoRA: directory of an adapter to start from, in PEFT's layout; it determines rank, scaling, "
        "layers and modules_to_save",
    )
    freeze: list[str] = key(
        [],
        "parameters to freeze, as regular expressions for parts of their names, e.g. "
        "['embed_tokens', 'layers\\.[0-3]\\.']",
    )
    ulysses_sequence_parallel_size: int = key(
        1,
        "number of ranks that split the tokens of a micro-batch, for long documents; each rank "
        "holds up to data.max_token_len_per_gpu tokens; must divide the number of ranks and of "
        "attention heads",
        at_least(1),
    )
    expert_parallel_size: int = key(
        1,
        "mixtures of experts: number of ranks that split the experts; tokens are sent to them "
        "instead of gathering the experts; must divide the number of ranks that shard the model",
        at_least(1),
    )
    fsdp_config: FsdpConfig = group(FsdpConfig)

    @property
    def has_adapters(self) -> bool:
        """Return True for LoRA, with new adapters or with adapters from a directory."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None


@dataclass(frozen=True)
class OptimGroup:
    """An entry of the list of parameter groups."""

    match: str = key(
        MISSING,
        "regular expression for a part of the names of the group's trained parameters; a "
        "parameter belongs to the first entry that matches",
        not_empty,
    )
    lr_scale: float = key(1.0, "factor for the learning rate", positive)
    weight_decay: float | None = key(
        None,
        "replaces optim.weight_decay, even for norms and biases; null = no change",
        not_negative,
    )


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning rate."""

    name: str = key(
        "adamw", "adamw | muon (orthogonal updates for the layers' matrices, AdamW for the rest)"
    )
    lr: float | None = key(
        None,
        "peak learning rate; null = 1e-5 for pretrained weights, 1e-4 for LoRA adapters, 2e-3 for "
        "random weights",
        within("(0, 1)"),
    )
    betas: list[float] = key(
        [0.9, 0.95],
        "AdamW: decay rates of the first and second moment",
        where(
            lambda betas: len(betas) == 2 and all(0 <= b < 1 for b in betas),
            "must be two numbers in [0, 1)",
        ),
    )
    eps: float = key(1e-8, "AdamW: added to the root of the second moment", positive)
    state_dtype: str = key(
        "float32",
        "dtype of the moments: float32 | bfloat16 (stochastic rounding)",
        one_of(*DTYPES[:2]),
    )
    weight_decay: float = key(0.01, "weight decay; not applied to norms and biases", not_negative)
    groups: list[OptimGroup] = key(
        [],
        "separate settings for some parameters, e.g. [{match: embed_tokens, lr_scale: 0.1, "
        "weight_decay: 0}]: a regular expression for names, a factor for the learning rate (default "
        "1), a weight decay (default: no change)",
    )
    clip_grad: float = key(1.0, "maximum global gradient norm", positive)
    lr_scheduler: str = key(
        "cosine",
        "cosine | linear | constant | wsd (stable, then linear decay over the last tenth)",
    )
    lr_warmup_steps_ratio: float = key(0.1, "fraction of all steps with linear warmup", _RATIO)
    min_lr_ratio: float = key(0.0, "final learning rate as a fraction of the peak", _RATIO)


@dataclass(frozen=True)
class GuardRule:
    """An entry of the list of guard rules."""

    metric: str = key(MISSING, "a logged metric that is equal on all ranks (docs/guard.md)")
    above: float | None = key(None, "the metric must stay below this number")
    below: float | None = key(
        None, "the metric must stay above this number; set either above or below"
    )
    num_steps: int = key(
        1, "consecutive steps beyond the limit before the rule acts", at_least(1), name="for"
    )
    action: str = key(
        "warn",
        "warn | skip (the step's update; only for train/loss and train/grad_norm with above) | "
        "rollback | stop",
        one_of("warn", "skip", "rollback", "stop"),
        name="do",
    )

    @property
    def text(self) -> str:
        """Return the rule as text for messages."""
        limit = f"below {self.below:.12g}" if self.above is None else f"above {self.above:.12g}"
        lasting = f" for {self.num_steps} steps" if self.num_steps > 1 else ""
        return f"{self.metric} {limit}{lasting}: {self.action}"

    def holds(self, value: float) -> bool:
        """Return True for a value beyond the limit, even an infinite one, but not for NaN."""
        if self.above is None:
            return self.below is not None and value < self.below
        return value > self.above


@dataclass(frozen=True)
class GuardConfig:
    """Compares loss and gradient norm with their recent values."""

    on_severe: str = key(
        "warn",
        "reaction to an abnormal step: warn | skip its update | rollback | stop",
        one_of("warn", "skip", "rollback", "stop"),
    )
    on_diverging: str = key(
        "warn",
        "reaction to a rising loss: warn | rollback (to an earlier checkpoint, skipping the "
        "suspicious batches) | stop; in any case, 5 consecutive steps with a non-finite loss or "
        "gradient stop the run (exit 76)",
        one_of("warn", "rollback", "stop"),
    )
    rules: list[GuardRule] = key(
        [],
        "limits on metrics, e.g. [{metric: train/grad_norm, above: 50, for: 3, do: rollback}]: "
        "above or below a number, for this many consecutive steps (default 1), do warn | skip | "
        "rollback | stop (default warn)",
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Contents of checkpoints, and how to write them."""

    save_contents: list[str] = key(
        [*ALWAYS_SAVED, "hf_model"],
        "model, optimizer and extra are required; hf_model = weights in huggingface/ (LoRA: the "
        "adapter in PEFT's layout); merged_model = like hf_model (LoRA: the whole model with merged "
        "adapters)",
        one_of(*ALWAYS_SAVED, *EXPORTS),
    )
    export_dtype: str = key(
        "bfloat16",
        "dtype of the weights in huggingface/: float32 | bfloat16 | float16",
        one_of(*DTYPES),
    )
    require_lock: bool = key(
        True,
        "refuse a run directory on a file system without locks (flock); if false, never start a "
        "second run in it",
    )
    async_save: bool = key(
        True,
        "write in the background from a copy in host memory; if false, training waits for the disk",
    )
    mirror: str | None = key(
        None,
        "where to copy checkpoints in the background: s3://…, gs://…, hf://buckets/org/name/path, "
        "file:///…; the newest copy is restored into an empty run directory. Use one URL per run: "
        "…/${trainer.project_name}/${trainer.experiment_name}",
        not_empty,
    )

    @property
    def exports_weights(self) -> bool:
        """Return True if `huggingface/` contains weights."""
        return any(name in EXPORTS for name in self.save_contents)

    @property
    def export_lora(self) -> str:
        """Return the contents of a LoRA export: `adapter` or `merged`."""
        return "merged" if "merged_model" in self.save_contents else "adapter"


@dataclass(frozen=True)
class TrainerConfig:
    """The run: name, length, checkpoints and monitoring."""

    project_name: str = key(
        "sft", "groups runs, in directories and trackers", not_empty, inside_checkpoints
    )
    experiment_name: str = key(
        QUICKSTART,
        "name of the run; a command with the name of an existing run continues it",
        not_empty,
        inside_checkpoints,
    )
    default_local_dir: str = key(
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        "the run directory: logs and checkpoints",
        not_empty,
    )
    logger: list[str] = key(
        ["console"],
        "any of console, wandb, tensorboard, mlflow, trackio; metrics.jsonl and CSV files are always "
        "written",
    )
    total_epochs: int = key(2, "passes over the training samples", at_least(1))
    total_training_steps: int | None = key(
        None, "number of optimizer steps; overrides total_epochs", at_least(1)
    )
    save_freq: int = key(
        100, "save a checkpoint every N steps and at the end; -1 = only at the end", count_or_all
    )
    save_every: str | None = key(
        None,
        "also save when this much time has passed since the last checkpoint: 30m, 2h",
        duration,
    )
    test_freq: int = key(
        50, "validate every N steps and at the end; -1 = only at the end", count_or_all
    )
    max_ckpt_to_keep: int | None = key(
        5, "number of newest checkpoints to keep; null = all", at_least(1)
    )
    resume_mode: str = key(
        "auto",
        "auto (newest good checkpoint of this run) | disable | resume_path",
        one_of("auto", "disable", "resume_path"),
    )
    resume_from_path: str | None = key(
        None, "checkpoint (.../global_step_N) of another run, for resume_mode=resume_path"
    )
    resume_allow: list[str] = key(
        [],
        "changes to accept on resume: data, validation, data.order, train_batch_size, seed, "
        "tokenizer, model_config, other_parts",
        one_of(*RESUME_ALLOW),
    )
    max_time: str | None = key(
        None, "save and stop (exit 75) after this time: 3h30m, 90m, 45s", duration
    )
    seed: int = key(1, "seed for data order, initial weights and dropout")
    device: str = key(AUTO, "auto | cuda | cpu", one_of(AUTO, "cuda", "cpu"))
    deterministic: bool = key(
        False,
        "make a rerun bit-identical on GPUs too, with slower kernels that add in a fixed order",
    )
    hang_timeout_s: int = key(
        600,
        "seconds without progress (micro-batch, file or step) after which a rank counts as hung: all "
        "stacks are written and the run ends (exit 75); startup and collectives may take three times "
        "as long",
        within(f"[1, {YEAR_S}]"),
    )
    early_stop_patience: int | None = key(
        None,
        "end the run (exit 0) after this many consecutive validations without a better val/loss",
        at_least(1),
    )
    log_every: int | None = key(
        None,
        "steps between console lines; null = about 50 lines per epoch; metrics.jsonl and trackers "
        "receive every step",
        at_least(1),
    )
    trace: bool = key(False, "record the phases of all ranks in trace/, for Perfetto")
    guard: GuardConfig = group(GuardConfig)
    checkpoint: CheckpointConfig = group(CheckpointConfig)

    @property
    def dist_timeout_s(self) -> int:
        """Return the time limit in seconds for a collective, and for a rank without progress before
        step 1. It is longer than `hang_timeout_s`, so that a hang is noticed before a collective
        fails.
        """
        return max(MIN_DIST_TIMEOUT_S, 3 * self.hang_timeout_s)


@dataclass(frozen=True)
class Config:
    """All keys. `resolved` holds their values in plain containers, to print them, store them with
    the run, and send them to trackers.
    """

    data: DataConfig = group(DataConfig)
    model: ModelConfig = group(ModelConfig)
    optim: OptimConfig = group(OptimConfig)
    trainer: TrainerConfig = group(TrainerConfig)
    resolved: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def max_micro_batch_tokens(self) -> int | None:
        """Return the largest number of tokens in a micro-batch, over all ranks that split it."""
        limit = self.data.max_token_len_per_gpu
        return None if limit is None else limit * self.model.ulysses_sequence_parallel_size
