"""Keep the samples of a batch that went wrong, with their losses, as one file."""

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from trainer.data.batch import StepBatch, document_sums
from trainer.runtime.distributed import World
from trainer.runtime.files import atomic_write
from trainer.runtime.json_lines import strict

logger = logging.getLogger(__name__)
DIRECTORY = "evidence"


class EvidenceKeeper:
    """Writes `<run_dir>/evidence/step_N.json` on the main rank; the other ranks help.

    `location` returns the place (`file:line`) of a sample id.
    """

    def __init__(self, run_dir: Path, *, world: World, location: Callable[[int], str]) -> None:
        self._directory, self._world, self._location = run_dir / DIRECTORY, world, location

    def keep(
        self,
        batch: StepBatch,
        losses: Sequence[Tensor],
        *,
        signals: Mapping[str, float],
        is_skipped: bool,
        reason: str,
    ) -> None:
        """Write the samples of `batch`, highest loss first. Collective; waits for the device.

        `losses`: for each micro-batch of this rank the loss of each supervised position, before the
        update. A file that cannot be written is only logged.
        """
        gathered: list[Any] = [None] * self._world.size
        dist.all_gather_object(gathered, _sample_losses(batch, losses))
        if not self._world.is_main:
            return
        evidence = {
            "step": batch.step,
            "epoch": batch.epoch,
            "reason": reason,
            "is_update_skipped": is_skipped,
            "metrics": signals,
            "samples": self._samples(chain.from_iterable(gathered)),
        }
        path = self._directory / f"step_{batch.step}.json"
        try:
            self._directory.mkdir(exist_ok=True)
            atomic_write(path, json.dumps(strict(evidence), indent=1) + "\n")
        except OSError as error:
            logger.warning("cannot keep the evidence of step %d in %s: %s", batch.step, path, error)
            return
        logger.warning("the samples of the batch and their losses: %s", path)

    def _samples(self, found: Iterable[tuple[int, int, float, float]]) -> list[dict[str, Any]]:
        """Add up the parts of a sample that lies on several ranks; `loss` is the mean."""
        sums: dict[int, tuple[int, float, float]] = {}
        for sample_id, num_tokens, loss, count in found:
            _, loss_before, count_before = sums.get(sample_id, (0, 0.0, 0.0))
            sums[sample_id] = (num_tokens, loss_before + loss, count_before + count)
        samples = [
            {
                "sample_id": sample_id,
                "place": self._location(sample_id),
                "num_tokens": num_tokens,
                "num_loss_tokens": int(count),
                "loss": loss / count if count else 0.0,
            }
            for sample_id, (num_tokens, loss, count) in sums.items()
        ]
        return sorted(samples, key=_highest_loss_first)


def _sample_losses(
    batch: StepBatch, losses: Sequence[Tensor]
) -> list[tuple[int, int, float, float]]:
    """Return (id, tokens, summed loss, supervised tokens) of each sample, as far as it is here."""
    found = []
    for micro_batch, losses_S in zip(batch.micro_batches, losses, strict=True):
        sums_D, counts_D = document_sums(micro_batch.to(losses_S.device), losses_S)
        columns = (micro_batch.sample_ids, micro_batch.seqlens, sums_D.tolist(), counts_D.tolist())
        found += list(zip(*columns, strict=False))
    return found


def _highest_loss_first(sample: Mapping[str, Any]) -> float:
    """Return the key to sort by; NaN comes before all numbers."""
    return -math.inf if math.isnan(sample["loss"]) else -sample["loss"]
