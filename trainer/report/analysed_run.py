"""A log together with what was found out about it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.metrics.words import pattern
from trainer.report.formatting import shown
from trainer.report.names import ROLES
from trainer.report.options import OPTIONS, SYNONYMS, TRANSFORMERS
from trainer.report.result import Anomaly
from trainer.report.run_log import RunLog, Series
from trainer.report.statistics import Slope, epoch_means, finite, slope, within

Ints = NDArray[np.int64]
PROFILES = ("sft", "grpo", "controller", "generic")
MIN_CADENCE = 5
"""Below it every other step is one that saves: nothing can be told apart."""
_GENERATES = ("kl", "update_kl", "clipped_ratio", "adv_mean")


NUM_COMPILE = 3
"""Steps that are slower because they compile."""
NUM_WARMING = 20
"""Steps in which devices are not yet busy."""
MIN_FIRST, MIN_ORDINARY = 8, 20
"""Points that the first steps, and a step time, are judged by."""


class NotJudged(Exception):  # noqa: N818 - no error: a check that has nothing to say
    """A check that lacks what it needs; the text says what."""


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
        series, names = self.log.series, ROLES[role]
        if (found := next((key for key in names if key in series), None)) is not None:
            return found
        patterns = [pattern(key) for key in names if "<" in key]
        several = [key for key in series if any(one.fullmatch(key) for one in patterns)]
        return max(
            several, key=lambda key: np.nanmax(series[key].values, initial=-np.inf), default=None
        )

    def find(self, role: str) -> Series | None:
        """The finite points of a role; None where the log has none."""
        key = self.key(role)
        series = finite(self.log.series[key]) if key else None
        return series if series is not None and len(series) else None

    def get(self, role: str) -> Series:
        """The same, for roles that a check named as needed; raises `NotJudged` without them."""
        series = self.find(role)
        if series is None:
            raise NotJudged(f"the log has no {ROLES[role][0]}")
        return series

    def first(self, series: Series) -> Series:
        """The points of the first steps; raises `NotJudged` for too few."""
        last = self.limits["first_steps"]
        return _at_least(within(series, 0, last), MIN_FIRST, f"in the first {last:.0f} steps")

    def late(self, series: Series) -> Series:
        """The second half; raises `NotJudged` for too few."""
        return _at_least(series, MIN_ORDINARY, "logged")[len(series) // 2 :]

    def warm(self, series: Series) -> Series:
        """Without the steps in which devices are not yet busy."""
        return _at_least(series[series.steps > NUM_WARMING], 1, f"after step {NUM_WARMING}")

    def ordinary_times(self) -> Series:
        """Step times that a judgement can be based on; raises `NotJudged` for too few."""
        return _at_least(self.ordinary(self.get("time")), MIN_ORDINARY, "of ordinary step time")

    def name(self, role: str) -> str:
        return self.key(role) or ROLES[role][0]

    def epochs(self, role: str) -> Series:
        """Epoch means of a role; a controller logs one point an epoch, unless it says that it
        logs batches.
        """
        series = self.get(role)
        if self.profile != "controller":
            return epoch_means(series, self.find("epoch"))
        return epoch_means(series, self.find("epoch"), least=1) if self.has_batches else series

    @cached_property
    def has_batches(self) -> bool:
        """Whether a controller logs more often than once an epoch."""
        epochs = self.find("epoch")
        return epochs is not None and len(np.unique(np.ceil(epochs.values))) < len(epochs) / 2

    def slope(self, role: str) -> Slope:
        return slope(self.epochs(role))

    def config(self, *names: str) -> Any:
        """The first option of these names, given in full or by the last part; None where none
        is set.
        """
        for name in names:
            for key, value in self.log.config.items():
                if key == name or key.endswith(f".{name}"):
                    return value
        return None

    @cached_property
    def options(self) -> Mapping[str, str]:
        """Purpose -> name in the framework that wrote the log; transformers' for those without
        names of their own.
        """
        return {**TRANSFORMERS, **OPTIONS.get(self.log.source, {})}

    def setting(self, purpose: str) -> Any:
        """What the run's configuration says of an option; None where it says nothing."""
        return self.config(self.options[purpose], *SYNONYMS.get(purpose, ()))

    @cached_property
    def is_configured(self) -> bool:
        """Whether the log holds launch options; trainer_state.json alone tells no more than how
        long and how often.
        """
        return any(
            self.setting(purpose) is not None for purpose in ("lr", "clip", "warmup", "schedule")
        )

    @cached_property
    def facts(self) -> Mapping[str, str]:
        """By purpose a quotation of the configuration: `max_grad_norm is not set`,
        `learning_rate = 5e-5`.
        """
        if not self.is_configured:
            return dict.fromkeys(self.options, "the run's configuration is not known")
        found = {name: self.setting(purpose) for purpose, name in self.options.items()}
        told = (
            f"{name} is not set" if at is None else f"{name} = {shown(at)}"
            for name, at in found.items()
        )
        return dict(zip(self.options, told, strict=True))

    def checkpoint(self, step: int) -> str:
        """The newest complete one up to a step, as far as they lie beside the log."""
        newest = max(
            (one.step for one in self.log.checkpoints if one.is_complete and one.step <= step),
            default=None,
        )
        kept = f"a checkpoint of step {step} or before, if one was kept"
        return kept if newest is None else f"the checkpoint of step {newest}"

    def require_pretrained(self) -> None:
        """Usual ranges of losses are those of pretrained models: raises `NotJudged` where the
        weights were random.
        """
        if (
            self.config("model.random_weights")
            or self.config("model.partial_pretrain") == "quickstart"
        ):
            raise NotJudged("no usual range for a model trained from random weights")

    def ordinary(self, times: Series) -> Series:
        """Step times without the first, which compile, and without those of steps that save or
        validate.
        """
        keep = ~self.is_busy(times.steps) & (np.arange(len(times)) >= NUM_COMPILE)
        return times[keep] if keep.any() else times

    @cached_property
    def last_step(self) -> int:
        return max(
            (series.ends[1] for series in self.log.series.values() if len(series)), default=0
        )

    @cached_property
    def total_steps(self) -> int:
        return self.log.total_steps or self.last_step

    @cached_property
    def cadences(self) -> tuple[int, ...]:
        """After how many steps the run saves and validates, as far as its configuration tells."""
        found = [self.config("trainer.save_freq", "save_steps", "save_freq")]
        found.append(self.config("trainer.test_freq", "eval_steps", "test_freq"))
        return tuple(
            int(value) for value in found if isinstance(value, int | float) and value >= MIN_CADENCE
        )

    def is_busy(self, steps: Ints) -> NDArray[np.bool_]:
        """Which steps, or the ones before them, saved or validated: as the log shows and the
        configuration says.
        """
        known = {c.step for c in self.log.checkpoints}
        known |= {
            event.step for event in self.log.events if event.kind in ("checkpoint", "save", "eval")
        }
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


def _at_least(points: Series, least: int, what: str) -> Series:
    if len(points) < least:
        raise NotJudged(f"{len(points)} points {what}, {least} are needed")
    return points


def recognise_profile(log: RunLog) -> str:
    """controller: rewards with accuracy and latency; grpo: rewards, a KL or advantages; sft: a
    loss without rewards.
    """
    run = AnalysedRun(log, "generic", {})
    if run.key("violation") or (run.key("reward") and run.key("latency")):
        return "controller"
    has_rewards = bool(run.key("reward")) or any(key.startswith("rewards/") for key in log.series)
    if has_rewards or any(run.key(role) for role in _GENERATES):
        return "grpo"
    return "sft" if run.key("loss") else "generic"
