"""A log together with what was found out about it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from trainer.tools.report.formatting import shown
from trainer.tools.report.names import OPTIONS, ROLES, options_of
from trainer.tools.report.result import Anomaly
from trainer.tools.report.run_log import RunLog, Series
from trainer.tools.report.shapes import period
from trainer.tools.report.statistics import Ints, Mask, epoch_means, finite
from trainer.tracking.metrics.words import pattern

MIN_CADENCE = 5
"""Saves or validations that come more often cannot be told apart from other steps."""
NUM_COMPILE = 3
"""Steps that are slower because they compile."""
NUM_WARMING = 20
"""Steps in which devices are not yet busy."""


CAP_SHARE = 0.97
"""A longest answer within 3 % of the cap has reached it."""
MIN_HITS = 3
"""Fewer answers reach the cap by chance."""


class NotJudged(Exception):  # noqa: N818 - no error: a check that has nothing to say
    """A check lacks data that it needs; the message names the data."""


@dataclass(frozen=True)
class AnalysedRun:
    """A log, the profile that selects the absolute bands, and the anomalies."""

    log: RunLog
    profile: str
    anomalies: tuple[Anomaly, ...] = ()

    def key(self, role: str) -> str | None:
        """Return the key under which this log has a role; of several devices the one with the
        highest value.
        """
        series, keys = self.log.series, ROLES[_source(role)]
        exact = [key for key in keys if key in series]
        if exact:
            return exact[0]
        patterns = [pattern(key) for key in keys if "<" in key]
        matching = [key for key in series if any(one.fullmatch(key) for one in patterns)]
        return max(
            matching,
            key=lambda key: np.nanmax(series[key].values, initial=-np.inf),
            default=None,
        )

    def find(self, role: str) -> Series | None:
        """Return the finite points of a role; None where the log has none."""
        key = self.key(role)
        points = finite(self.log.series[key]) if key else None
        if points and role in DERIVED:
            points = DERIVED[role][1](self, points)
        return points or None

    def get(self, role: str, *, least: int = 1) -> Series:
        """Return the finite points of a role; raise `NotJudged` for fewer than `least`."""
        series, name = self.find(role), ROLES[_source(role)][0]
        if series is None:
            raise NotJudged(f"the log has no {name}")
        if len(series) < least:
            raise NotJudged(f"{name} has {len(series)} points, {least} are needed")
        return series

    def name(self, role: str) -> str:
        """Return the key of a role in this log, or its first possible key."""
        return self.key(role) or ROLES[_source(role)][0]

    def levels(self, role: str) -> Series:
        """Return the points that show a metric's level: its epoch means if a controller sets it,
        because such a metric swings from batch to batch.
        """
        series, epochs = self.get(role), self.find("epoch")
        if self.profile != "controller" or epochs is None:
            return series
        return epoch_means(series, epochs)

    def config(self, *names: str) -> Any:
        """Return the first option of these names, given in full or by the last part; None where
        none is set.
        """
        found = (
            value
            for name in names
            for key, value in self.log.config.items()
            if f".{key}".endswith(f".{name}")
        )
        return next(found, None)

    @cached_property
    def options(self) -> Mapping[str, str]:
        """Purpose -> option in the framework that wrote the log."""
        return options_of(self.log.source)

    def setting(self, purpose: str) -> Any:
        """Return the value of an option by its purpose; None where the configuration lacks it."""
        return self.config(self.options[purpose], *OPTIONS[purpose])

    def amount(self, purpose: str) -> float | None:
        """Return the value of an option if it is a positive number."""
        value = self.setting(purpose)
        return value if isinstance(value, int | float) and value > 0 else None

    @cached_property
    def is_configured(self) -> bool:
        """Return whether the log holds launch options; trainer_state.json holds only lengths and
        cadences.
        """
        purposes = ("lr", "clip", "warmup", "schedule")
        return any(self.setting(purpose) is not None for purpose in purposes)

    def quoted(self, purpose: str) -> str:
        """Quote the configuration: `max_grad_norm is not set`, `learning_rate = 5e-5`."""
        if not self.is_configured:
            return "the run's configuration is not known"
        value, name = self.setting(purpose), self.options[purpose]
        return f"{name} is not set" if value is None else f"{name} = {shown(value)}"

    def checkpoint(self, step: int) -> str:
        """Return words for the newest complete checkpoint up to a step."""
        saved = [one.step for one in self.log.checkpoints if one.is_complete and one.step <= step]
        if not saved:
            return f"a checkpoint of step {step} or before, if one was kept"
        return f"the checkpoint of step {max(saved)}"

    @cached_property
    def is_pretrained(self) -> bool:
        """Return whether usual ranges of losses, which are those of pretrained models, apply."""
        is_quickstart = self.config("model.partial_pretrain") == "quickstart"
        return not (self.config("model.random_weights") or is_quickstart)

    @cached_property
    def last_step(self) -> int:
        """Return the last step of any metric."""
        return max((series.ends[1] for series in self.log.series.values() if series), default=0)

    @cached_property
    def total_steps(self) -> int:
        """Return the planned steps, else the last step."""
        return self.log.total_steps or self.last_step

    def is_busy(self, steps: Ints) -> Mask:
        """Return which steps, or the ones before them, saved or validated."""
        known = [state.step for state in self.log.checkpoints]
        known += [event.step for event in self.log.events if event.kind == "checkpoint"]
        if losses := self.find("val_loss"):
            known += losses.steps.tolist()
        mask = np.isin(steps, known) | np.isin(steps - 1, known)
        for cadence in map(self.amount, ("save", "eval")):
            if cadence and cadence >= MIN_CADENCE:
                mask |= steps % int(cadence) <= 1
        return mask


def _ordinary(run: AnalysedRun, times: Series) -> Series:
    """Return step times without the first, which compile, and those that save or validate."""
    keep = ~run.is_busy(times.steps) & (np.arange(len(times)) >= NUM_COMPILE)
    return times[keep] if keep.any() else times


def _data_share(run: AnalysedRun, waits: Series) -> Series:
    """Return the share of a step that waits for data, without the first steps."""
    times, late = run.get("time"), waits[NUM_COMPILE:]
    step_s = np.interp(late.steps, times.steps, times.values)
    return Series(late.steps, late.values / np.maximum(step_s, np.finfo(float).tiny))


def _relative_time(run: AnalysedRun, times: Series) -> Series:
    """Return ordinary step times over their median, without long steps at regular distances, which
    do work of their own.
    """
    ordinary = _ordinary(run, times)
    relative = _over(ordinary, float(np.median(ordinary.values)))
    is_slow = relative.values > 2
    return relative if period(relative.steps[is_slow]) is None else relative[~is_slow]


def _over(series: Series, usual: object) -> Series:
    """Return a series as multiples of a positive number; nothing without one."""
    if not isinstance(usual, int | float) or usual <= 0:
        return series[:0]
    return Series(series.steps, series.values / usual)


def _over_median(series: Series, until: int | None = None) -> Series:
    """Return a series as multiples of the median of its first points."""
    return _over(series, float(np.median(series.values[:until])))


def _at_cap(run: AnalysedRun, lengths: Series) -> Series:
    """Return 1 where the longest answer reaches its limit, else 0; without a known limit where it
    is a length met often.
    """
    longest = lengths.values.max()
    is_often = np.count_nonzero(lengths.values == longest) >= MIN_HITS
    cap = run.amount("completion") or (longest if is_often else np.inf)
    return Series(lengths.steps, np.where(lengths.values >= CAP_SHARE * cap, 1.0, 0.0))


BUDGETS = ("latency_budget", "budget_ms", "latency_budget_ms", "budget")
"""Options of controllers that limit the latency, in ms."""
DERIVED: Mapping[str, tuple[str, Callable[[AnalysedRun, Series], Series]]] = {
    "ordinary_time": ("time", _ordinary),
    "time_ratio": ("time", _relative_time),
    "warm_gpu_util": ("gpu_util", lambda _, busy: busy[busy.steps > NUM_WARMING]),
    "data_share": ("data_time", _data_share),
    "reward_std_ratio": ("reward_std", lambda _, one: _over_median(one, len(one) // 3 + 1)),
    "min_length_ratio": ("min_length", lambda _, one: _over_median(one)),
    "at_cap": ("max_length", _at_cap),
    "zero_loss": ("loss", lambda _, one: Series(one.steps, np.where(one.values == 0, 1.0, 0.0))),
    "latency_ratio": ("latency", lambda run, one: _over(one, run.config(*BUDGETS))),
}
"""Role -> the role in the log that it follows from, and how."""


def _source(role: str) -> str:
    """Return the logged role from which a role is derived."""
    return DERIVED[role][0] if role in DERIVED else role


def recognise_profile(log: RunLog) -> str:
    """Return controller for rewards with latencies or budgets, grpo for rewards, a KL or
    advantages, sft for a loss without rewards.
    """
    run = AnalysedRun(log, "generic")
    if run.key("violation") or (run.key("reward") and run.key("latency")):
        return "controller"
    signs = ("reward", "kl", "update_kl", "clipped_ratio", "adv_mean")
    has_rewards = any(key.startswith("rewards/") for key in log.series)
    if has_rewards or any(map(run.key, signs)):
        return "grpo"
    return "sft" if run.key("loss") else "generic"
