"""A log with its profile and its anomalies."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from trainer.tools.report.anomalies import find_anomalies
from trainer.tools.report.formatting import shown
from trainer.tools.report.names import OPTIONS, ROLES, options_of
from trainer.tools.report.readers.parsing import as_number
from trainer.tools.report.result import Anomaly, Mover
from trainer.tools.report.run_log import RunLog, Series
from trainer.tools.report.shapes import period
from trainer.tools.report.statistics import Ints, Mask, epoch_means, finite
from trainer.tracking.metrics.words import pattern

MIN_CADENCE = 5
"""A configured cadence below this is ignored: such frequent saves or validations cannot be told
apart from other steps.
"""
NUM_COMPILE = 3
"""The number of first steps that are slower because they compile."""
NUM_WARMING = 20
"""The number of first steps in which the devices are not yet busy."""


CAP_SHARE = 0.97
"""A longest answer of at least this share of the cap has reached it."""
MIN_HITS = 3
"""If the cap is unknown, the longest length counts as the cap once it occurs this many times. Fewer
occurrences may be coincidence.
"""


NO_POINTS = Series(np.array([], np.int64), np.array([], np.float64))


class NotJudged(Exception):  # noqa: N818 - not an error: a check that cannot judge
    """A check lacks data that it needs; the message names the data."""


@dataclass(frozen=True)
class AnalysedRun:
    """A log, the profile that selects its checks and bands, and its anomalies."""

    log: RunLog
    profile: str

    @cached_property
    def anomalies(self) -> tuple[Anomaly, ...]:
        """Return the anomalies in chronological order."""
        return find_anomalies(
            self.log, is_generating=self.profile == "grpo", total_steps=self.total_steps
        )

    def moved(self, *roles: str) -> dict[Anomaly, list[Mover]]:
        """Return the anomalies in which metrics with these roles moved, and their moves."""
        keys = set(map(self.key, roles))
        moves = {one: [m for m in one.movers if m.metric in keys] for one in self.anomalies}
        return {one: movers for one, movers in moves.items() if movers}

    def key(self, role: str) -> str | None:
        """Return the key under which this log has a role, or None.

        If several keys match, such as one per device, return the key with the highest value.
        """
        series = self.log.series
        for name in ROLES[_source(role)]:
            matching = [name] if name in series else []
            if "<" in name:
                matching = list(filter(pattern(name).fullmatch, series))
            if matching:
                return max(matching, key=lambda key: np.nanmax(series[key].values, initial=-np.inf))
        return None

    def find(self, role: str) -> Series:
        """Return the finite points of a role, which may be none."""
        key = self.key(role)
        points = finite(self.log.series[key]) if key else NO_POINTS
        return DERIVED[role][1](self, points) if points and role in DERIVED else points

    def get(self, role: str, *, least: int = 1) -> Series:
        """Return the finite points of a role. Raises `NotJudged` for fewer than `least`."""
        key = self.key(role)
        series = self.find(role)
        if key is None:
            raise NotJudged(f"the log has no {self.name(role)}")
        if len(series) < least:
            raise NotJudged(f"{key} has {len(series)} usable points, but the check needs {least}")
        return series

    def name(self, role: str) -> str:
        """Return the key of a role in this log, or its first possible key if the log lacks it."""
        return self.key(role) or ROLES[_source(role)][0]

    def levels(self, role: str) -> Series:
        """Return the points that show a metric's level.

        In a controller run these are the epoch means, because metrics swing from batch to batch.
        """
        series = self.find(role)
        epochs = self.find("epoch")
        is_by_epoch = self.profile == "controller" and epochs
        return epoch_means(series, epochs) if is_by_epoch else series

    def config(self, *names: str) -> Any:
        """Return the value of the first of these options that the configuration has, or None.

        A name may be a full option name or its last part.
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
        """Purpose (such as "lr" or "clip") -> name of the option in the framework that wrote the
        log.
        """
        return options_of(self.log.source)

    def setting(self, purpose: str) -> Any:
        """Return the value of the option that serves `purpose`; None if the configuration lacks it."""
        return self.config(*OPTIONS[purpose])

    def amount(self, purpose: str) -> float | None:
        """Return the value of the option that serves `purpose` if it is a positive finite number,
        else None.
        """
        value = as_number(self.setting(purpose))
        return value if value is not None and 0 < value < np.inf else None

    @cached_property
    def is_configured(self) -> bool:
        """Return True if the log contains launch options. `trainer_state.json`, for example, holds
        only the length of the run and the intervals of logging, validation and saving.
        """
        settings = map(self.setting, ("lr", "clip", "warmup", "schedule"))
        return any(value is not None for value in settings)

    def quoted(self, purpose: str) -> str:
        """Quote an option, as in `learning_rate = 5e-5` or `max_grad_norm is not set`."""
        if not self.is_configured:
            return "the run's configuration is not known"
        value = self.setting(purpose)
        name = self.options[purpose]
        return f"{name} is not set" if value is None else f"{name} = {shown(value)}"

    def checkpoint(self, step: int) -> str:
        """Describe the newest complete checkpoint at or before a step."""
        saved = [at for at in self.kept if at <= step]
        if not saved:
            return f"a checkpoint at or before step {step}, if one was kept"
        return f"the checkpoint of step {max(saved)}"

    @cached_property
    def kept(self) -> Mapping[int, Path]:
        """Step -> directory of each complete checkpoint."""
        return {one.step: one.path for one in self.log.checkpoints if not one.faults}

    @cached_property
    def is_pretrained(self) -> bool:
        """Return True if the usual loss ranges apply; they assume a pretrained model."""
        model = str(self.config("model.partial_pretrain"))
        is_quickstart = model.endswith(("quickstart", "quickstart/model"))
        return not (self.config("model.random_weights") or is_quickstart)

    @cached_property
    def last_step(self) -> int:
        """Return the last step of any metric."""
        return max((series.ends[1] for series in self.log.series.values() if series), default=0)

    @cached_property
    def total_steps(self) -> int:
        """Return the planned number of steps, or the last step if the plan is unknown."""
        return self.log.total_steps or self.last_step

    def is_busy(self, steps: Ints) -> Mask:
        """Return a mask of the steps that saved or validated, or that follow such a step or the
        beginning of an attempt.
        """
        known = [state.step for state in self.log.checkpoints]
        known += [one.step for one in self.log.events if one.kind in ("start", "checkpoint")]
        known += self.find("val_loss").steps.tolist()
        mask = np.isin(steps, known) | np.isin(steps - 1, known)
        for cadence in map(self.amount, ("save", "eval")):
            if cadence and cadence >= MIN_CADENCE:
                mask |= steps % int(cadence) <= 1
        return mask


