"""What stood in a batch that went wrong: its samples with their losses, and the rows before it,
as one file.
"""

import json
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from trainer.batch import StepBatch, document_sums
from trainer.runtime.distributed import World
from trainer.runtime.files import atomic_write
from trainer.runtime.json_lines import strict

logger = logging.getLogger(__name__)
NUM_ROWS = 32
NUM_TOP = 8
MAX_FILES = 3
DIRECTORY = "evidence"


class EvidenceKeeper:
    """Writes `<run_dir>/evidence/step_N.json` on the main rank and keeps the newest three; the
    other ranks help.

    `location` tells from a sample id where the sample stands (`file:line`).
    """

    def __init__(
        self, run_dir: Path, *, world: World, location: Callable[[int], str], seed: int
    ) -> None:
        self._directory, self._world, self._location, self._seed = (
            run_dir / DIRECTORY,
            world,
            location,
            seed,
        )
        self._rows: deque[dict[str, float]] = deque(maxlen=NUM_ROWS)

    def note(self, row: Mapping[str, float]) -> None:
        """Remember the metrics of a step; the newest `NUM_ROWS` go into a file."""
        self._rows.append(dict(row))

    def keep(
        self,
        batch: StepBatch,
        losses: Sequence[Tensor],
        *,
        signals: Mapping[str, float],
        is_skipped: bool,
        reason: str,
    ) -> None:
        """Collective. `losses`: per micro-batch of this rank the loss of each supervised position,
        before the update.

        A file that cannot be written is only logged.
        """
        gathered: list[Any] = [None] * self._world.size
        dist.all_gather_object(gathered, _sample_losses(batch, losses))
        if not self._world.is_main:
            return
        size = self._world.sequence_size
        shares = (gathered[first : first + size] for first in range(0, len(gathered), size))
        samples = sorted(
            (_together(of_ranks) for part in shares for of_ranks in zip(*part, strict=True)),
            key=_by_loss,
        )
        for sample in samples[:NUM_TOP]:
            sample["place"] = self._location(sample["sample_id"])
        evidence = {
            "step": batch.step,
            "epoch": batch.epoch,
            "reason": reason,
            "is_update_skipped": is_skipped,
            "metrics": signals,
            "random_numbers": {
                "seed": self._seed,
                "step": batch.step,
                "keyed_by": "seed, step and rank",
            },
            "highest_losses": samples[:NUM_TOP],
            "samples": samples[NUM_TOP:],
            "rows_before": list(self._rows),
        }
        try:
            self._write(f"step_{batch.step}.json", json.dumps(strict(evidence), indent=1))
        except OSError as error:
            logger.warning(
                "cannot keep the evidence of step %d in %s: %s", batch.step, self._directory, error
            )

    def _write(self, name: str, text: str) -> None:
        self._directory.mkdir(exist_ok=True)
        atomic_write(self._directory / name, text + "\n")
        logger.warning("the samples of the batch and their losses: %s", self._directory / name)
        files = sorted(
            self._directory.glob("step_*.json"), key=lambda path: path.stat().st_mtime_ns
        )
        for old in files[:-MAX_FILES]:
            old.unlink()


def _sample_losses(batch: StepBatch, losses: Sequence[Tensor]) -> list[dict[str, Any]]:
    """One entry for each sample of this rank, `loss` the sum of its tokens here; waits for the
    device.
    """
    found = []
    for micro_batch, losses_S in zip(batch.micro_batches, losses, strict=True):
        sums_D, counts_D = document_sums(micro_batch.to(losses_S.device), losses_S)
        rows = zip(
            micro_batch.sample_ids,
            micro_batch.seqlens,
            sums_D.tolist(),
            counts_D.tolist(),
            strict=False,
        )
        for sample_id, length, loss, count in rows:
            found.append(
                {
                    "sample_id": sample_id,
                    "num_tokens": length,
                    "num_loss_tokens": int(count),
                    "loss": loss,
                }
            )
    return found


def _together(of_ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A sample from what the ranks that hold it found; `loss` is the mean."""
    count, loss = (sum(found[key] for found in of_ranks) for key in ("num_loss_tokens", "loss"))
    return {**of_ranks[0], "num_loss_tokens": count, "loss": loss / count if count else 0.0}


def _by_loss(sample: Mapping[str, Any]) -> float:
    """Highest first, and what is not a number before all."""
    loss = float(sample["loss"])
    return -math.inf if math.isnan(loss) else -loss
