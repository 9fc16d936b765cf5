"""Every key of the configuration, declared once: type, default, meaning, checks.

`python tests/architecture/config_table.py` writes `conf/sft.yaml` and the table of docs/config.md
from these declarations. `train/start/compose.py` checks values that name an implementation
(`model.loss`, `trainer.logger`).
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
    within,
)

MAX_TOKENS = "data.max_token_len_per_gpu"
RECOMPUTE = "model.enable_gradient_checkpointing"
DTYPES = ("float32", "bfloat16", "float16")
RESUME_ALLOW = (
    "data",
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
"""Values of `save_contents` that export weights; for LoRA, the adapter or the merged model."""
_RATIO = within("[0, 1]")


@dataclass(frozen=True)
class FsdpConfig:
    """Sharding and computation of parameters."""

    param_dtype: str = key(
        AUTO,
        "dtype of the computation and of frozen parameters: bfloat16 | float32 | auto (bfloat16 if "
        "the hardware supports it)",
        one_of(AUTO, *DTYPES[:2]),
    )
    cpu_offload: bool = key(False, "keep parameters and optimizer state in host memory")
    reshard_after_forward: bool | str = key(
        AUTO,
        "true: free gathered parameters after each layer's forward (ZeRO-3); false: keep them for "
        "the backward pass (ZeRO-2); auto = true if several ranks share layers of more than 1 GiB "
        "in the compute dtype",
        one_of("true", "false", AUTO),
    )
    fsdp_size: int = key(
        -1,
        "ranks that share one copy of the parameters; smaller = HSDP; -1 = all",
        count_or_all,
    )


@dataclass(frozen=True)
class ModelConfig:
    """The model, and which parts of it are trained."""

    partial_pretrain: str = key(
        QUICKSTART,
        "local directory or Hub id (downloaded once) of a causal LM; quickstart = embedded tiny "
        "model",
    )
    random_weights: bool = key(False, "take only the architecture and start from random weights")
    new_tokens: list[str] = key(
        [],
        'special tokens to add, e.g. those of a chat template: ["<|im_start|>","<|im_end|>"]; '
        "their embeddings start as the mean of all others with a little noise",
        lambda tokens: "" if all(tokens) else "must not be empty",
    )
    trust_remote_code: bool = key(False, "run Python code that comes with the model")
    master_dtype: str = key(
        "float32",
        "dtype of trained parameters: float32 | bfloat16 (updates use stochastic rounding)",
        one_of(*DTYPES[:2]),
    )
    enable_gradient_checkpointing: bool | str = key(
        False,
        "recompute activations in the backward pass: less memory, slower; selective = all but "
        "matrix products and attention: in between; offload = like true, with the inputs of layers "
        "kept in host memory (docs/memory.md)",
        one_of("true", "false", SELECTIVE, OFFLOAD),
    )
    compile: bool = key(False, "torch.compile each decoder layer")
    loss: str = key(
        "cross_entropy",
        "trained loss: cross_entropy | dft (each token's loss weighted by its probability, for "
        "pretrained weights); train/loss, the guard and validation always use cross_entropy, "
        "train/objective shows the trained loss",
    )
    attention: str = key(
        AUTO,
        "auto | packed (several documents in a forward pass) | per_document (one in a forward pass; "
        "any architecture)",
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
        "LoRA: fraction of an adapter's inputs that training sets to zero, drawn by step and rank",
        within("[0, 1)"),
    )
    use_rslora: bool = key(False, "LoRA: scale by lora_alpha / sqrt(lora_rank)")
    target_modules: str | list[str] = key(
        "all-linear",
        "LoRA: layers that get an adapter: all-linear (all but the head, experts and routers), name "
        "endings such as [q_proj,experts.down_proj], or a regular expression for whole names",
        not_empty,
    )
    load_in_4bit: bool = key(
        False,
        "LoRA: hold the frozen weights of linear layers in NF4, 4.5 bits each (QLoRA)",
    )
    modules_to_save: list[str] = key(
        [],
        "LoRA: modules that are trained in full beside the adapters, by the last part of their names: "
        "the input embeddings and the output head, e.g. [embed_tokens,lm_head]",
    )
    lora_adapter_path: str | None = key(
        None,
        "LoRA: directory of an adapter in PEFT's layout to start from; it decides rank, scaling, layers "
        "and modules_to_save",
    )
    freeze: list[str] = key(
        [],
        "parameters that are not trained: regular expressions found in their names, e.g. "
        "['embed_tokens', 'layers\\.[0-3]\\.']",
    )
    ulysses_sequence_parallel_size: int = key(
        1,
        "number of ranks that split the tokens of a micro-batch, for long documents: each takes up "
        "to data.max_token_len_per_gpu tokens; must divide the ranks and the attention heads",
        at_least(1),
    )
    expert_parallel_size: int = key(
        1,
        "mixtures of experts: number of ranks that split the experts; tokens travel to their "
        "experts instead of experts to the tokens; must divide the ranks that shard the model",
        at_least(1),
    )
    fsdp_config: FsdpConfig = group(FsdpConfig)

    @property
    def has_adapters(self) -> bool:
        """Return True for LoRA, with new adapters or with those of a directory."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None


