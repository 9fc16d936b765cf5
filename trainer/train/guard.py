"""Decide what to do about abnormal steps and validations, which `trainer.train.detection` finds.

The guard sees only values that are bit-equal on all ranks, so every rank makes the same decisions.
Each step's packet contains the number of decisions, which reveals at once if ranks disagree.
"""

from collections import deque
from collections.abc import Callable, Mapping
from math import inf, isfinite
from typing import Any, ClassVar

from trainer.config import TrainerConfig
from trainer.runtime.progress import History, Remembered, Rollbacks
from trainer.train.detection import Anomaly, Detector, Level, StepLimits
from trainer.train.detection.validations import ValidationWatch
from trainer.train.packet import Values
from trainer.train.parts import Decision, Part, StepResult

NUM_EARLY_STEPS = 100
"""A run that learns nothing within this many steps is stopped. Later, the guard only warns."""
NONFINITE_LIMITS = ((5, 5), (10, 200))
"""(number, window in steps): the run stops after this number of non-finite losses or gradients
within the window. The updates of such steps are always skipped.
"""
MAX_ROLLBACKS = 3
MAX_EPISODES = 100
COUNTS = ("num_skipped", "num_decisions", "episodes")
"""State that a rollback does not reset."""


class Guard(Remembered, Part):
    """Reacts to anomalies. Each rank has a guard, but only the main rank's guard reports.

    Its state survives restarts and rollbacks.
    """

    KEPT: ClassVar = (
        "_detector",
        "_overfit",
        "_nonfinite_steps",
        "num_skipped",
        "num_decisions",
        "episodes",
    )

    def __init__(
        self,
        config: TrainerConfig,
        *,
        max_first_loss: float = inf,
        tell: Callable[..., None] | None = None,
        validation: str = "",
    ) -> None:
        """`max_first_loss`: a pretrained model starts below this loss if its data has the right format.

        `tell`: records an event, given its kind, step, message and level. `validation`: the
        fingerprint of the validation rows.
        """
        self._config = config.guard
        self._tell = tell or (lambda *event: None)
        self._detector = Detector(config.guard.rules, max_first_loss=max_first_loss)
        self._patience = config.early_stop_patience
        self._overfit = ValidationWatch(patience=self._patience, rows=validation)
        self._nonfinite_steps: deque[int] = deque(maxlen=max(NONFINITE_LIMITS)[0])
        self.rollbacks = Rollbacks()
        """All rollbacks of the run so far. A second rollback at the same place lowers the learning
        rate.
        """
        self.num_skipped = 0
        self.num_decisions = 0
        self.episodes: list[tuple[int, int]] = []
        """First and last step of each severe or diverging stretch. A rollback never returns to a
        checkpoint inside such a stretch.
        """

    def limits(self) -> StepLimits:
        """Return the limits beyond which the next step's update is skipped."""
        is_skipping = self._config.on_severe == "skip"
        limits = self._detector.limits() if is_skipping else StepLimits()
        return limits.lowered_by(self._config.rules)

    def by_rank(self) -> Values:
        return {"decisions": self.num_decisions}

    def after_step(self, step: StepResult) -> None:
        """Decide what to do after a step. Raises `RuntimeError` if earlier decisions of the ranks
        differ.
        """
        decisions = step.totals.by_rank["decisions"]
        if len(set(decisions)) > 1:
            raise RuntimeError(
                f"the guards of different ranks made different numbers of decisions: {decisions}"
            )
        is_skipped = bool(step.totals.sums["is_skipped"])
        step.decision = self.observe(step.batch.step, step.signals, is_skipped=is_skipped)
        step.row |= self.scores()

    def observe(
        self,
        step: int,
        signals: Mapping[str, float],
        *,
        is_skipped: bool,
    ) -> Decision:
        """Decide what to do after a step. `is_skipped`: True if the device skipped its update."""
        self.num_skipped += is_skipped
        is_finite = isfinite(signals["train/loss"]) and isfinite(signals["train/grad_norm"])
        if not is_finite:
            self._nonfinite_steps.append(step)
        elif is_skipped:
            self._tell(
                "skip", step, "update skipped: loss or gradient norm above its limit", "warn"
            )
        anomalies = self._detector.observe(step, signals)
        answers = [answer for answer in map(self._answer, anomalies) if answer is not None]
        if not answers:
            return Decision()
        self.num_decisions += 1
        onsets = [found.rollback_onset for found in answers if found.rollback_onset is not None]
        onset = min(onsets, default=None)
        is_stop = any(answer.is_stop for answer in answers)
        reason = "; ".join(dict.fromkeys(answer.reason for answer in answers))
        if onset is not None and len(self.rollbacks.entries) >= MAX_ROLLBACKS:
            reason += f"; the run has already been rolled back {MAX_ROLLBACKS} times"
            onset = None
            is_stop = True
        return Decision(onset, is_stop, reason)

    def observe_validation(
        self,
        step: int,
        loss: float,
        *,
        train_loss: float,
    ) -> bool:
        """Record a validation. Return True if the run ends early.

        A run ends early after `early_stop_patience` validations without an improvement.
        """
        if not (isfinite(loss) and isfinite(train_loss)):
            return False
        if self._overfit.observe(step, val_loss=loss, train_loss=train_loss):
            message = (
                f"val/loss {loss:.4f} is above its best, {self._overfit.best_loss:.4f} at step "
                f"{self._overfit.best_step}, while train/loss fell; a checkpoint near that step is kept"
            )
            self._tell("overfit", step, message, "warn")
        if not self.is_out_of_patience:
            return False
        message = (
            f"val/loss has not improved in {self._patience} validations; best at step "
            f"{self._overfit.best_step}"
        )
        self._tell("early_stop", step, message, "info")
        self.num_decisions += 1
        return True

    @property
    def is_out_of_patience(self) -> bool:
        """True if none of the last `early_stop_patience` validations improved the loss."""
        return self._overfit.is_exhausted

    @property
    def history(self) -> History:
        return History(self._overfit.best_step, tuple(self.episodes))

    def scores(self) -> dict[str, float]:
        """Return the guard's metrics of the last observed step."""
        return {
            **self._detector.scores,
            "optim/skipped_steps": self.num_skipped,
            "data/skipped_batches": len(self.rollbacks.skipped_steps),
        }

    def validation_scores(self) -> dict[str, float]:
        """Return the guard's metrics of the last observed validation."""
        best_step = self._overfit.best_step
        if best_step is None:
            return {}
        return {"val/best_loss": self._overfit.best_loss, "val/best_step": best_step}

    def after_rollback(self, forgotten: Mapping[str, Any], rollbacks: Rollbacks) -> None:
        """Report the last rollback, and restore the counts that it must not reset.

        `forgotten`: the guard's state before the checkpoint was loaded.
        """
        self.rollbacks = rollbacks
        entry = rollbacks.entries[-1]
        message = (
            f"rolled back to step {entry.target_step}; steps {entry.first_skipped} to "
            f"{entry.last_skipped} will be skipped: {entry.reason}"
        )
        self._tell("rollback", entry.found_step, message, "error")
        self.load_state_dict({name: forgotten[name] for name in COUNTS})

    def _answer(self, anomaly: Anomaly) -> Decision | None:
        """Report an anomaly. Return the required decision, or None if a warning is enough."""
        level = anomaly.level
        step = anomaly.step
        is_harmful = level in (Level.SEVERE, Level.DIVERGING)
        is_bad = is_harmful or level == Level.DEAD
        self._tell(f"guard/{level}", step, anomaly.message, "error" if is_bad else "warn")
        action = anomaly.action or "warn"
        onset = anomaly.onset
        reason = anomaly.message
        has_given_up = False
        if is_harmful:
            self.episodes = [*self.episodes, (onset, step)][-MAX_EPISODES:]
            is_severe = level == Level.SEVERE
            action = self._config.on_severe if is_severe else self._config.on_diverging
        elif level == Level.DEAD and step <= NUM_EARLY_STEPS:
            action = "stop"
        elif level == Level.NONFINITE and (first := self._given_up_since()) is not None:
            # the run stops if there is no checkpoint to return to
            has_given_up = True
            onset = first
            action = "rollback" if self._config.on_diverging == "rollback" else "stop"
            reason = f"too many steps without a finite loss and gradient since step {first}"
        if action == "warn" and not is_harmful:
            return None
        return Decision(
            rollback_onset=onset if action == "rollback" else None,
            is_stop=has_given_up or action == "stop",
            reason=reason,
        )

    def _given_up_since(self) -> int | None:
        """If there are too many non-finite steps, return the first of them; otherwise None."""
        steps = self._nonfinite_steps
        for number, window in NONFINITE_LIMITS:
            if len(steps) >= number and steps[-1] - steps[-number] < window:
                return steps[-number]
        return None
