"""Compares a run with its checkpoint: some values must be equal, others only cause a warning."""

from collections.abc import Collection, Mapping
from typing import Any

from trainer.config import MAX_TOKENS, RECOMPUTE, ConfigError
from trainer.runtime.json_lines import flat

SOME_TWICE = "some samples may be trained twice, others not at all"
REFUSED = {
    "data": f"training continues at the same position in the new data; {SOME_TWICE}",
    "validation": "the best loss and early stopping count only validations of the new rows",
    "train_batch_size": "the rest of the epoch uses the new size; each sample is still trained "
    "once",
    "seed": f"the rest of the epoch has a different order; {SOME_TWICE}",
    "data.order": f"the rest of the epoch has a different order; {SOME_TWICE}",
    "tokenizer": "added tokens have untrained weights; exports contain the new tokenizer",
    "model_config": "the changed architecture continues with the saved weights",
    "other_parts": "the untrained tensors are exported as they are now",
}
"""Values that must not change, and the effect of a change that `trainer.resume_allow` accepts."""

BASE_WEIGHTS = "base_weights"
ADAPTER_SCALING = "adapter_scaling"
FIXED = {
    BASE_WEIGHTS: "adapters fit only the weights they were trained on",
    ADAPTER_SCALING: "the saved adapters were trained with the old scaling",
    **dict.fromkeys(
        ("model.lora_rank", "model.lora_alpha", "model.use_rslora", "model.target_modules"),
        "the saved adapters have the old shape",
    ),
    "model.modules_to_save": "the checkpoints contain only the modules that were trained",
    "model.load_in_4bit": "adapters fit only the weights they were trained on",
    "model.freeze": "the optimizer has state only for the parameters that were trained",
}
"""Values that must never change, and the reason."""

WARNED = (
    "data.max_length",
    MAX_TOKENS,
    "data.truncation",
    "model.attention",
    RECOMPUTE,
    "model.loss",
    "model.lora_dropout",
    "model.master_dtype",
    "model.fsdp_config.param_dtype",
    "optim.betas",
    "optim.eps",
    "optim.state_dtype",
    "optim.weight_decay",
    "optim.groups",
    "optim.clip_grad",
    "trainer.deterministic",
    "trainer.checkpoint.export_dtype",
    "torch",
    "transformers",
)
"""Values that may affect results, so a change causes a warning. The learning rate is compared as
part of its schedule. All other keys may change freely.
"""


def describe_run(resolved: Mapping[str, Any], **values: Any) -> dict[str, str]:
    """Return the fingerprints, by name, of the resolved configuration and the other `values`."""
    settings = flat(resolved)
    configured = {key: settings[key] for key in (*FIXED, *REFUSED, *WARNED) if "." in key}
    return {name: str(value) for name, value in (configured | values).items()}


def compare(
    saved: Mapping[str, str], now: Mapping[str, str], *, allow: Collection[str] = ()
) -> list[str]:
    """Return the differences between saved and current fingerprints, one line each, for the log.

    `allow`: names in `REFUSED` whose change is accepted. If any difference is refused, raises
    `ConfigError` with all differences.
    """
    changed = {
        key: f"{key}: {saved[key]} -> {now[key]}"
        for key in now
        if saved.get(key, now[key]) != now[key]
    }
    refused = [key for key in (*FIXED, *REFUSED) if key in changed and key not in allow]
    if not refused:
        return [
            f"{text} ({REFUSED[key]})" if key in REFUSED else text for key, text in changed.items()
        ]
    lines = ["the checkpoint belongs to a different run; saved -> now:"]
    for key, text in changed.items():
        reason = f"   <- refused: {(FIXED | REFUSED)[key]}" if key in refused else ""
        lines.append(f"  {text}{reason}")
    fix = "Fix: restore the refused values, or start a new run with trainer.experiment_name=<new name>"
    if not FIXED.keys() & refused:
        fix += f", or accept the change with trainer.resume_allow=[{','.join(refused)}]"
    raise ConfigError("\n".join([*lines, fix]))
