"""Keep the samples of a batch that went wrong, with their losses, as one file."""

import json
import logging
from collections.abc import Callable, Mapping
from math import isnan
from pathlib import Path

from trainer.data.batch import StepBatch
from trainer.runtime.files import atomic_write
from trainer.runtime.json_lines import strict
from trainer.tracking.row_losses import SampleLosses

logger = logging.getLogger(__name__)
DIRECTORY = "evidence"


class EvidenceKeeper:
    """Writes `<run_dir>/evidence/step_N.json`, on the main rank.

    `location` returns the place (`file:line`) of a sample id.
    """

    def __init__(self, run_dir: Path, *, is_main: bool, location: Callable[[int], str]) -> None:
        self._directory, self._is_main, self.location = run_dir / DIRECTORY, is_main, location

    def keep(
        self,
        batch: StepBatch,
        losses: SampleLosses,
        *,
        signals: Mapping[str, float],
        is_skipped: bool,
        reason: str,
    ) -> None:
        """Write the samples of `batch`, highest mean loss first. If the file cannot be written, a
        warning is logged.
        """
        if not self._is_main:
            return
        lengths = dict(zip(batch.sample_ids, batch.lengths, strict=True))
        samples = [
            {
                "sample_id": sample_id,
                "place": self.location(sample_id),
                "num_tokens": lengths[sample_id],
                "num_loss_tokens": int(num_loss_tokens),
                "loss": loss,
            }
            for sample_id, num_loss_tokens, loss in zip(
                losses.ids, losses.tokens, losses.means.tolist(), strict=True
            )
        ]
        # NaN comes before all numbers
        samples.sort(key=lambda sample: (not isnan(sample["loss"]), -sample["loss"]))
        evidence = {
            "step": batch.step,
            "epoch": batch.epoch,
            "reason": reason,
            "is_update_skipped": is_skipped,
            "metrics": signals,
            "samples": samples,
        }
        path = self._directory / f"step_{batch.step}.json"
        try:
            self._directory.mkdir(exist_ok=True)
            atomic_write(path, json.dumps(strict(evidence), indent=1) + "\n")
        except OSError as error:
            logger.warning("cannot keep the evidence of step %d in %s: %s", batch.step, path, error)
            return
        logger.warning("the samples of the batch and their losses: %s", path)
