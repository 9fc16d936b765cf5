"""A log together with what was found out about it, and what rules measure of it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.metrics.words import pattern
from trainer.report.formatting import written
from trainer.report.result import Anomaly
from trainer.report.rule_table import table
from trainer.report.run_log import RunLog, Series
from trainer.report.statistics import Slope, collapse, epoch_means, finite, longest_run, noise, slope
from trainer.report.vocabulary import ROLES

Ints = NDArray[np.int64]
PROFILES = ("sft", "grpo", "controller", "generic")
MIN_CADENCE = 5
"""Below it every other step is one that saves: nothing can be told apart."""
_GENERATES = ("kl", "clipped_ratio", "adv_mean")


class NotJudged(Exception):  # noqa: N818 - no error: a rule that has nothing to say
    """A rule that lacks what it needs; the text says what."""


@dataclass(frozen=True)
class AnalysedRun:
    """A log, the profile that says which absolute bands apply, the limits and the anomalies."""

    log: RunLog
    profile: str
    limits: Mapping[str, float]
    anomalies: tuple[Anomaly, ...] = ()
    external: Mapping[int, float] | None = None
    """Results that outrank the validation loss, higher is better, by step."""
    external_name: str = "external result"

    def key(self, role: str) -> str | None:
        """The key under which this log has a role; of several devices that of the highest value."""
        series = self.log.series
        if (found := next((key for key in ROLES[role] if key in series), None)) is not None:
            return found
        patterns = [pattern(key) for key in ROLES[role] if "<" in key]
        several = [key for key in series if any(one.fullmatch(key) for one in patterns)]
        return max(several, key=lambda key: np.nanmax(series[key].values, initial=-np.inf), default=None)

    def find(self, role: str) -> Series | None:
        """The finite points of a role; None where the log has none."""
        key = self.key(role)
        series = finite(self.log.series[key]) if key else None
        return series if series is not None and len(series) else None

    def get(self, role: str) -> Series:
        """The same, for roles that a rule named as needed; raises `NotJudged` without them."""
        series = self.find(role)
        if series is None:
            raise NotJudged(f"the log has no {ROLES[role][0]}")
        return series

    def name(self, role: str) -> str:
        return self.key(role) or ROLES[role][0]

    def epochs(self, role: str) -> Series:
        """Epoch means of a role; a controller logs one point an epoch."""
        series = self.get(role)
        return series if self.profile == "controller" else epoch_means(series, self.find("epoch"))

    def slope(self, role: str) -> Slope:
        return slope(self.epochs(role))

    def config(self, *names: str) -> Any:
        """The first option of these names, given in full or by the last part; None where none is set."""
        for name in names:
            for key, value in self.log.config.items():
                if key == name or key.endswith(f".{name}"):
                    return value
        return None

    @cached_property
    def options(self) -> Mapping[str, str]:
        """Purpose -> name in the framework that wrote the log; transformers' for those without names of their own."""
        return {**table()["options"]["others"], **table()["options"].get(self.log.source, {})}

    def setting(self, purpose: str) -> Any:
        """What the run's configuration says of an option; None where it says nothing."""
        return self.config(self.options[purpose], *table()["synonyms"].get(purpose, ()))

    @cached_property
    def is_configured(self) -> bool:
        """Whether the log holds launch options; trainer_state.json alone tells no more than how long and how often."""
        return any(self.setting(purpose) is not None for purpose in ("lr", "clip", "warmup", "schedule"))

    @cached_property
    def facts(self) -> Mapping[str, str]:
        """By purpose a quotation of the configuration: `max_grad_norm is not set`, `learning_rate = 5e-5`."""
        if not self.is_configured:
            return dict.fromkeys(self.options, "the run's configuration is not known")
        found = {name: self.setting(purpose) for purpose, name in self.options.items()}
        told = (f"{name} is not set" if at is None else f"{name} = {written(at)}" for name, at in found.items())
        return dict(zip(self.options, told, strict=True))

    def checkpoint(self, step: int) -> str:
        """The newest complete one up to a step, as far as they lie beside the log."""
        newest = max((one.step for one in self.log.checkpoints if one.is_complete and one.step <= step), default=None)
        kept = f"a checkpoint of step {step} or before, if one was kept"
        return kept if newest is None else f"the checkpoint of step {newest}"

    def require_pretrained(self) -> None:
        """Usual ranges of losses are those of pretrained models: raises `NotJudged` where the weights were random."""
        if self.config("model.random_weights") or self.config("model.partial_pretrain") == "quickstart":
            raise NotJudged("no usual range for a model trained from random weights")

    @cached_property
    def last_step(self) -> int:
        return max((series.ends[1] for series in self.log.series.values() if len(series)), default=0)

    @cached_property
    def total_steps(self) -> int:
        return self.log.total_steps or self.last_step

    @cached_property
    def cadences(self) -> tuple[int, ...]:
        """After how many steps the run saves and validates, as far as its configuration tells."""
        found = [self.config("trainer.save_freq", "save_steps", "save_freq")]
        found.append(self.config("trainer.test_freq", "eval_steps", "test_freq"))
        return tuple(int(value) for value in found if isinstance(value, int | float) and value >= MIN_CADENCE)

    def is_busy(self, steps: Ints) -> NDArray[np.bool_]:
        """Which steps, or the ones before them, saved or validated: as the log shows and the configuration says."""
        known = {c.step for c in self.log.checkpoints}
        known |= {event.step for event in self.log.events if event.kind in ("checkpoint", "save", "eval")}
        if (losses := self.find("val_loss")) is not None:
            known |= set(losses.steps.tolist())
        ends = np.array(sorted(known), dtype=np.int64)
        mask = np.isin(steps, ends) | np.isin(steps, ends + 1)
        for cadence in self.cadences:
            mask |= steps % cadence <= 1
        return mask

    def was_trained(self, step: int) -> bool:
        """False for a step that was passed over: a log of every step has no row of it."""
        losses = self.find("loss")
        if losses is None or len(losses) < 2 or float(np.median(np.diff(losses.steps))) > 1:
            return True
        return bool(np.any(losses.steps == step))


