"""Whether validation losses say overfitting, evaluation by evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trainer.detection.window import MAD_TO_SIGMA
from trainer.report.statistics import Floats


@dataclass(frozen=True)
class Judgement:
    verdicts: tuple[str, ...]
    """ok, note or overfit for each validation."""
    best: int
    """Index of the lowest validation loss."""
    overfit: int | None
    """Index of the first overfit."""


def judge(val_losses: Floats, train_losses: Floats, limits: Mapping[str, float]) -> Judgement:
    """NOTE: clearly above the best so far. OVERFIT: the second in a row, or far above, while training still improves.

    `train_losses` are those around each validation; both arrays have one entry per validation. Where the training loss
    too is above that of the best until the next validation, the run has become unstable and does not overfit.
    """
    sigma = relative_noise(val_losses)
    note = max(limits["overfit_note"], limits["overfit_note_sigma"] * sigma)
    sure = max(limits["overfit_sure"], limits["overfit_sure_sigma"] * sigma)
    verdicts: list[str] = []
    best = 0
    for index, loss in enumerate(val_losses):
        if loss < val_losses[best]:
            best = index
        rise = loss / val_losses[best] - 1
        around = train_losses[index : index + 2]
        has_fallen = bool(np.all(around < train_losses[best] * (1 - limits["overfit_train_fall"])))
        is_second = bool(verdicts) and verdicts[-1] != "ok"
        if rise <= note:
            verdicts.append("ok")
        else:
            verdicts.append("overfit" if has_fallen and (is_second or rise > sure) else "note")
    overfit = verdicts.index("overfit") if "overfit" in verdicts else None
    return Judgement(tuple(verdicts), int(np.argmin(val_losses)), overfit)


def relative_noise(losses: Floats) -> float:
    """Spread of a validation curve over its level, from second differences; 0 with fewer than five points."""
    if len(losses) < 5:
        return 0.0
    second = np.diff(losses, n=2) / np.sqrt(6)
    return float(MAD_TO_SIGMA * np.median(np.abs(second)) / np.median(losses))
