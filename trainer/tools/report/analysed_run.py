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
from trainer.tools.report.statistics import Ints, Mask, epoch_means, finite, slope
from trainer.tracking.metrics.words import pattern

PROFILES = ("sft", "grpo", "controller", "generic")
MIN_CADENCE = 5
"""Saves or validations that come more often cannot be told apart from other steps."""
NUM_COMPILE = 3
"""Steps that are slower because they compile."""
NUM_WARMING = 20
"""Steps in which devices are not yet busy."""


class NotJudged(Exception):  # noqa: N818 - no error: a check that has nothing to say
    """A check lacks what it needs; the text says what."""


@dataclass(frozen=True)
class AnalysedRun:
    """A log, the profile that says which absolute bands apply, the limits and the anomalies."""

    log: RunLog
    profile: str
    limits: Mapping[str, float]
    anomalies: tuple[Anomaly, ...] = ()

    def key(self, role: str) -> str | None:
        """Return the key under which this log has a role; of several devices the one with the
        highest value.
        """
        series, keys = self.log.series, ROLES[_source(role)]
        patterns = [pattern(key) for key in keys if "<" in key]
        matching = [key for key in series if any(one.fullmatch(key) for one in patterns)]
        matching.sort(key=lambda key: -np.nanmax(series[key].values, initial=-np.inf))
        exact = [key for key in keys if key in series]
        return next(iter(exact + matching), None)

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
        """Return the points that a level is judged by: epoch means where a controller, which
        swings from batch to batch, logs batches.
        """
        series, epochs = self.get(role), self.find("epoch")
        if self.profile != "controller" or epochs is None:
            return series
        has_batches = len(np.unique(np.ceil(epochs.values))) < len(epochs) / 2
        return epoch_means(series, epochs, least=1) if has_batches else series

    def is_rising(self, series: Series) -> bool:
        """Return whether a series has a significant upward trend."""
        return slope(series).is_rising(self.limits["trend_p"])

    def is_falling(self, series: Series) -> bool:
        """Return whether a series has a significant downward trend."""
        return slope(series).is_falling(self.limits["trend_p"])

    def config(self, *names: str) -> Any:
        """Return the first option of these names, given in full or by the last part; None where
        none is set.
        """
        found = (
            value
            for name in names
            for key, value in self.log.config.items()
            if key == name or key.endswith(f".{name}")
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
        kinds = ("checkpoint", "save", "eval")
        known = [state.step for state in self.log.checkpoints]
        known += [event.step for event in self.log.events if event.kind in kinds]
        losses = self.find("val_loss")
        known += losses.steps.tolist() if losses else []
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
    relative = _times(ordinary, float(np.median(ordinary.values)))
    is_slow = relative.values > 2
    has_period = period(relative.steps[is_slow]) is not None
    return relative[~is_slow] if has_period else relative


def _times(series: Series, usual: float) -> Series:
    """Return a series as multiples of a positive number; nothing without one."""
    return Series(series.steps, series.values / usual) if usual > 0 else series[:0]


def _latency(run: AnalysedRun, latency: Series) -> Series:
    """Return latencies over their budget, of the limits or of the configuration."""
    names = ("latency_budget", "budget_ms", "latency_budget_ms", "budget")
    budget = run.limits["latency_budget"] or run.config(*names)
    return _times(latency, budget if isinstance(budget, int | float) else 0)


DERIVED: Mapping[str, tuple[str, Callable[[AnalysedRun, Series], Series]]] = {
    "ordinary_time": ("time", _ordinary),
    "time_ratio": ("time", _relative_time),
    "warm_gpu_util": ("gpu_util", lambda _, busy: busy[busy.steps > NUM_WARMING]),
    "data_share": ("data_time", _data_share),
    "reward_std_ratio": (
        "reward_std",
        lambda _, one: _times(one, float(np.median(one.values[: len(one) // 3 + 1]))),
    ),
    "min_length_ratio": ("min_length", lambda _, one: _times(one, float(np.median(one.values)))),
    "length_ratio": (
        "total_len_max",
        lambda run, one: _times(one, run.amount("max_length") or 0),
    ),
    "latency_ratio": ("latency", _latency),
}
"""Role -> the role in the log that it follows from, and how."""


def _source(role: str) -> str:
    """Return the role in the log that a role follows from."""
    return DERIVED[role][0] if role in DERIVED else role


def recognise_profile(log: RunLog) -> str:
    """Return controller for rewards with latencies or budgets, grpo for rewards, a KL or
    advantages, sft for a loss without rewards.
    """
    run = AnalysedRun(log, "generic", {})
    if run.key("violation") or (run.key("reward") and run.key("latency")):
        return "controller"
    signs = ("reward", "kl", "update_kl", "clipped_ratio", "adv_mean")
    has_rewards = any(key.startswith("rewards/") for key in log.series)
    if has_rewards or any(map(run.key, signs)):
        return "grpo"
    return "sft" if run.key("loss") else "generic"