def _ordinary(run: AnalysedRun, times: Series) -> Series:
    """Return step times, excluding the first steps, which compile, and steps that save or validate
    (unless all do).
    """
    late = times[NUM_COMPILE:]
    keep = ~run.is_busy(late.steps)
    return late[keep] if keep.any() else late


def _data_share(run: AnalysedRun, waits: Series) -> Series:
    """Return the share of each step's time spent waiting for data, excluding the first steps."""
    times = run.get("time")
    late = waits[NUM_COMPILE:]
    step_s = np.interp(late.steps, times.steps, times.values)
    return Series(late.steps, late.values / np.maximum(step_s, np.finfo(float).tiny))


def _relative_time(run: AnalysedRun, times: Series) -> Series:
    """Return ordinary step times as multiples of their median.

    Long steps at regular intervals are left out because they do extra work.
    """
    relative = _over_median(_ordinary(run, times))
    is_slow = relative.values > 2
    return relative[~is_slow] if _is_regular(relative, is_slow) else relative


def _is_regular(times: Series, is_slow: Mask) -> bool:
    """Return True if long steps come at regular intervals, or only at multiples of an interval."""
    slow = times.steps[is_slow]
    if len(slow) < MIN_HITS:
        return False
    least = MIN_CADENCE * np.median(np.diff(times.steps))
    # some trainers count the first step as 0
    is_multiple = max(np.gcd.reduce(slow), np.gcd.reduce(slow + 1)) >= least
    return bool(is_multiple) or period(times, is_slow) is not None


