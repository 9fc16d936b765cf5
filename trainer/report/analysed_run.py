"""A log together with what was found out about it: what every rule looks at."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.metrics.words import pattern
from trainer.report.result import Anomaly
from trainer.report.run_log import RunLog, Series
from trainer.report.statistics import Slope, epoch_means, finite, slope
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

    def require_pretrained(self) -> None:
        """Usual ranges of losses are those of pretrained models: raises `NotJudged` where the weights were random."""
        if self.config("model.random_weights") or self.config("model.partial_pretrain") == "quickstart":
            raise NotJudged("no usual range for a model trained from random weights")

    @cached_property
    def last_step(self) -> int:
        return max((int(series.steps[-1]) for series in self.log.series.values() if len(series)), default=0)

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


def steps_of(series: Series, start: int, stop: int) -> tuple[int, int]:
    """First and last step of the points `start` up to, not including, `stop`."""
    return int(series.steps[start]), int(series.steps[stop - 1])
