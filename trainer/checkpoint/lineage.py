"""Compare a run with its continuation: some values must be equal, others may change with a
warning.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any

from trainer.config import MAX_TOKENS, RECOMPUTE, ConfigError

REFUSED = {
    "data": "the new samples are trained from the same place of the epoch on: some may come twice, "
    "some not at all",
    "train_batch_size": "the rest of the epoch is trained in the new size, no sample twice and "
    "none left out",
    "seed": "the rest of the epoch follows another order: some samples may come twice, some not at "
    "all",
    "data.order": "the rest of the epoch follows another order: some samples may come twice, some "
    "not at all",
    "tokenizer": "tokens that it adds have untrained weights, and the export takes it over",
    "model_config": "the saved weights go on in the changed architecture",
    "other_parts": "the tensors beside the text part are exported as they are now",
}
"""Values whose change is refused, and what happens if `trainer.resume_allow` names it."""

BASE_WEIGHTS = "base_weights"
FIXED = {
    BASE_WEIGHTS: "adapters fit the weights they were trained for",
    **dict.fromkeys(
        ("model.lora_rank", "model.lora_alpha", "model.use_rslora", "model.target_modules"),
        "adapters were made so",
    ),
    "model.freeze": "the optimizer has a state for what was trained",
}
"""Values whose change is always refused, and why."""

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
"""Values whose change is warned of: the numbers may change. The learning rate is compared as a
schedule. All other keys are free.
"""


@dataclass(frozen=True)
class Lineage:
    """`fingerprints` of this run, all as text; `allow`: names of `REFUSED` whose change the
    user accepts.
    """

    fingerprints: Mapping[str, str]
    allow: tuple[str, ...] = ()


def describe_run(resolved: Mapping[str, Any], **values: Any) -> dict[str, str]:
    """Fingerprints from the resolved configuration, and from `values` for what the
    configuration does not say.
    """
    configured = {
        key: reduce(getitem, key.split("."), resolved)
        for key in (*FIXED, *REFUSED, *WARNED)
        if "." in key
    }
    return {name: str(value) for name, value in (configured | values).items()}


def _is_equal(key: str, saved: str, now: str) -> bool:
    """Compare two values. The previous version saved settings as they were written, such as 2 for
    2.0 and x for ['x'].
    """
    if saved == now or "." not in key:
        return saved == now
    try:
        return float(saved) == float(now)
    except ValueError:
        return saved.strip("[]'") == now.strip("[]'")


def compare(saved: Mapping[str, str], lineage: Lineage) -> list[str]:
    """Return accepted differences from the checkpoint, one line each, for the log.

    Raises `ConfigError` with all differences when one of them would make the continued run another
    run.
    """
    now = lineage.fingerprints
    changed = {
        key: f"{key}: {saved[key]} -> {now[key]}"
        for key in now
        if not _is_equal(key, saved.get(key, now[key]), now[key])
    }
    refused = [key for key in (*FIXED, *REFUSED) if key in changed and key not in lineage.allow]
    if not refused:
        return [
            f"{text} ({REFUSED[key]})" if key in REFUSED else text for key, text in changed.items()
        ]
    accept = ""
    if not FIXED.keys() & refused:
        accept = f", or accept it with trainer.resume_allow=[{','.join(refused)}]"
    lines = ["the checkpoint belongs to another run; saved -> now:"]
    for key, text in changed.items():
        lines.append(f"  {text}   <- refused" if key in refused else f"  {text}")
    lines.append(
        f"Restore what is refused, or begin anew (trainer.experiment_name=<new name>){accept}:"
    )
    reasons = FIXED | REFUSED
    raise ConfigError("\n".join([*lines, *(f"  {key}: {reasons[key]}" for key in refused)]))
