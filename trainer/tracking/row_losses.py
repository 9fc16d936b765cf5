"""`row_losses.jsonl`: the loss of every sample in every step. The file is next to `metrics.jsonl`.

Each line describes one step: `ids` of the samples in the training data, the number of supervised
`tokens` in each sample, `loss_sums` over these tokens before the update, and `places`, the file and line of the
samples with the highest mean loss. A line with a `kind` ("start" or "rollback") means that the run
continues from its step: earlier lines about later steps no longer count.
"""

import errno
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.runtime.json_lines import AppendFile, JsonLines
from trainer.runtime.text import readable

FILE_NAME = "row_losses.jsonl"
NUM_PLACES = 4
"""The number of samples of a step whose places are recorded."""
MAX_BYTES = 2**26
"""A larger file is not read, because that would take too long."""
DIGITS = 6


@dataclass(frozen=True)
class SampleLosses:
    """The losses of the samples in one global batch.

    `ids`, the number of supervised `tokens` of each sample, and `loss_sums` over these tokens have
    the same length. A sample that occurs twice in the batch has one entry.
    """

    ids: Sequence[int]
    tokens: np.ndarray
    loss_sums: np.ndarray

    @property
    def means(self) -> np.ndarray:
        """The mean loss of each sample; 0 for a sample without supervised tokens."""
        result: np.ndarray = self.loss_sums / np.maximum(self.tokens, 1)
        return result

    def hardest(self) -> dict[int, float]:
        """Return id -> mean loss for the `NUM_PLACES` samples with the highest mean loss. NaN counts
        as the highest.
        """
        means = self.means
        order = np.argsort(-np.nan_to_num(means, nan=np.inf), kind="stable")[:NUM_PLACES]
        return {self.ids[index]: float(means[index]) for index in order}


@dataclass(frozen=True)
class HardRow:
    """A sample over all steps in which it was trained and its batch had a finite loss.

    `excess` is the average over these steps of its mean loss minus the mean loss of its batch.
    """

    place: str
    excess: float
    loss: float
    """The mean loss in the last of these steps."""
    num_steps: int


class RowLossFile(AppendFile):
    """Appends the losses of each step."""

    def __init__(self, path: Path, *, attempt: int) -> None:
        super().__init__(path)
        self._attempt = attempt

    def write(
        self,
        step: int,
        losses: SampleLosses,
        location: Callable[[int], str],
    ) -> None:
        """Write the line of a step. `location` returns the place of a sample, given its id."""
        sums = np.round(losses.loss_sums, DIGITS).tolist()
        self.append(
            {
                "step": step,
                "attempt": self._attempt,
                "ids": list(losses.ids),
                "tokens": losses.tokens.astype(int).tolist(),
                # JSON has no NaN
                "loss_sums": [value if abs(value) < np.inf else None for value in sums],
                "places": {str(sample_id): location(sample_id) for sample_id in losses.hardest()},
            }
        )

    def mark(self, kind: str, step: int) -> None:
        self.append({"step": step, "attempt": self._attempt, "kind": kind})


def read_row_losses(path: Path) -> tuple[dict[int, SampleLosses], dict[int, str]]:
    """Return {step: losses} without the steps that were rolled back, and {sample id: `file:line`}.

    Both are empty if there is no file. Raises `OSError`, also for a file longer than `MAX_BYTES`.
    """
    steps: dict[int, SampleLosses] = {}
    places: dict[int, str] = {}
    if not path.exists():
        return steps, places
    if path.stat().st_size > MAX_BYTES:
        raise OSError(errno.EFBIG, f"it is longer than {readable(MAX_BYTES)}", str(path))
    for _, content in JsonLines(path):
        try:
            step = int(content["step"])
            if "kind" in content:
                steps = {known: losses for known, losses in steps.items() if known <= step}
                continue
            ids = [int(sample_id) for sample_id in content["ids"]]
            tokens, sums = np.array([content["tokens"], content["loss_sums"]], dtype=np.float64)
            if len(ids) == len(tokens):
                steps[step] = SampleLosses(ids, tokens, sums)
                places |= {int(name): str(place) for name, place in content["places"].items()}
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            continue  # the line is torn, or a different program wrote it
    return steps, places


def read_hard_rows(
    path: Path, *, limit: int
) -> tuple[list[HardRow], dict[int, list[tuple[str, float]]]]:
    """Return the `limit` samples whose losses exceed their batches' losses the most, and, for each
    step, the places and mean losses of its hardest samples. Raises `OSError`.
    """
    steps, places = read_row_losses(path)
    excesses: dict[int, list[float]] = defaultdict(list)
    last: dict[int, float] = {}
    hardest: dict[int, list[tuple[str, float]]] = {}

    def place_of(sample_id: int) -> str:
        return places.get(sample_id, f"sample {sample_id}")

    for step, losses in steps.items():
        hardest[step] = [(place_of(one), mean) for one, mean in losses.hardest().items()]
        usual = losses.loss_sums.sum() / max(1, losses.tokens.sum())
        if not np.isfinite(usual):  # no sample can be compared with its batch
            continue
        for sample_id, mean in zip(losses.ids, losses.means.tolist(), strict=True):
            excesses[sample_id].append(mean - usual)
            last[sample_id] = mean
    rows = [
        HardRow(place_of(one), float(np.mean(found)), last[one], len(found))
        for one, found in sorted(excesses.items())
    ]
    rows.sort(key=lambda row: row.excess, reverse=True)
    return rows[:limit], hardest
