"""The learning rate as a pure function of the step, so a resumed run needs no schedule state.

This imports no torch, so a mistyped schedule name fails at once.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from trainer.config import OptimConfig

Decay = Callable[[float], float]
STABLE_RATIO = 0.9
"""Share of the steps after warm-up for which `wsd` stays at the peak."""


def cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


def linear(progress: float) -> float:
    return 1 - progress


def constant(_progress: float) -> float:
    return 1.0


def wsd(progress: float) -> float:
    return 1.0 if progress <= STABLE_RATIO else (1 - progress) / (1 - STABLE_RATIO)


DECAYS: dict[str, Decay] = {"cosine": cosine, "linear": linear, "constant": constant, "wsd": wsd}
"""{`optim.lr_scheduler`: decay function}. The function takes the share of the steps after warm-up
(0 at the first of them). It returns the rate as a share of the peak, before `min_lr_ratio`.
"""


@dataclass(frozen=True)
class LrSchedule:
    """The rate `lr_at(step)` for steps 1 to `total_steps`.

    Both the first and the last step change the model: the decay would reach `min_lr_ratio` only one
    step later.
    """

    kind: str
    peak_lr: float
    total_steps: int
    warmup_steps: int
    min_lr_ratio: float

    @classmethod
    def from_config(
        cls,
        config: "OptimConfig",
        *,
        peak_lr: float,
        total_steps: int,
    ) -> "LrSchedule":
        return cls(
            kind=config.lr_scheduler,
            peak_lr=peak_lr,
            total_steps=total_steps,
            warmup_steps=int(total_steps * config.lr_warmup_steps_ratio),
            min_lr_ratio=config.min_lr_ratio,
        )

    def lr_at(self, step: int) -> float:
        """Return the rate of a step, counted from 1, without the scale of a parameter group.

        It rises linearly to the peak at step `warmup_steps`. The first step after the warm-up has
        the peak rate too.
        """
        if step <= self.warmup_steps:
            return self.peak_lr * step / self.warmup_steps
        # 0 at the first step after warm-up, 1 one step after the last
        progress = (step - 1 - self.warmup_steps) / max(self.total_steps - self.warmup_steps, 1)
        decay = DECAYS[self.kind](progress)
        return self.peak_lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * decay)

    def apply(
        self,
        optimizer: "Optimizer",
        *,
        step: int,
        factor: float,
    ) -> float:
        """Set the rate of every group for `step`, multiplied by `factor` and the group's
        `lr_scale`. Return the rate without `lr_scale`.
        """
        lr = factor * self.lr_at(step)
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        return lr

    def state_dict(self) -> dict[str, Any]:
        """Return every field. A run computes its rate from its configuration. On resume, it only
        compares these fields with the saved ones.
        """
        return asdict(self)
