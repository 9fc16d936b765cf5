"""The trainers whose files are read: what they do where a file is silent, and their own rules.

Defaults are those of verl 0.7.0 (`fsdp_sft_trainer`) and 0.9.1 (`sft_trainer`), TRL 1.16, axolotl of July 2026 and
LLaMA-Factory of August 2026.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.config import ConfigError
from trainer.import_config import rules, sources
from trainer.import_config.rules import (
    DIFFERS,
    TRACKERS,
    TWICE,
    Answer,
    Given,
    Rule,
    became,
    differs,
    lora_rules,
    no_equal,
    nothing,
)

NONE, THREE_PER_CENT = "none", "3 %, at most 100 steps"


def _tokens(given: Given, limit: int) -> dict[str, int]:
    """A forward pass must hold the longest sample: verl's limit of tokens is no bound."""
    sharing = ("ulysses_sequence_parallel_size", "engine.ulysses_sequence_parallel_size")
    size = max(int(given.value(name, 1)) for name in sharing)
    return {"data__max_token_len_per_gpu": max(limit, -(-int(given.value("data.max_length")) // size))}


def _samples(given: Given, value: Any) -> Answer:
    if given.value("data.use_dynamic_bsz"):
        return nothing("data.max_token_len_per_gpu decides")
    limit = _tokens(given, int(value) * int(given.value("data.max_length")))
    return became(data__micro_batch_size_per_gpu=int(value), **limit)


def _validation(_: Given, value: Any) -> Answer:
    return became("no validation", data__val_ratio=0.0) if value == NONE else became(data__val_files=value)


def _column(key: str) -> Rule:
    def rule(given: Given, value: Any) -> Answer:
        if given.value("data.multiturn.enable"):
            return nothing("rows hold messages")
        inside = given.value(f"data.{key.removesuffix('_key')}_dict_keys") or []
        names = [value, *(inside if isinstance(inside, list) else [inside])]
        return became(**{f"data__{key}": ".".join(map(str, names))})

    return rule


def _logger(_: Given, value: Any) -> Answer:
    names = value if isinstance(value, list) else [value]
    known = [name for name in names if name in ("console", *TRACKERS)]
    other = [str(name) for name in names if name not in (*known, "file")]
    if other:
        return differs(f"trackers are {', '.join(TRACKERS)}, not {', '.join(other)}", trainer__logger=known)
    return became(trainer__logger=known or ["console"])


VERL_RULES: dict[str, Rule] = {
    "data.micro_batch_size": rules.says("verl does not read it, data.micro_batch_size_per_gpu it does"),
    "data.micro_batch_size_per_gpu": _samples,
    "data.max_token_len_per_gpu": lambda given, value: became(**_tokens(given, int(value))),
    "data.val_files": _validation,
    "data.prompt_key": _column("prompt_key"),
    "data.response_key": _column("response_key"),
    "data.prompt_dict_keys": rules.says("it is in data.prompt_key"),
    "data.response_dict_keys": rules.says("it is in data.response_key"),
    "trainer.save_freq": lambda _, value: rules.frequency("save_freq", value),
    "trainer.test_freq": lambda _, value: rules.frequency("test_freq", value),
    "trainer.logger": _logger,
}
_DEFAULTS = {
    "data.train_batch_size": 256,
    "data.max_length": 1024,
    "data.micro_batch_size_per_gpu": 4,
    "data.val_files": NONE,
    "model.enable_gradient_checkpointing": True,
    "trainer.total_epochs": 4,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.max_ckpt_to_keep": None,
}
LEGACY_DEFAULTS = _DEFAULTS | {"optim.lr": 1e-5, "data.prompt_key": "question", "data.response_key": "answer"}
"""Of `fsdp_sft_trainer`; what it does as ours does is left out."""
ENGINE_DEFAULTS = _DEFAULTS | {
    "data.use_dynamic_bsz": True,
    "data.max_token_len_per_gpu": 8192,
    "optim.lr": 1e-3,
    "optim.betas": [0.9, 0.999],
    "optim.lr_warmup_steps_ratio": 0.0,
    "optim.lr_scheduler_type": "constant",
}
"""Of `sft_trainer`."""


@dataclass(frozen=True)
class Peer:
    """`origins`: whose rows of the table of foreign keys hold for it; `defaults`: under its own keys."""

    name: str
    origins: tuple[str, ...]
    defaults: Mapping[str, Any]
    rules: Mapping[str, Rule]


def _trains_assistant(given: Given, value: Any) -> Answer:
    if value or given.value("completion_only_loss"):
        return nothing("only the assistant's turns are trained")
    text = "of rows of messages every token is trained there, the assistant's turns alone here; rows of prompt and "
    return differs(f"{text}completion are trained alike")


def _loss(_: Given, value: Any) -> Answer:
    names = {"nll": "cross_entropy", "chunked_nll": "cross_entropy", "dft": "dft"}
    return became(model__loss=names[value]) if value in names else no_equal("losses are cross_entropy and dft")


def _cut(ways: Mapping[str, str]) -> Rule:
    return lambda _, value: became(data__truncation=ways[value]) if value in ways else no_equal("see data.truncation")


def _template(known: Mapping[str, str | None]) -> Rule:
    def rule(_: Given, value: Any) -> Answer:
        if value in known:
            return became(data__chat_template=known[value])
        text = f"the tokenizer's own chat template is taken for {value}: compare the rows with 'data compare'"
        return differs(text, data__chat_template=None)

    return rule


def _axolotl_warmup(given: Given, value: Any) -> Answer:
    if value != THREE_PER_CENT or given.value("warmup_steps") is not None:
        return rules.warmup_ratio(given, 0.0 if value == THREE_PER_CENT else value)
    return differs("never more than 100 steps there", optim__lr_warmup_steps_ratio=0.03)


def _adapter(_: Given, value: Any) -> Answer:
    if value == "lora":
        return nothing("its rank and layers follow")
    return differs("LoRA on weights that are not quantized, which take more memory")


def _finetuning(_: Given, value: Any) -> Answer:
    if value in ("lora", "full"):
        return nothing("its rank and layers follow" if value == "lora" else "all parameters are trained")
    return no_equal("model.freeze names the parameters that are not trained")


def _axolotl_bf16(given: Given, value: Any) -> Answer:
    answer = rules.bf16(given, value)
    if given.value("adapter") or value is False:
        return answer
    text = "axolotl keeps the trained weights in it too, they are float32 here (model.master_dtype)"
    return Answer(DIFFERS, text, answer.words)


def _text_column(given: Given, value: Any) -> Answer:
    if given.settings["dataset_text_field"].line is not None:
        return became(data__text_key=value)
    return differs("rows with a column text and no messages are plain text there: data.text_key=text")


def _only(*stages: Any) -> Rule:
    def rule(_: Given, value: Any) -> Answer:
        if value not in stages:
            raise ConfigError(f"it trains '{value}': this trainer does supervised fine-tuning")
        return nothing("supervised fine-tuning")

    return rule


HF_DEFAULTS = {
    "num_train_epochs": 3,
    "lr_scheduler_type": "linear",
    "warmup_ratio": 0.0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "max_grad_norm": 1.0,
    "per_device_train_batch_size": 8,
    "seed": 42,
    "save_steps": 500,
    "save_total_limit": None,
    "eval_strategy": "no",
}
"""Those of transformers' TrainingArguments."""
HF_RULES = rules.COMMON | {
    "per_device_train_batch_size": rules.batch,
    "num_train_epochs": rules.epochs,
    "lr_scheduler_type": rules.schedule,
    "optim": rules.optimizer,
    "packing": rules.packed,
}
TRL = Peer(
    "TRL",
    ("TRL", "transformers", "accelerate", "torchrun", "others"),
    HF_DEFAULTS
    | {"learning_rate": 2e-5, "max_length": 1024, "truncation_mode": "keep_start", "gradient_checkpointing": True}
    | {"assistant_only_loss": False, "bf16": True, "dtype": "float32", "dataset_test_split": "test", "eval_steps": 10}
    | {"dataset_text_field": "text"}
    | {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": None},
    HF_RULES
    | lora_rules(lambda given: given.has(["use_peft"]), rank="lora_r", targets="lora_target_modules")
    | {
        "dtype": rules.pure_bf16,
        "torch_dtype": rules.pure_bf16,
        "assistant_only_loss": _trains_assistant,
        "completion_only_loss": lambda _, value: (
            nothing("only the assistant's turns are trained") if value else no_equal("prompts are not trained")
        ),
        "dataset_text_field": _text_column,
        "loss_type": _loss,
        "max_length": rules.word("data__max_length", int),
        "truncation_mode": _cut({"keep_start": "right", "keep_end": "left"}),
        "use_peft": rules.says("rank and layers of the adapters follow"),
        "dataset_name": sources.trl_dataset,
        "dataset_train_split": rules.says("it is in data.train_files"),
        "dataset_config": rules.says("it is in data.train_files"),
        "dataset_test_split": sources.trl_validation,
        "datasets": sources.listed_datasets,
    },
)
AXOLOTL = Peer(
    "axolotl",
    ("axolotl", "transformers", "TRL", "others"),
    {name: HF_DEFAULTS[name] for name in ("adam_beta1", "max_grad_norm", "seed", "save_steps", "save_total_limit")}
    | {"micro_batch_size": 1, "num_epochs": 1, "lr_scheduler": "cosine", "warmup_ratio": THREE_PER_CENT}
    | {"weight_decay": 0.0, "sequence_len": 512, "excess_length_strategy": "drop", "val_set_size": 0.0, "bf16": "auto"},
    rules.COMMON
    | lora_rules(lambda given: given.has(["adapter"]), rank="lora_r", targets="lora_target_modules")
    | {
        "micro_batch_size": rules.batch,
        "num_epochs": rules.epochs,
        "lr_scheduler": rules.schedule,
        "cosine_min_lr_ratio": rules.says("it is in optim.min_lr_ratio"),
        "optimizer": rules.optimizer,
        "warmup_ratio": _axolotl_warmup,
        **dict.fromkeys(rules.RANKS_OF_SEQUENCE, rules.word("model__ulysses_sequence_parallel_size", int)),
        "adapter": _adapter,
        "lora_model_dir": rules.word("model__lora_adapter_path"),
        "bf16": _axolotl_bf16,
        "excess_length_strategy": _cut({"drop": "drop", "truncate": "right", "raise": "error"}),
        "val_set_size": rules.val_share,
        "sample_packing": rules.packed,
        "chat_template": _template({"tokenizer_default": None, "chatml": "chatml", "llama3": "llama3"}),
        "chat_template_jinja": rules.word("data__chat_template"),
        "datasets": sources.listed_datasets,
        "rl": _only(False),
    },
)
LLAMA_FACTORY = Peer(
    "LLaMA-Factory",
    ("LLaMA-Factory", "transformers", "TRL", "others"),
    HF_DEFAULTS
    | {"learning_rate": 5e-5, "cutoff_len": 2048, "truncation of turns": True, "disable_gradient_checkpointing": False}
    | {"finetuning_type": "lora", "lora_rank": 8, "lora_alpha": TWICE, "lora_target": "all", "bf16": False}
    | {"neat_packing": False},
    HF_RULES
    | lora_rules(lambda given: given.value("finetuning_type") == "lora", rank="lora_rank", targets="lora_target")
    | {
        "truncation of turns": lambda _, __: differs(
            "a row that is too long loses its end, there its turns lose theirs", data__truncation="right"
        ),
        "finetuning_type": _finetuning,
        "adapter_name_or_path": rules.word("model__lora_adapter_path"),
        "disable_gradient_checkpointing": lambda _, value: rules.recompute(_, not value),
        "pure_bf16": rules.pure_bf16,
        "use_dft_loss": lambda _, value: became(model__loss="dft" if value else "cross_entropy"),
        "mask_history": lambda _, value: became(data__train_on="last" if value else "all"),
        "val_size": rules.val_share,
        "neat_packing": rules.packed,
        "template": _template({"default": None, "chatml": "chatml", "llama3": "llama3"}),
        "enable_thinking": lambda _, value: became(data__apply_chat_template_kwargs={"enable_thinking": bool(value)}),
        "dataset": sources.named_datasets("train_files"),
        "eval_dataset": sources.named_datasets("val_files"),
        "stage": _only("sft"),
        "do_train": _only(True),
    },
)
VERL_LEGACY = Peer(
    "verl",
    ("verl", "torchrun"),
    LEGACY_DEFAULTS,
    VERL_RULES
    | {
        "trainer.total_training_steps": lambda _, value: differs(
            "the learning rate falls over these steps, there over all epochs", trainer__total_training_steps=int(value)
        )
    },
)
VERL = Peer("verl", ("verl", "torchrun"), ENGINE_DEFAULTS, VERL_RULES)
