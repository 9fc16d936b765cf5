"""What to do about a cause, in the option names of the framework that wrote the log, with the run's own values."""

from collections.abc import Callable, Mapping
from typing import Any

from trainer.report.analysed_run import AnalysedRun
from trainer.report.raised_rate import raised_rates, scheduled
from trainer.report.rule_table import table
from trainer.report.sentence_parts import number


def option(run: AnalysedRun, purpose: str) -> str:
    """Its name in the framework that wrote the log; transformers' for those without names of their own."""
    options = table()["options"]
    return str(options.get(run.log.source, {}).get(purpose) or options["others"][purpose])


def value(run: AnalysedRun, purpose: str) -> Any:
    """What the run's configuration says; None where it says nothing."""
    return run.config(option(run, purpose), *table()["synonyms"].get(purpose, ()))


def is_known(run: AnalysedRun) -> bool:
    """Whether the log holds launch options; trainer_state.json alone tells no more than how long and how often."""
    return any(value(run, purpose) is not None for purpose in ("lr", "clip", "warmup", "schedule"))


def fact(run: AnalysedRun, purpose: str) -> str:
    """A quotation of the configuration: `max_grad_norm is not set`, `learning_rate = 5e-5`; nothing without one."""
    if not is_known(run):
        return "the run's configuration is not known"
    found = value(run, purpose)
    name = option(run, purpose)
    return f"{name} is not set" if found is None else f"{name} = {_written(found)}"


def _clip(run: AnalysedRun) -> str:
    name, now = option(run, "clip"), value(run, "clip")
    if isinstance(now, int | float) and 0 < now <= 1:
        target = f"Lower {name} from {_written(now)} to {_written(now / 2)}"
    else:
        target = f"Set {name} to 1.0, or 0.5 where spikes stay"
    return f"{target}, and skip the optimizer step when the norm is far above it."


def _lower_rate(run: AnalysedRun) -> str:
    """A tenth, with a longer warm-up."""
    name, warmup, now = option(run, "lr"), option(run, "warmup"), value(run, "lr")
    if not isinstance(now, int | float) and (rates := run.find("lr")) is not None:
        now = float(scheduled(rates, raised_rates(rates, jump=run.limits["lr_jump"])).values.max())
    lowered = f" from {_written(now)} to {_written(now / 10)}" if isinstance(now, int | float) else " to a tenth"
    return f"Lower {name}{lowered} and set {warmup} to 0.1."


def _larger_batch(run: AnalysedRun) -> str:
    if run.log.source in table()["options"]:
        return f"Raise {option(run, 'batch')} (twice to four times)."
    return f"Raise {option(run, 'batch')} to 4 or {option(run, 'accumulation')} to 8."


def _stronger_kl(run: AnalysedRun) -> str:
    now = value(run, "beta")
    was = f" from {_written(now)}" if now is not None else " (often 0.04)"
    return f"Raise {option(run, 'beta')}{was} to 0.1 to 0.2 and adapt it to the measured KL."


def _shorter_completions(run: AnalysedRun) -> str:
    now, name = value(run, "completion"), option(run, "completion")
    lowered = f" from {now} to {int(now) // 2}" if isinstance(now, int | float) else " (512 to 256)"
    return f"Lower {name}{lowered}, give truncated answers reward 0, and set stop words or the end-of-text token."


def _watch(run: AnalysedRun) -> str:
    """Early stop and return to a checkpoint."""
    often = f"Validate and save often ({option(run, 'eval')}=100 and {option(run, 'save')}=100)"
    if run.key("kl"):
        return f"{often}; at kl > 10 or a clipped ratio > 0.3 keep a snapshot and return to a checkpoint, or stop."
    if run.log.source == "fsdp-sft":
        return f"{often}, with trainer.guard.on_severe=rollback: such a step returns to a checkpoint."
    return f"{often}; where loss or gradient norm are far off, return to a checkpoint, or stop."


ADVICE: Mapping[str, Callable[[AnalysedRun], str]] = {
    "clip": _clip,
    "lower_rate": _lower_rate,
    "decay": lambda run: f"Let the rate fall: {option(run, 'schedule')}=cosine or linear.",
    "larger_batch": _larger_batch,
    "stronger_kl": _stronger_kl,
    "tighter_ratio": lambda run: (
        f"Clip probability ratios tighter: {option(run, 'epsilon_low')} and {option(run, 'epsilon_high')} at 0.1."
    ),
    "shorter_completions": _shorter_completions,
    "watch": _watch,
    "larger_group": lambda run: (
        f"Raise {option(run, 'group')} to 8 or 10, the batch size, the learning rate's decay, or train longer."
    ),
    "loading": lambda run: f"Raise {option(run, 'workers')}, prepare the data beforehand, or put it on a faster disk.",
    "memory": lambda run: f"Use {option(run, 'memory')}, or a smaller micro-batch.",
}
"""Sentences that the remedies of the table are made of."""


def checkpoint(run: AnalysedRun, step: int) -> str:
    """The newest complete one up to a step, as far as they lie beside the log."""
    steps = [state.step for state in run.log.checkpoints if state.is_complete and state.step <= step]
    return (
        f"the checkpoint of step {max(steps)}" if steps else f"a checkpoint of step {step} or before, if one was kept"
    )


def _written(found: Any) -> str:
    return number(float(found)) if isinstance(found, int | float) and not isinstance(found, bool) else str(found)
