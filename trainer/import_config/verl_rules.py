"""What becomes of verl's settings: most are named as ours."""

from typing import Any

from trainer.import_config.answers import Answer, Given, Rule, became, differs, no_equal, nothing
from trainer.import_config.rules import TRACKERS

NONE = "none"


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


def _frequency(name: str) -> Rule:
    def rule(_: Given, value: Any) -> Answer:
        if isinstance(value, str):
            return no_equal(f"trainer.{name} counts steps")
        return became(**{f"trainer__{name}": int(value)})

    return rule


def _logger(_: Given, value: Any) -> Answer:
    names = value if isinstance(value, list) else [value]
    known = [name for name in names if name in ("console", *TRACKERS)]
    other = [str(name) for name in names if name not in (*known, "file")]
    if other:
        return differs(f"trackers are {', '.join(TRACKERS)}, not {', '.join(other)}", trainer__logger=known)
    return became(trainer__logger=known or ["console"])


VERL_RULES: dict[str, Rule] = {
    "data.micro_batch_size": lambda _, __: nothing("verl does not read it, data.micro_batch_size_per_gpu it does"),
    "data.micro_batch_size_per_gpu": _samples,
    "data.max_token_len_per_gpu": lambda given, value: became(**_tokens(given, int(value))),
    "data.val_files": _validation,
    "data.prompt_key": _column("prompt_key"),
    "data.response_key": _column("response_key"),
    "data.prompt_dict_keys": lambda _, __: nothing("it is in data.prompt_key"),
    "data.response_dict_keys": lambda _, __: nothing("it is in data.response_key"),
    "trainer.save_freq": _frequency("save_freq"),
    "trainer.test_freq": _frequency("test_freq"),
    "trainer.logger": _logger,
    "trainer.max_ckpt_to_keep": lambda _, value: became(
        trainer__max_ckpt_to_keep=None if value == "all" else int(value)
    ),
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
    "trainer.max_ckpt_to_keep": "all",
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
