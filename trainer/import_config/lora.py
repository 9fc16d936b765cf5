"""What becomes of settings of adapters; each trainer switches them on in its own way."""

from collections.abc import Callable
from typing import Any

from trainer.import_config.answers import Answer, Given, Rule, became, differs, no_equal, nothing

TWICE = "twice the rank"
PEFT_DEFAULT = ["q_proj", "v_proj"]
"""What peft takes for Llama, Qwen, Mistral and Gemma where no layers are named."""


def lora_rules(is_on: Callable[[Given], bool], *, rank: str, targets: str) -> dict[str, Rule]:
    """`rank` and `targets` are what the trainer calls the rank and the layers with adapters."""

    def when_on(rule: Rule) -> Rule:
        return lambda given, value: rule(given, value) if is_on(given) else nothing("no adapters are trained")

    def alpha(given: Given, value: Any) -> Answer:
        return became(model__lora_alpha=2 * int(given.value(rank)) if value == TWICE else int(value))

    rules: dict[str, Rule] = {
        rank: lambda _, value: became(model__lora_rank=int(value)),
        "lora_alpha": alpha,
        "lora_dropout": lambda _, value: no_equal("adapters have no dropout") if value else nothing(),
        targets: _targets,
        "lora_target_linear": lambda _, value: became(model__target_modules="all-linear") if value else nothing(),
        "use_rslora": lambda _, value: became(model__use_rslora=bool(value)),
        "peft_use_rslora": lambda _, value: became(model__use_rslora=bool(value)),
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
