"""Decide what is done about an abnormal step or validation; `trainer.train.detection` finds what is
abnormal.

The guard sees only values that are equal on all ranks, so every rank decides alike. The number of
decisions travels with each step's packet: a rank that decided differently is found at once.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any, ClassVar

from trainer.config import TrainerConfig
from trainer.runtime.progress import History, Remembered, Rollbacks
from trainer.train.detection import Anomaly, Detector, Level, StepLimits, skip_limits
from trainer.train.detection.watches import ValidationWatch

NUM_EARLY_STEPS = 100
"""A run that learns nothing this early never did: it is stopped."""
NONFINITE_LIMITS = ((5, 5), (10, 200))
"""(number, window in steps): with this many steps without a finite loss and gradient in a window,
the run gives up. Their updates are left out anyway.
"""
EVIDENCE_REST_STEPS = 500
MAX_ROLLBACKS = 3
MAX_EPISODES = 100
EARLY_STOP_MIN_DELTA = 0.002
"""Nats by which a validation must improve to count."""
HARMFUL = (Level.SEVERE, Level.DIVERGING)


@dataclass(frozen=True)
class Decision:
    """The guard's answer to a step or a validation; equal on all ranks."""

    wants_evidence: bool = False
    rollback_onset: int | None = None
    """The step with which the trouble began: go back to a checkpoint before it."""
    is_stop: bool = False
    """Stop the run, unless it is rolled back."""
    reason: str = ""