def _slowness(run: AnalysedRun, speeds: Series) -> Series:
    """Return the usual speed divided by the speed of each step. It stands in for unlogged times."""
    if run.find("time"):
        return speeds[:0]
    slow = Series(speeds.steps, 1 / speeds.values.clip(min=np.finfo(float).tiny))
    return _relative_time(run, slow)


def _over(series: Series, usual: object) -> Series:
    """Return a series as multiples of a positive number; empty if `usual` is not one."""
    if not isinstance(usual, int | float) or usual <= 0:
        return series[:0]
    return Series(series.steps, series.values / usual)


def _over_median(series: Series, until: int | None = None) -> Series:
    """Return a series as multiples of the median of its first `until` points (default: all)."""
    return _over(series, float(np.median(series.values[:until])) if series else 0.0)


def _is_zero(_: AnalysedRun, series: Series) -> Series:
    """Return 1 where a metric is 0, else 0."""
    return Series(series.steps, np.where(series.values == 0, 1.0, 0.0))


def _swings(_: AnalysedRun, losses: Series) -> Series:
    """Return the relative change of a loss from point to point."""
    changes = np.diff(np.log(losses.values.clip(min=1e-9)))
    return Series(losses.steps[1:], np.abs(changes))


def _at_cap(run: AnalysedRun, lengths: Series) -> Series:
    """Return 1 where the longest answer reaches its limit, else 0.

    If the limit is unknown, a maximum that occurs often counts as the limit.
    """
    longest = lengths.values.max()
    is_often = np.count_nonzero(lengths.values == longest) >= MIN_HITS
    cap = run.amount("completion") or (longest if is_often else np.inf)
    return Series(lengths.steps, np.where(lengths.values >= CAP_SHARE * cap, 1.0, 0.0))


BUDGETS = ("latency_budget", "budget_ms", "latency_budget_ms", "budget")
"""Options with which controllers limit the latency, in ms."""
DERIVED: Mapping[str, tuple[str, Callable[[AnalysedRun, Series], Series]]] = {
    "ordinary_time": ("time", _ordinary),
    "time_ratio": ("time", _relative_time),
    "slowness": ("tokens_per_s", _slowness),
    "warm_gpu_util": ("gpu_util", lambda _, busy: busy[busy.steps > NUM_WARMING]),
    "data_share": ("data_time", _data_share),
    "reward_std_ratio": ("reward_std", lambda _, one: _over_median(one, len(one) // 3 + 1)),
    "min_length_ratio": ("min_length", lambda _, one: _over_median(one)),
    "at_cap": ("max_length", _at_cap),
    "zero_loss": ("loss", _is_zero),
    "zero_rate": ("lr", _is_zero),
    "loss_size": ("loss", lambda _, one: Series(one.steps, np.abs(one.values))),
    "swings": ("loss", _swings),
    "latency_ratio": ("latency", lambda run, one: _over(one, run.config(*BUDGETS))),
}
"""Derived role -> the logged role from which it is computed, and the function that computes it."""


def _source(role: str) -> str:
    """Return the role of the logged metric from which `role` is computed."""
    return DERIVED[role][0] if role in DERIVED else role


def recognise_profile(log: RunLog) -> str:
    """Return the profile of a log.

    It is "controller" for rewards with latencies or budgets, "grpo" for rewards, KL divergence,
    advantages or answers, "sft" for a loss without rewards, and "generic" otherwise. Preference
    training (DPO) is "generic" too, because its loss falls but has no usual range.
    """
    run = AnalysedRun(log, "generic")
    if run.key("violation") or (run.key("reward") and run.key("latency")):
        return "controller"
    if "rewards/margins" in log.series:
        return "generic"
    signs = ("reward", "kl", "update_kl", "clipped_ratio", "adv_mean")
    generated = ("rewards/", "completions/", "tokens/response_length")
    if any(map(run.key, signs)) or any(key.startswith(generated) for key in log.series):
        return "grpo"
    return "sft" if run.key("loss") else "generic"
