"""`row_losses.jsonl`: the loss of every sample in every step, beside `metrics.jsonl`.

A line is a step: `ids` of the samples in the training data, their supervised `tokens`, `loss_sums`
over these tokens before the update, and `places`, the file and line of the samples whose mean loss
is highest. A line with `kind` ("start", "rollback") and a step means that the run continues from
there: lines of later steps before it no longer count.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.runtime.json_lines import AppendFile, JsonLines

FILE_NAME = "row_losses.jsonl"
NUM_PLACES = 4
"""Samples of a step that are named by their place."""
MAX_BYTES = 2**26
"""Of a longer file nothing is read: it would take too long."""
DIGITS = 6


@dataclass(frozen=True)
class SampleLosses:
    """Losses of the samples of one global batch: `ids`, supervised `tokens`, and `loss_sums` over
    these tokens, equally long. A sample that comes twice is counted as one.
    """

    ids: Sequence[int]
    tokens: np.ndarray
    loss_sums: np.ndarray

    @property
    def means(self) -> np.ndarray:
        """Mean losses; 0 without supervised tokens."""
        result: np.ndarray = self.loss_sums / np.maximum(self.tokens, 1)
        return result


@dataclass(frozen=True)
class HardRow:
    """A sample over all steps it was trained in; `excess`: its mean loss minus that of its batch,
    on average.
    """

    place: str
    excess: float
    loss: float
    """In the last of these steps."""
    num_steps: int


class RowLossFile(AppendFile):
    """Appends the losses of each step; `location` returns the place of a sample id."""

    def __init__(self, path: Path, *, attempt: int) -> None:
        super().__init__(path)
        self._attempt = attempt

    def write(self, step: int, losses: SampleLosses, location: Callable[[int], str]) -> None:
        worst = np.argsort(-losses.means, kind="stable")[:NUM_PLACES]
        content: dict[str, Any] = {
            "step": step,
            "attempt": self._attempt,
            "ids": list(losses.ids),
            "tokens": losses.tokens.astype(int).tolist(),
            "loss_sums": _finite(losses.loss_sums),
            "places": {str(losses.ids[index]): location(losses.ids[index]) for index in worst},
        }
        self.append(content)

    def mark(self, kind: str, step: int) -> None:
        self.append({"step": step, "attempt": self._attempt, "kind": kind})


def _finite(sums: np.ndarray) -> list[float | None]:
    """JSON has no NaN: null."""
    rounded = np.round(sums, DIGITS).tolist()
    return [value if abs(value) < np.inf else None for value in rounded]


def read_row_losses(path: Path) -> dict[int, SampleLosses]:
    """Return the losses of every step that counts. Raises `OSError`."""
    return _read(path)[0]


def read_hard_rows(
    path: Path, *, limit: int
) -> tuple[list[HardRow], dict[int, list[tuple[str, float]]]]:
    """Return the samples whose losses exceed those of their batches most, and for each step the
    places and mean losses of its hardest samples. Raises `OSError`.
    """
    steps, places = _read(path)
    excesses: dict[int, list[float]] = defaultdict(list)
    last: dict[int, float] = {}
    hardest: dict[int, list[tuple[str, float]]] = {}
    for step, losses in steps.items():
        means = losses.means
        usual = losses.loss_sums.sum() / max(1, losses.tokens.sum())
        for sample_id, mean in zip(losses.ids, means.tolist(), strict=True):
            excesses[sample_id].append(mean - usual)
            last[sample_id] = mean
        order = np.argsort(-means, kind="stable")[:NUM_PLACES]
        hardest[step] = [
            (places.get(losses.ids[index], f"sample {losses.ids[index]}"), float(means[index]))
            for index in order
        ]
    average = {sample_id: float(np.mean(found)) for sample_id, found in excesses.items()}
    worst = sorted(average, key=lambda sample_id: (-average[sample_id], sample_id))[:limit]
    rows = [
        HardRow(
            place=places.get(sample_id, f"sample {sample_id}"),
            excess=average[sample_id],
            loss=last[sample_id],
            num_steps=len(excesses[sample_id]),
        )
        for sample_id in worst
    ]
    return rows, hardest


def _read(path: Path) -> tuple[dict[int, SampleLosses], dict[int, str]]:
    """Return the steps that count, and the places of samples that are named."""
    steps: dict[int, SampleLosses] = {}
    places: dict[int, str] = {}
    if not path.exists() or path.stat().st_size > MAX_BYTES:
        return steps, places
    for _, content in JsonLines(path):
        try:
            step = int(content["step"])
            if "kind" in content:
                steps = {known: losses for known, losses in steps.items() if known <= step}
                continue
            columns = [content[name] for name in ("ids", "tokens", "loss_sums")]
            ids = [int(sample_id) for sample_id in columns[0]]
            tokens, sums = (np.array(column, dtype=np.float64) for column in columns[1:])
            if not len(ids) == len(tokens) == len(sums):
                continue
            steps[step] = SampleLosses(ids, tokens, sums)
            places |= {int(name): str(place) for name, place in content["places"].items()}
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            continue  # torn, or of another program
    return steps, places