def recognise_profile(log: RunLog) -> str:
    """controller: rewards with accuracy and latency; grpo: rewards, a KL or advantages; sft: a loss without rewards."""
    run = AnalysedRun(log, "generic", {})
    if run.key("violation") or (run.key("reward") and run.key("latency")):
        return "controller"
    has_rewards = bool(run.key("reward")) or any(key.startswith("rewards/") for key in log.series)
    if has_rewards or any(run.key(role) for role in _GENERATES):
        return "grpo"
    return "sft" if run.key("loss") else "generic"


NUM_ENDS = 10
"""Points whose median stands for the start or the end of a curve."""
CLEAR_SIGMA = 3
"""A fall is at least so many times the noise from epoch to epoch: of many good runs some end lower by chance."""
NUM_WARMING = 20
"""Steps in which devices are not yet busy."""


@dataclass(frozen=True)
class Measure:
    """One measurement of a rule: by which row it is told, where, and what the row's words are filled with."""

    row: str = "main"
    value: float | None = None
    steps: tuple[int, int] | None = None
    words: Mapping[str, object] = field(default_factory=dict)
    evidence: tuple[str, ...] = ()
    metric: str | None = None
    """Its key; that of the row's role unless given."""
    limit: float | None = None
    """That of the row unless given."""
    is_fault: bool = True
    """False: measured and in order, which the checklist tells."""


def beyond(series: Series, mask: NDArray[np.bool_], row: str = "main", *, usual: float = 1.0) -> Iterator[Measure]:
    """The points for which `mask` holds: how many, where, and the highest against what is usual."""
    if steps := series.steps[mask].tolist():
        peak = series.values[mask].max()
        at = steps[int(np.argmax(series.values[mask]))]
        words = {"count": len(steps), "first": steps[0], "all": steps, "peak": peak, "at": at, "usual": usual}
        yield Measure(row, float(peak / usual), (steps[0], steps[-1]), words)


def stretch(series: Series, mask: NDArray[np.bool_], row: str, least: float, value: str) -> Iterator[Measure]:
    """The longest stretch of at least so many points for which `mask` holds, told by its `value`."""
    start, stop = longest_run(mask)
    if stop - start >= max(least, 1):
        part = series[start:stop]
        words = {"points": len(part)} | {name: STATISTICS[name](part) for name in ("highest", "median", "mean")}
        yield Measure(row, float(words[value]), part.ends, words)


def collapsed(run: AnalysedRun, role: str, row: str) -> Iterator[Measure]:
    """What a reward or accuracy had reached and lost."""
    if (fall := collapse(run.get(role), run.limits)) is not None:
        at, size = fall.steps[0], fall.before - fall.after
        words = {"before": fall.before, "after": fall.after, "at": at, "checkpoint": run.checkpoint(at)}
        yield Measure(row, size, fall.steps, words, metric=run.name(role), limit=fall.least)


def going_wrong(run: AnalysedRun, role: str, row: str, *, good: float) -> Iterator[Measure]:
    """More epochs in a row than the limit in which a role went away from `good` (+1 up) by more than noise explains."""
    means, needed = run.epochs(role), int(run.limits["rising_epochs"]) + 1
    last = means[-needed:]
    trend = slope(last)
    is_clear = -good * trend.change > CLEAR_SIGMA * noise(means) and trend.p_value < run.limits["rising_p"]
    if len(last) == needed and is_clear:
        best = int(means.steps[int(np.argmax(good * means.values))])
        words = {"size": abs(trend.change), "checkpoint": run.checkpoint(best)}
        yield Measure(row, trend.change, last.ends, words)


def _late_mean(series: Series) -> float:
    late = series.values[series.steps > NUM_WARMING]
    if not len(late):
        raise NotJudged(f"no sample after step {NUM_WARMING}")
    return float(late.mean())


STATISTICS: Mapping[str, Callable[[Series], float]] = {
    "median": lambda series: float(np.median(series.values)),
    "mean": lambda series: float(series.values.mean()),
    "late_mean": _late_mean,
    "sum": lambda series: float(series.values.sum()),
    "highest": lambda series: float(series.values.max()),
    "peak_ratio": lambda series: float(series.values.max() / max(np.median(series.values), 1.0)),
    "first": lambda series: float(series.values[0]),
    "last": lambda series: float(series.values[-1]),
    "start": lambda series: float(np.median(series.values[:NUM_ENDS])),
    "end": lambda series: float(np.median(series.values[-NUM_ENDS:])),
}
PLACES: Mapping[str, slice] = {"start": slice(None, NUM_ENDS), "end": slice(-NUM_ENDS, None)}
"""Statistics of a part of the run: these points."""
