"""What to do about a cause, in the option names of the framework that wrote the log, with the run's own values."""

from typing import Any

from trainer.report.analysed_run import AnalysedRun
from trainer.report.formatting import number
from trainer.report.raised_rate import raised_rates, scheduled
from trainer.report.rule_table import table


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
    found, name = value(run, purpose), option(run, purpose)
    return f"{name} is not set" if found is None else f"{name} = {_written(found)}"


def checkpoint(run: AnalysedRun, step: int) -> str:
    """The newest complete one up to a step, as far as they lie beside the log."""
    newest = max((one.step for one in run.log.checkpoints if one.is_complete and one.step <= step), default=None)
    kept = f"a checkpoint of step {step} or before, if one was kept"
    return kept if newest is None else f"the checkpoint of step {newest}"


def advice(run: AnalysedRun, name: str) -> tuple[str, dict[str, object]]:
    """A sentence of the table's section `advice`, and its words: of several the one for what is known of the run."""
    entry = table()["advice"][name]
    if (purpose := entry.get("of")) is None:
        kinds = (*(["generating"] if run.key("kl") else []), run.log.source, "others")
        return str(next(entry[kind] for kind in kinds if kind in entry)), {}
    now = value(run, purpose)
    if purpose == "lr" and not isinstance(now, int | float) and (rates := run.find("lr")) is not None:
        now = float(scheduled(rates, raised_rates(rates, jump=run.limits["lr_jump"])).values.max())
    if not isinstance(now, int | float) or not 0 < now <= entry.get("at_most", now):
        return str(entry["unset"]), {}
    lowered = int(now) // entry["by"] if entry.get("is_whole") else _written(now / entry["by"])
    return str(entry["set"]), {"now": _written(now), "lowered": lowered}


def _written(found: Any) -> str:
    return number(float(found)) if isinstance(found, int | float) and not isinstance(found, bool) else str(found)
