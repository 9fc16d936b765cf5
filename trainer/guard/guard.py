"""Decides what is done about an abnormal step or validation; `trainer.detection` says what is
abnormal.

It sees only values that are equal on all ranks, so every rank decides alike; the number of
decisions travels with each step's packet, and a rank that decided otherwise is found at once.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any, ClassVar

from trainer.config import TrainerConfig
from trainer.detection import Detector, Level, StepAnomaly, StepLimits, skip_limits
from trainer.detection.watches import OverfitJudge
from trainer.progress import History, Remembered, Rollbacks

NUM_EARLY_STEPS = 100
"""A run that learns nothing so early never did: it is stopped."""
MAX_NONFINITE_STEPS = 5
"""In a row without a finite loss and gradient: their updates are left out, then the run gives
up.
"""
NONFINITE_WINDOW_STEPS = 200
MAX_NONFINITE_IN_WINDOW = 10
EVIDENCE_REST_STEPS = 500
MAX_ROLLBACKS = 3
EARLY_STOP_MIN_DELTA = 0.002
"""By how many nats a validation has to be better to count as better."""
SKIPPABLE = ("train/loss", "train/grad_norm")


@dataclass(frozen=True)
class Decision:
    """What the guard wants done after a step or a validation; equal on all ranks."""

    wants_evidence: bool = False
    rollback_onset: int | None = None
    """The step with which the trouble began: go back to a checkpoint before it."""
    is_stop: bool = False
    reason: str = ""


class Guard(Remembered):
    """One per rank; only the main rank's has somewhere to report to. Survives restarts and
    rollbacks.
    """

    KEPT: ClassVar = (
        "_detector",
        "_overfit",
        "_nonfinite_steps",
        "_num_in_a_row",
        "num_skipped",
        "num_decisions",
        "_last_evidence",
        "episodes",
    )

    def __init__(
        self,
        config: TrainerConfig,
        *,
        max_first_loss: float = inf,
        tell: Callable[..., None] | None = None,
    ) -> None:
        """The first steps of a pretrained model lie below `max_first_loss`, on data that it can
        read.

        `tell` takes an event: kind, step, message, level, and what else there is by name.
        """
        self._config, self._tell_event = config, tell
        self._rule_limits = skip_limits(config.guard.rules)
        # `skip_limits` applies these
        watched = [rule for rule in config.guard.rules if rule.action != "skip"]
        self._detector = Detector(watched, max_first_loss=max_first_loss)
        self._overfit = OverfitJudge(
            patience=config.early_stop_patience, min_delta=EARLY_STOP_MIN_DELTA
        )
        self._nonfinite_steps: deque[int] = deque(maxlen=MAX_NONFINITE_IN_WINDOW)
        self._num_in_a_row = 0
        self._last_evidence = -EVIDENCE_REST_STEPS
        self._num_rollbacks = self._num_skipped_batches = 0
        self.lr_factor = 1.0
        self.num_skipped = 0
        self.num_decisions = 0
        self.episodes: list[tuple[int, int]] = []
        """First and last step of each severe or diverging stretch: no checkpoint inside one is
        gone back to.
        """

    def limits(self) -> StepLimits:
        """Beyond which the coming step's update is left out."""
        found = self._detector.limits() if self._config.guard.on_severe == "skip" else StepLimits()
        return replace(
            found,
            loss_alone=min(found.loss_alone, self._rule_limits.loss_alone),
            grad_alone=min(found.grad_alone, self._rule_limits.grad_alone),
        )

    def observe(self, step: int, signals: Mapping[str, float], *, is_skipped: bool) -> Decision:
        """What to do after a step whose update was made, or left out on the device."""
        self.num_skipped += is_skipped
        self._count_nonfinite(step, signals)
        decisions = [self._decide(anomaly) for anomaly in self._detector.observe(step, signals)]
        if is_skipped and all(isfinite(signals[key]) for key in SKIPPABLE):
            self._tell(
                "skip", step, "update left out: loss or gradient norm beyond its limit", "warn"
            )
        decision = _all_of(decisions)
        if decision.rollback_onset is not None and self._num_rollbacks >= MAX_ROLLBACKS:
            reason = (
                f"{decision.reason}; it has been rolled back {self._num_rollbacks} times already"
            )
            decision = replace(decision, rollback_onset=None, is_stop=True, reason=reason)
        if decision.wants_evidence and step - self._last_evidence < EVIDENCE_REST_STEPS:
            decision = replace(decision, wants_evidence=False)
        if decision.wants_evidence:
            self._last_evidence = step
        self.num_decisions += decision != Decision()
        return decision

    def observe_validation(self, step: int, loss: float, *, train_loss: float) -> Decision:
        """Take note of a validation; stop when `early_stop_patience` of them brought nothing."""
        if not (isfinite(loss) and isfinite(train_loss)):
            return Decision()
        if self._overfit.observe(step, val_loss=loss, train_loss=train_loss):
            best = f"val/loss {loss:.4f} is above its best, {self._overfit.best_loss:.4f} at step {self.best_step}"
            self._tell(
                "overfit", step, f"{best}, while train/loss fell: that checkpoint is kept", "warn"
            )
        if self._overfit.is_exhausted:
            reason = f"val/loss has not improved in {self._config.early_stop_patience} validations"
            self._tell("early_stop", step, f"{reason}; best at step {self.best_step}", "info")
            self.num_decisions += 1
            return Decision(is_stop=True, reason=reason)
        return Decision()

    @property
    def best_step(self) -> int | None:
        """Where the validation loss was lowest."""
        return self._overfit.best_step

    @property
    def history(self) -> History:
        return History(self.best_step, tuple(self.episodes))

    def scores(self) -> dict[str, float]:
        """For the row of the step observed last."""
        counts = {
            "optim/skipped_steps": self.num_skipped,
            "data/skipped_batches": self._num_skipped_batches,
        }
        return {**self._detector.scores, **counts}

    def validation_scores(self) -> dict[str, float]:
        """For the row of the validation observed last."""
        if self._overfit.best_loss is None or self.best_step is None:
            return {}
        return {"val/best_loss": self._overfit.best_loss, "val/best_step": self.best_step}

    def note_rollbacks(self, rollbacks: Rollbacks) -> None:
        """All rollbacks of the run so far: they count, and lower the learning rate."""
        self._num_rollbacks, self.lr_factor = len(rollbacks.entries), rollbacks.lr_factor
        self._num_skipped_batches = len(rollbacks.skipped_steps)

    def after_rollback(self, forgotten: Mapping[str, Any], rollbacks: Rollbacks) -> None:
        """Keep what a rollback must not forget: `forgotten` is the state from before the
        checkpoint was loaded.
        """
        self.note_rollbacks(rollbacks)
        entry = rollbacks.entries[-1]
        message = (
            f"rolled back to step {entry.target_step}, steps {entry.first_skipped} to "
            f"{entry.last_skipped} are left out"
        )
        self._tell("rollback", entry.found_step, f"{message}: {entry.reason}", "error")
        self.num_skipped, self.num_decisions = (
            int(forgotten["num_skipped"]),
            int(forgotten["num_decisions"]),
        )
        self._last_evidence = int(forgotten["last_evidence"])
        self.episodes = [(first, last) for first, last in forgotten["episodes"]]

    def _decide(self, anomaly: StepAnomaly) -> Decision:
        level, onset = anomaly.level, anomaly.onset or anomaly.step
        is_bad = level in (Level.SEVERE, Level.DIVERGING, Level.DEAD)
        self._tell(
            f"guard/{level}", anomaly.step, anomaly.message, "error" if is_bad else "warn", anomaly
        )
        if level in (Level.SEVERE, Level.DIVERGING):
            self.episodes = [*self.episodes, (onset, anomaly.step)][-100:]
            action = (
                self._config.guard.on_severe
                if level == Level.SEVERE
                else self._config.guard.on_diverging
            )
            return _decision(action, anomaly, onset, wants_evidence=True)
        if level == Level.NONFINITE:
            return self._decide_nonfinite()
        if level == Level.DEAD:
            return Decision(is_stop=anomaly.step <= NUM_EARLY_STEPS, reason=anomaly.message)
        if level == Level.RULE and anomaly.action is not None:
            return _decision(
                anomaly.action, anomaly, onset, wants_evidence=anomaly.action != "warn"
            )
        return Decision()

    def _decide_nonfinite(self) -> Decision:
        steps, num_in_a_row = self._nonfinite_steps, self._num_in_a_row
        is_row = num_in_a_row >= MAX_NONFINITE_STEPS
        is_frequent = len(steps) == steps.maxlen and steps[-1] - steps[0] < NONFINITE_WINDOW_STEPS
        if not (is_row or is_frequent):
            return Decision()
        first = steps[-min(num_in_a_row, len(steps)) if is_row else 0]
        reason = f"too many steps {'in a row ' if is_row else ''}without a finite loss and gradient"
        onset = first if self._config.guard.on_nonfinite == "rollback" else None
        return Decision(wants_evidence=True, rollback_onset=onset, is_stop=True, reason=reason)

    def _count_nonfinite(self, step: int, signals: Mapping[str, float]) -> None:
        if all(isfinite(signals[key]) for key in SKIPPABLE):
            self._num_in_a_row = 0
            return
        self._num_in_a_row += 1
        self._nonfinite_steps.append(step)

    def _tell(
        self, kind: str, step: int, message: str, level: str, anomaly: StepAnomaly | None = None
    ) -> None:
        if self._tell_event is not None:
            self._tell_event(
                kind,
                step,
                message,
                level,
                **({} if anomaly is None else {"event": anomaly.as_dict()}),
            )


def _decision(action: str, anomaly: StepAnomaly, onset: int, *, wants_evidence: bool) -> Decision:
    return Decision(
        wants_evidence=wants_evidence,
        rollback_onset=onset if action == "rollback" else None,
        is_stop=action == "stop",
        reason=anomaly.message,
    )


def _all_of(decisions: Sequence[Decision]) -> Decision:
    """One decision that asks for all of them; the earliest onset counts."""
    wanted = [decision for decision in decisions if decision != Decision(reason=decision.reason)]
    if not wanted:
        return Decision()
    onsets = [decision.rollback_onset for decision in wanted if decision.rollback_onset is not None]
    return Decision(
        wants_evidence=any(decision.wants_evidence for decision in wanted),
        rollback_onset=min(onsets, default=None),
        is_stop=any(decision.is_stop for decision in wanted),
        reason="; ".join(decision.reason for decision in wanted),
    )
