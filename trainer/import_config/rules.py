"""What becomes of a setting, what a rule may ask of the others, and the rules that transformers' trainers share."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

BECAME, NOTHING, DIFFERS, NO_EQUAL, UNKNOWN = "became", "changes nothing", "differs", "no equal", "unknown"


@dataclass(frozen=True)
class ForeignSetting:
    """A key of the other trainer; `line` of the file, None for a default of that trainer."""

    key: str
    value: Any
    line: int | None = None


@dataclass(frozen=True)
class Answer:
    """`words`: our keys and their values; `text` says what they leave unsaid."""

    kind: str
    text: str = ""
    words: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Given:
    """All settings of a file, with the defaults of its trainer for what it leaves open.

    `num_ranks`: those of its launch, if known; `mean_tokens` of a row, if given, for packed sequences.
    """

    settings: Mapping[str, ForeignSetting]
    num_ranks: int | None
    mean_tokens: float | None

    def value(self, key: str, default: Any = None) -> Any:
        """`default` also for null."""
        setting = self.settings.get(key)
        return default if setting is None or setting.value is None else setting.value

    def has(self, keys: Iterable[str]) -> bool:
        return any(self.value(key) for key in keys)


Rule = Callable[[Given, Any], Answer]
"""From the settings and the value of one of them."""


def became(text: str = "", /, **words: Any) -> Answer:
    """A word `data__max_length` stands for `data.max_length`."""
    return Answer(BECAME, text, {name.replace("__", "."): value for name, value in words.items()})


def differs(text: str, /, **words: Any) -> Answer:
    return Answer(DIFFERS, text, became(**words).words)


def nothing(text: str = "") -> Answer:
    return Answer(NOTHING, text)


def no_equal(text: str) -> Answer:
    return Answer(NO_EQUAL, text)


PER_DEVICE = ("per_device_train_batch_size", "micro_batch_size")
LENGTHS = ("max_length", "max_seq_length", "sequence_len", "cutoff_len")
PACKED = ("packing", "sample_packing", "neat_packing")
RANKS_OF_SEQUENCE = ("context_parallel_size", "sequence_parallel_degree")
NEVER_CLIPS = 1e9
CLOSE_OPTIMIZERS = ("8bit", "4bit", "bnb", "torchao", "apex", "npu", "xla")
TRACKERS = ("wandb", "tensorboard", "mlflow", "trackio")
SCHEDULES = ("linear", "cosine", "constant")


def batch(given: Given, per_device: Any) -> Answer:
    """The samples of a step: those of a device, times accumulation, times the ranks that take other samples."""
    assert given.num_ranks is not None, "asked for before"
    accumulation = int(given.value("gradient_accumulation_steps", 1))
    sharing = max(int(given.value(name, 1)) for name in RANKS_OF_SEQUENCE)
    ranks = given.num_ranks // sharing
    sequences = int(per_device) * accumulation * ranks
    length = max(int(given.value(name, 0)) for name in LENGTHS)
    words = {"data__max_token_len_per_gpu": max(int(per_device), 1) * length} if length else {}
    product = f"{per_device} a device x {accumulation} accumulated x {ranks} ranks"
    if not given.has(PACKED):
        return became(product, data__train_batch_size=sequences, **words)
    if given.mean_tokens is None:
        text = (
            f"{product} packed sequences of up to {length:,} tokens, here as many rows, which are fewer tokens: "
            f"measure the mean length of a row ('data stats') and import again with --mean-tokens"
        )
        return differs(text, data__train_batch_size=sequences, **words)
    rows = max(1, round(sequences * length / given.mean_tokens))
    return became(f"{product} packed sequences of {length:,} tokens", data__train_batch_size=rows, **words)


def epochs(given: Given, value: Any) -> Answer:
    if int(given.value("max_steps", -1)) > 0:
        return nothing("max_steps decides")
    if float(value).is_integer():
        return became(trainer__total_epochs=int(value))
    text = f"passes are whole here; {value} of them: trainer.total_training_steps={value} x rows / batch"
    return differs(text, trainer__total_epochs=math.ceil(float(value)))


def schedule(given: Given, value: Any) -> Answer:
    name = str(value)
    lowest = given.value("cosine_min_lr_ratio")
    more = given.value("lr_scheduler_kwargs", {})
    if name == "cosine_with_min_lr":
        name, peak = "cosine", float(given.value("learning_rate", 1))
        lowest = more.get("min_lr_rate", float(more.get("min_lr", 0)) / peak)
    if name == "constant_with_warmup":
        name = "constant"
    if name not in SCHEDULES:
        near = "; wsd holds the rate, then lets it fall (optim.stable_ratio)" if name == "warmup_stable_decay" else ""
        return no_equal(f"schedules are {', '.join(SCHEDULES)} and wsd{near}")
    floor = {} if lowest is None else {"optim__min_lr_ratio": float(lowest)}
    return became(optim__lr_scheduler=name, **floor)


def warmup_steps(given: Given, value: Any) -> Answer:
    if _schedule_name(given) == "constant":
        return nothing("constant does not warm up there")
    if 0 < float(value) < 1:
        return became("a share of all steps", optim__lr_warmup_steps_ratio=float(value))
    return became(optim__lr_warmup_steps=int(value)) if int(value) else nothing()


def warmup_ratio(given: Given, value: Any) -> Answer:
    """Written as 0 too: ours would warm up."""
    if float(given.value("warmup_steps", 0)) > 0:
        return nothing("warmup_steps decides")
    if _schedule_name(given) == "constant":
        return became("constant does not warm up there", optim__lr_warmup_steps_ratio=0.0)
    return became(optim__lr_warmup_steps_ratio=float(value))


def _schedule_name(given: Given) -> str:
    return str(given.value("lr_scheduler_type", given.value("lr_scheduler", "")))


def optimizer(_: Given, value: Any) -> Answer:
    name = str(value)
    if "adamw" not in name:
        return no_equal("optimizers are adamw and muon (optim.name)")
    if any(word in name for word in CLOSE_OPTIMIZERS):
        return differs("AdamW with unquantized moments", optim__name="adamw")
    return became(optim__name="adamw")


def bf16(given: Given, value: Any) -> Answer:
    if value == "auto":
        return became(model__fsdp_config__param_dtype="auto")
    if given.value("fp16"):
        return nothing("fp16 decides")
    return became(model__fsdp_config__param_dtype="bfloat16" if value else "float32")


def pure_bf16(_: Given, value: Any) -> Answer:
    """Weights kept in bfloat16 too."""
    if value in (False, "float32"):
        return nothing()
    if value not in (True, "bfloat16"):
        return no_equal("weights are kept in float32 or bfloat16 (model.master_dtype)")
    text = "each update is rounded at random here, right on average, to the nearest there"
    return differs(text, model__master_dtype="bfloat16", optim__state_dtype="bfloat16")


def recompute(_: Given, value: Any) -> Answer:
    is_offloaded = isinstance(value, str) and value.startswith("offload")
    return became(model__enable_gradient_checkpointing="offload" if is_offloaded else bool(value))


def sharding(_: Given, value: Any) -> Answer:
    names = ("fsdp_offload_params", "offload_params")
    if isinstance(value, dict) and any(value.get(name) for name in names):
        return became("parameters are always sharded with FSDP2", model__fsdp_config__cpu_offload=True)
    return nothing("how parameters lie is model.fsdp_config; loss and gradient do not depend on it")


def save_strategy(_: Given, value: Any) -> Answer:
    if value == "steps":
        return nothing()
    if value in ("no", False):
        return became("the end is always saved", trainer__save_freq=-1)
    return no_equal("trainer.save_freq counts steps")


def save_steps(given: Given, value: Any) -> Answer:
    if given.value("save_strategy", "steps") != "steps" or given.has(["saves_per_epoch"]):
        return nothing("another setting decides when it saves")
    return frequency("save_freq", value)


def eval_strategy(given: Given, value: Any) -> Answer:
    if value in ("no", False):
        held_out = given.has(["val_size", "eval_dataset"])
        return nothing("validated at the end") if held_out else became("no validation", data__val_ratio=0.0)
    return nothing() if value == "steps" else no_equal("trainer.test_freq counts steps")


def eval_steps(given: Given, value: Any) -> Answer:
    return frequency("test_freq", value) if given.value("eval_strategy", "no") != "no" else nothing("no validation")


def frequency(name: str, value: Any) -> Answer:
    if isinstance(value, str):
        return no_equal(f"trainer.{name} counts steps")
    if 0 < float(value) < 1:
        return no_equal(f"trainer.{name} counts steps; this is a share of all")
    return became(**{f"trainer__{name}": int(value)})


def val_share(_: Given, value: Any) -> Answer:
    if float(value) >= 1:
        return no_equal(f"{value} rows are held out there, a share here: data.val_ratio={value}/ROWS")
    return became(data__val_ratio=float(value))


def trackers(_: Given, value: Any) -> Answer:
    names = value if isinstance(value, list) else [value]
    names = [*TRACKERS] if "all" in names else [name for name in names if name not in (None, "none")]
    known = [name for name in names if name in TRACKERS]
    words = {"trainer__logger": ["console", *known]} if known else {}
    if other := [str(name) for name in names if name not in TRACKERS]:
        return differs(f"trackers are {', '.join(TRACKERS)}, not {', '.join(other)}", **words)
    return became(**words) if words else nothing("console, metrics.jsonl and CSV are always written")


def packed(given: Given, value: Any) -> Answer:
    if value and given.value("packing_strategy") == "wrapped":
        return no_equal("documents are never cut into blocks: each is a sample, and sees itself alone")
    if value and "neat_packing" in given.settings and not given.value("neat_packing"):
        return no_equal("documents packed side by side see each other there (neat_packing is false), never here")
    return nothing("documents always lie side by side and never see each other; the batch counts rows")


def says(text: str) -> Rule:
    """Of a setting that changes nothing here, whatever its value."""
    return lambda _, __: nothing(text)


def word(name: str, kind: Callable[[Any], Any] = lambda value: value) -> Rule:
    """Of a setting that is one of ours, in whose type its value is written."""
    return lambda _, value: became(**{name: kind(value)})


COMMON: dict[str, Rule] = {
    "gradient_accumulation_steps": says(
        "it is in data.train_batch_size; how often it accumulates follows from what fits a forward pass"
    ),
    "warmup_steps": warmup_steps,
    "warmup_ratio": warmup_ratio,
    "adam_beta1": lambda given, _: became(
        optim__betas=[float(given.value("adam_beta1", 0.9)), float(given.value("adam_beta2", 0.999))]
    ),
    "adam_beta2": says("it is in optim.betas"),
    "max_grad_norm": lambda _, value: became(
        "" if value else "never clips", optim__clip_grad=float(value) or NEVER_CLIPS
    ),
    "bf16": bf16,
    "gradient_checkpointing": recompute,
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "fsdp_version"), sharding),
    "seed": lambda _, value: became("the order of rows is another one all the same", trainer__seed=int(value)),
    "weight_decay": word("optim__weight_decay", float),
    "trust_remote_code": word("model__trust_remote_code", bool),
    "save_strategy": save_strategy,
    "save_steps": save_steps,
    "eval_strategy": eval_strategy,
    "evaluation_strategy": eval_strategy,
    "eval_steps": eval_steps,
    "report_to": trackers,
    "ddp_timeout": says("a hang ends the run after trainer.hang_timeout_s or trainer.dist_timeout_s"),
    "packing_strategy": lambda given, value: nothing() if value != "wrapped" else packed(given, True),
    "lr_scheduler_kwargs": lambda _, value: nothing("see the schedule") if value else nothing(),
}


TWICE = "twice the rank"
PEFT_DEFAULT = ["q_proj", "v_proj"]
"""What peft takes for Llama, Qwen, Mistral and Gemma where no layers are named."""


def lora_rules(is_on: Callable[[Given], bool], *, rank: str, targets: str) -> dict[str, Rule]:
    """`rank` and `targets` are what the trainer calls the rank and the layers with adapters."""

    def when_on(rule: Rule) -> Rule:
        return lambda given, value: rule(given, value) if is_on(given) else nothing("no adapters are trained")

    rules: dict[str, Rule] = {
        rank: word("model__lora_rank", int),
        "lora_alpha": lambda given, value: became(
            model__lora_alpha=2 * int(given.value(rank)) if value == TWICE else int(value)
        ),
        "lora_dropout": lambda _, value: no_equal("adapters have no dropout") if value else nothing(),
        targets: _targets,
        "lora_target_linear": lambda _, value: became(model__target_modules="all-linear") if value else nothing(),
        **dict.fromkeys(("use_rslora", "peft_use_rslora"), word("model__use_rslora", bool)),
    }
    return {name: when_on(rule) for name, rule in rules.items()}


def _targets(given: Given, value: Any) -> Answer:
    if given.value("lora_target_linear") or value in ("all", "all-linear"):
        return became(model__target_modules="all-linear")
    if value is None:
        text = "what peft takes for Llama, Qwen, Mistral and Gemma; other families have other names"
        return differs(text, model__target_modules=PEFT_DEFAULT)
    names = value.split(",") if isinstance(value, str) else value
    return became(model__target_modules=[str(name).strip() for name in names])