class Guard(Remembered):
    """One per rank; only that of the main rank reports. Survives restarts and rollbacks."""

    KEPT: ClassVar = (
        "_detector",
        "_overfit",
        "_nonfinite_steps",
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
        """`max_first_loss`: a pretrained model starts below it on data that it can read.

        `tell` takes an event: kind, step, message, level.
        """
        self._config = config
        self._tell = tell or (lambda *event: None)
        self._rule_limits = skip_limits(config.guard.rules)
        # the device applies the rules with `skip`, by `limits`
        watched = [rule for rule in config.guard.rules if rule.action != "skip"]
        self._detector = Detector(watched, max_first_loss=max_first_loss)
        self._overfit = ValidationWatch(
            patience=config.early_stop_patience, min_delta=EARLY_STOP_MIN_DELTA
        )
        self._nonfinite_steps: deque[int] = deque(maxlen=max(NONFINITE_LIMITS)[0])
        self._last_evidence = -EVIDENCE_REST_STEPS
        self._num_rollbacks = self._num_skipped_batches = 0
        self.lr_factor = 1.0
        self.num_skipped = 0
        self.num_decisions = 0
        self.episodes: list[tuple[int, int]] = []
        """First and last step of each severe or diverging stretch: no rollback goes to a checkpoint
        inside one.
        """

    def limits(self) -> StepLimits:
        """The limits beyond which the coming step's update is left out."""
        found = self._detector.limits() if self._config.guard.on_severe == "skip" else StepLimits()
        return replace(
            found,
            loss_alone=min(found.loss_alone, self._rule_limits.loss_alone),
            grad_alone=min(found.grad_alone, self._rule_limits.grad_alone),
        )

    def observe(self, step: int, signals: Mapping[str, float], *, is_skipped: bool) -> Decision:
        """Decide what to do after a step whose update was made, or left out on the device."""
        self.num_skipped += is_skipped
        is_finite = isfinite(signals["train/loss"]) and isfinite(signals["train/grad_norm"])
        if is_skipped and is_finite:
            self._tell(
                "skip", step, "update left out: loss or gradient norm beyond its limit", "warn"
            )
        if not is_finite:
            self._nonfinite_steps.append(step)
        answers = [
            answer
            for anomaly in self._detector.observe(step, signals)
            for answer in self._answers(anomaly)
        ]
        if not answers:
            return Decision()
        self.num_decisions += 1
        onset = min((onset for action, onset, _ in answers if action == "rollback"), default=None)
        is_stop = any(action == "stop" for action, _, _ in answers)
        reason = "; ".join(dict.fromkeys(reason for _, _, reason in answers))
        if onset is not None and self._num_rollbacks >= MAX_ROLLBACKS:
            reason += f"; it has been rolled back {MAX_ROLLBACKS} times already"
            onset, is_stop = None, True
        wants_evidence = step - self._last_evidence >= EVIDENCE_REST_STEPS
        if wants_evidence:
            self._last_evidence = step
        return Decision(wants_evidence, onset, is_stop, reason)

    def observe_validation(self, step: int, loss: float, *, train_loss: float) -> Decision:
        """Note a validation; stop after `early_stop_patience` validations without a better one."""
        if not (isfinite(loss) and isfinite(train_loss)):
            return Decision()
        if self._overfit.observe(step, val_loss=loss, train_loss=train_loss):
            message = (
                f"val/loss {loss:.4f} is above its best, {self._overfit.best_loss:.4f} at step "
                f"{self.best_step}, while train/loss fell: that checkpoint is kept"
            )
            self._tell("overfit", step, message, "warn")
        if not self._overfit.is_exhausted:
            return Decision()
        reason = f"val/loss has not improved in {self._config.early_stop_patience} validations"
        self._tell("early_stop", step, f"{reason}; best at step {self.best_step}", "info")
        self.num_decisions += 1
        return Decision(is_stop=True, reason=reason)

    @property
    def best_step(self) -> int | None:
        """The step of the lowest validation loss."""
        return self._overfit.best_step

    @property
    def history(self) -> History:
        return History(self.best_step, tuple(self.episodes))

    def scores(self) -> dict[str, float]:
        """Metrics for the row of the step observed last."""
        return {
            **self._detector.scores,
            "optim/skipped_steps": self.num_skipped,
            "data/skipped_batches": self._num_skipped_batches,
        }

    def validation_scores(self) -> dict[str, float]:
        """Metrics for the row of the validation observed last."""
        if self.best_step is None:
            return {}
        return {"val/best_loss": self._overfit.best_loss, "val/best_step": self.best_step}

    def note_rollbacks(self, rollbacks: Rollbacks) -> None:
        """Take all rollbacks of the run so far: they count, and lower the learning rate."""
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
            f"{entry.last_skipped} are left out: {entry.reason}"
        )
        self._tell("rollback", entry.found_step, message, "error")
        self.num_skipped = int(forgotten["num_skipped"])
        self.num_decisions = int(forgotten["num_decisions"])
        self._last_evidence = int(forgotten["last_evidence"])
        self.episodes = [(first, last) for first, last in forgotten["episodes"]]

    def _answers(self, anomaly: Anomaly) -> list[tuple[str, int, str]]:
        """Tell of an anomaly; return what to do about it beyond that: actions, each with the onset
        of the trouble and a reason.
        """
        config, level, step = self._config.guard, anomaly.level, anomaly.step
        is_bad = level in (*HARMFUL, Level.DEAD)
        self._tell(f"guard/{level}", step, anomaly.message, "error" if is_bad else "warn")
        first_nonfinite = self._given_up_since() if level == Level.NONFINITE else None
        if first_nonfinite is not None:
            # where no checkpoint can be gone back to, the run stops
            actions = {"stop", "rollback"} if config.on_diverging == "rollback" else {"stop"}
            reason = (
                f"too many steps without a finite loss and gradient since step {first_nonfinite}"
            )
            return [(action, first_nonfinite, reason) for action in sorted(actions)]
        action = anomaly.action or "warn"
        if level in HARMFUL:
            self.episodes = [*self.episodes, (anomaly.onset, step)][-MAX_EPISODES:]
            action = config.on_severe if level == Level.SEVERE else config.on_diverging
        elif level == Level.DEAD and step <= NUM_EARLY_STEPS:
            action = "stop"
        is_more = action != "warn" or level in HARMFUL
        return [(action, anomaly.onset, anomaly.message)] if is_more else []

    def _given_up_since(self) -> int | None:
        """The first of too many steps that were not finite; None if there are few."""
        steps = self._nonfinite_steps
        for number, window in NONFINITE_LIMITS:
            if len(steps) >= number and steps[-1] - steps[-number] < window:
                return steps[-number]
        return None