@dataclass(frozen=True)
class OptimGroup:
    """An entry of the list of parameter groups."""

    match: str = key(
        MISSING,
        "regular expression found in the names of the group's trained parameters; the first entry "
        "that matches a name counts",
        not_empty,
    )
    lr_scale: float = key(1.0, "factor for the learning rate", positive)
    weight_decay: float | None = key(
        None,
        "replaces optim.weight_decay, also for norms and biases; null = no change",
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
        "AdamW: decay of the first and second moment",
        lambda betas: (
            ""
            if len(betas) == 2 and all(0 <= b < 1 for b in betas)
            else "must be two numbers in [0, 1)"
        ),
    )
    eps: float = key(1e-8, "AdamW: added to the root of the second moment", positive)
    state_dtype: str = key(
        "float32",
        "dtype of the moments: float32 | bfloat16 (stochastic rounding)",
        one_of(*DTYPES[:2]),
    )
    weight_decay: float = key(0.01, "not applied to norms and biases", not_negative)
    groups: list[OptimGroup] = key(
        [],
        "other settings for parameters by name, e.g. [{match: embed_tokens, lr_scale: 0.1, "
        "weight_decay: 0}]: a regular expression, a factor for the learning rate (default 1), a "
        "weight decay (default: no change)",
    )
    clip_grad: float = key(1.0, "largest global gradient norm", positive)
    lr_scheduler: str = key(
        "cosine",
        "cosine | linear | constant | wsd (stable, then linear decay over the last tenth)",
    )
    lr_warmup_steps_ratio: float = key(0.1, "share of all steps that warm up linearly", _RATIO)
    min_lr_ratio: float = key(0.0, "final learning rate as a share of the peak", _RATIO)


@dataclass(frozen=True)
class GuardRule:
    """An entry of the list of guard rules."""

    metric: str = key(MISSING, "a logged metric whose value is equal on all ranks (docs/guard.md)")
    above: float | None = key(None, "the metric must stay below this number")
    below: float | None = key(None, "the metric must stay above this number; set one of the two")
    num_steps: int = key(1, "consecutive steps beyond the limit", at_least(1), name="for")
    action: str = key(
        "warn",
        "warn | skip (the step's update; only for train/loss and train/grad_norm above a number) | "
        "rollback | stop",
        one_of("warn", "skip", "rollback", "stop"),
        name="do",
    )

    @property
    def text(self) -> str:
        """Return the rule in words, for messages."""
        limit = f"below {self.below:.12g}" if self.above is None else f"above {self.above:.12g}"
        lasting = f" for {self.num_steps} steps" if self.num_steps > 1 else ""
        return f"{self.metric} {limit}{lasting}: {self.action}"

    def holds(self, value: float) -> bool:
        """Return True for a finite or infinite value beyond the limit; NaN is never beyond it."""
        if self.above is None:
            return self.below is not None and value < self.below
        return value > self.above


