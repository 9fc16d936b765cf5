"""A log together with what was found out about it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.tools.report.formatting import shown
from trainer.tools.report.names import ROLES
from trainer.tools.report.options import OPTIONS, names_in
from trainer.tools.report.result import Anomaly
from trainer.tools.report.run_log import RunLog, Series
from trainer.tools.report.statistics import Ints, epoch_means, finite, slope
from trainer.tracking.metrics.words import pattern

PROFILES = ("sft", "grpo", "controller", "generic")
MIN_CADENCE = 5
"""Saves or validations that come more often cannot be told apart from other steps."""
NUM_COMPILE = 3
"""Steps that are slower because they compile."""
NUM_WARMING = 20
"""Steps in which devices are not yet busy."""
MIN_ORDINARY = 20
"""Points that a step time is judged by."""


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
        series, names = self.log.series, ROLES[_source(role)]
        for key in names:
            if key in series:
                return key
        patterns = [pattern(key) for key in names if "<" in key]
        peaks = {
            key: np.nanmax(one.values, initial=-np.inf)
            for key, one in series.items()
            if any(one.fullmatch(key) for one in patterns)
        }
        return max(peaks, key=peaks.__getitem__, default=None)

    def find(self, role: str) -> Series | None:
        """Return the finite points of a role; None where the log has none."""
        key = self.key(role)
        points = finite(self.log.series[key]) if key else None
        if points and role in DERIVED:
            points = DERIVED[role][1](self, points)
        return points or None

    def get(self, role: str) -> Series:
        """Return the finite points of a role; raises `NotJudged` without them."""
        series = self.find(role)
        if series is None:
            raise NotJudged(f"the log has no {ROLES[_source(role)][0]}")
        return series

    def name(self, role: str) -> str:
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
        return slope(series).is_rising(self.limits["trend_p"])

    def is_falling(self, series: Series) -> bool:
        return slope(series).is_falling(self.limits["trend_p"])

    def config(self, *names: str) -> Any:
        """Return the first option of these names, given in full or by the last part; None where
        none is set.
        """
        for name in names:
            for key, value in self.log.config.items():
                if key == name or key.endswith(f".{name}"):
                    return value
        return None

    @cached_property
    def options(self) -> Mapping[str, str]:
        """Purpose -> name in the framework that wrote the log."""
        return names_in(self.log.source)

    def setting(self, purpose: str) -> Any:
        """Return what the run's configuration says of an option; None where it says nothing."""
        return self.config(self.options[purpose], *OPTIONS[purpose])

    @cached_property
    def is_configured(self) -> bool:
        """Return whether the log holds launch options; trainer_state.json alone tells no more than how
        long and how often.
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
        ends = (series.ends[1] for series in self.log.series.values() if series)
        return max(ends, default=0)

    @cached_property
    def total_steps(self) -> int:
        return self.log.total_steps or self.last_step

    @cached_property
    def cadences(self) -> tuple[int, ...]:
        """After how many steps the run saves and validates, as far as its configuration tells."""
        found = (self.setting("save"), self.setting("eval"))
        return tuple(
            int(value) for value in found if isinstance(value, int | float) and value >= MIN_CADENCE
        )

    def is_busy(self, steps: Ints) -> NDArray[np.bool_]:
        """Return which steps, or the ones before them, saved or validated: as the log shows and
        the configuration says.
        """
        kinds = ("checkpoint", "save", "eval")
        known = [state.step for state in self.log.checkpoints]
        known += [event.step for event in self.log.events if event.kind in kinds]
        if (losses := self.find("val_loss")) is not None:
            known += losses.steps.tolist()
        mask = np.isin(steps, known) | np.isin(steps - 1, known)
        for cadence in self.cadences:
            mask |= steps % cadence <= 1
        return mask


def _ordinary(run: AnalysedRun, times: Series) -> Series:
    """Return step times without the first, which compile, and those that save or validate."""
    keep = ~run.is_busy(times.steps) & (np.arange(len(times)) >= NUM_COMPILE)
    return times[keep] if keep.any() else times


def _data_share(run: AnalysedRun, waits: Series) -> Series:
    """Return the share of a step that waits for data, of the steps after the first."""
    times, late = run.get("time"), waits[NUM_COMPILE:]
    step_s = np.interp(late.steps, times.steps, times.values)
    return Series(late.steps, late.values / np.maximum(step_s, np.finfo(float).tiny))


def _relative_std(run: AnalysedRun, spreads: Series) -> Series:
    """Return the spread of rewards as a share of that of the run's first third."""
    usual = float(np.median(spreads.values[: max(1, len(spreads) // 3)]))
    return Series(spreads.steps, spreads.values / usual) if usual > 0 else spreads[:0]


DERIVED: Mapping[str, tuple[str, Callable[[AnalysedRun, Series], Series]]] = {
    "ordinary_time": ("time", _ordinary),
    "warm_gpu_util": ("gpu_util", lambda _, busy: busy[busy.steps > NUM_WARMING]),
    "data_share": ("data_time", _data_share),
    "relative_reward_std": ("reward_std", _relative_std),
}
"""Role -> the role in the log, and how it follows from that."""


def _source(role: str) -> str:
    return DERIVED[role][0] if role in DERIVED else role


def recognise_profile(log: RunLog) -> str:
    """Return controller for rewards with accuracy and latency, grpo for rewards, a KL or
    advantages, sft for a loss without rewards.
    """
    run = AnalysedRun(log, "generic", {})
    if run.key("violation") or (run.key("reward") and run.key("latency")):
        return "controller"
    signs = ("reward", "kl", "update_kl", "clipped_ratio", "adv_mean")
    has_rewards = any(key.startswith("rewards/") for key in log.series)
    if has_rewards or any(run.key(role) for role in signs):
        return "grpo"
    return "sft" if run.key("loss") else "generic"