@dataclass(frozen=True)
class GuardConfig:
    """Watches loss and gradient norm against their own recent past."""

    on_severe: str = key(
        "warn",
        "reaction to an abnormal step: warn (and keep its samples) | skip its update | rollback | "
        "stop",
        one_of("warn", "skip", "rollback", "stop"),
    )
    on_diverging: str = key(
        "warn",
        "reaction to a rising loss: warn | rollback (to an earlier checkpoint, skipping the batches) "
        "| stop; 5 steps in a row without a finite loss and gradient stop the run in any case (exit "
        "76)",
        one_of("warn", "rollback", "stop"),
    )
    rules: list[GuardRule] = key(
        [],
        "limits on metrics, e.g. [{metric: train/grad_norm, above: 50, for: 3, do: rollback}]: "
        "above or below a number, for that many consecutive steps (default 1), do warn | skip | "
        "rollback | stop (default warn)",
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Contents of checkpoints, and how they are written."""

    save_contents: list[str] = key(
        [*ALWAYS_SAVED, "hf_model"],
        "model, optimizer and extra always; hf_model = weights in huggingface/ (LoRA: the adapter in "
        "PEFT's layout); merged_model = like hf_model (LoRA: the whole model with merged adapters)",
        one_of(*ALWAYS_SAVED, *EXPORTS),
    )
    export_dtype: str = key(
        "bfloat16",
        "dtype of the weights in huggingface/: float32 | bfloat16 | float16",
        one_of(*DTYPES),
    )
    require_lock: bool = key(
        True,
        "refuse a run directory on a file system without locks (flock); false = accept it, and "
        "never start a second run there",
    )
    async_save: bool = key(
        True,
        "write in the background from a copy in host memory; false = training waits for the disk",
    )
    mirror: str | None = key(
        None,
        "where checkpoints are copied in the background: s3://…, gs://…, hf://buckets/org/name/path, "
        "file:///…; an empty run directory takes the newest one back. One URL per run: "
        "…/${trainer.project_name}/${trainer.experiment_name}",
        not_empty,
    )

    @property
    def exports_weights(self) -> bool:
        """Return True if `huggingface/` contains weights."""
        return any(name in EXPORTS for name in self.save_contents)

    @property
    def export_lora(self) -> str:
        """Return `adapter` or `merged`: the contents of a LoRA export."""
        return "merged" if "merged_model" in self.save_contents else "adapter"


@dataclass(frozen=True)
class TrainerConfig:
    """The run: its name, length, checkpoints and supervision."""

    project_name: str = key(
        "sft", "groups runs, here and in the trackers", not_empty, inside_checkpoints
    )
    experiment_name: str = key(
        QUICKSTART,
        "one name per run; the same name continues that run",
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
        "any of console, wandb, tensorboard, mlflow, trackio; metrics.jsonl and CSV are always "
        "written",
    )
    total_epochs: int = key(2, "passes over the training samples", at_least(1))
    total_training_steps: int | None = key(None, "overrides total_epochs", at_least(1))
    save_freq: int = key(
        100, "checkpoint every N steps and at the end; -1 = only at the end", count_or_all
    )
    save_every: str | None = key(
        None, "checkpoint also when this time has passed since the last one: 30m, 2h", duration
    )
    test_freq: int = key(
        50, "validate every N steps and at the end; -1 = only at the end", count_or_all
    )
    max_ckpt_to_keep: int | None = key(5, "newest checkpoints kept; null = all", at_least(1))
    resume_mode: str = key(
        "auto",
        "auto (newest good checkpoint of this run) | disable | resume_path",
        one_of("auto", "disable", "resume_path"),
    )
    resume_from_path: str | None = key(
        None, ".../global_step_N to continue from, with resume_mode=resume_path"
    )
    resume_allow: list[str] = key(
        [],
        "changes that a resume accepts: data, data.order, train_batch_size, seed, tokenizer, "
        "model_config, other_parts",
        one_of(*RESUME_ALLOW),
    )
    max_time: str | None = key(
        None, "save and stop (exit 75) after this long: 3h30m, 90m, 45s", duration
    )
    seed: int = key(1, "data order, initial weights, dropout")
    device: str = key(AUTO, "auto | cuda | cpu", one_of(AUTO, "cuda", "cpu"))
    deterministic: bool = key(
        False,
        "make equal runs bit-equal on a GPU too: only kernels that add in a fixed order, which are "
        "slower",
    )
    hang_timeout_s: int = key(
        600,
        "a rank without progress (micro-batch, file or step) for this long hangs: write all stacks "
        "and end the run (exit 75); a start and a collective may take three times as long",
        within(f"[1, {YEAR_S}]"),
    )
    early_stop_patience: int | None = key(
        None,
        "end the run (exit 0) after this many validations in a row without a better val/loss",
        at_least(1),
    )
    log_every: int | None = key(
        None,
        "steps between two lines on the console (null: about 50 lines an epoch); metrics.jsonl and "
        "trackers get every step",
        at_least(1),
    )
    trace: bool = key(False, "spans of every phase and rank in trace/, for Perfetto")
    guard: GuardConfig = group(GuardConfig)
    checkpoint: CheckpointConfig = group(CheckpointConfig)

    @property
    def dist_timeout_s(self) -> int:
        """Return the time limit in seconds for a collective, and for a rank without progress before
        step 1.

        It is longer than `hang_timeout_s`, so that a hang is found before a collective gives up.
        """
        return max(MIN_DIST_TIMEOUT_S, 3 * self.hang_timeout_s)


@dataclass(frozen=True)
class Config:
    """Every key. `resolved` holds the same values in plain containers: it is printed, stored with
    the run, and sent to trackers.
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
