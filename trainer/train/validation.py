"""Computes the metrics of a validation.

They include the token-weighted loss, its standard error over samples, and the sample lengths.

Shape suffixes: S supervised positions, D documents.
"""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from trainer.data.batch import LossOutput, PackedBatch, StepBatch, document_sums
from trainer.runtime.distributed import World
from trainer.train.packet import Values, reduce_packet
from trainer.train.source_losses import losses_by_source, perplexity

NUM_SUMS = 5
"""The number of sums: the loss, three sums over samples (squared loss, loss times number of tokens,
squared number of tokens), and the hits.
"""


class Validation:
    """One pass of all ranks over the validation samples."""

    def __init__(
        self,
        world: World,
        *,
        length_facts: Mapping[str, float],
        sources: Sequence[str] = (),
    ) -> None:
        """`sources`: names of the data sources, if there are several."""
        self._world = world
        self._length_facts = length_facts
        self._tokens_by_source = Counter(dict.fromkeys(sources, 0))
        num_sums = NUM_SUMS + len(sources)
        self._totals = np.zeros(num_sums)
        self._local = torch.zeros(num_sums, dtype=torch.float64, device=world.device)
        self._started_s = time.perf_counter()
        self._counts = np.zeros(4, dtype=np.int64)
        """Numbers of supervised tokens, tokens, samples and batches."""

    def add(self, micro_batch: PackedBatch, output: LossOutput) -> None:
        """Add the losses and hits at all supervised positions of this rank's micro-batch.

        The sums stay on the device. Collective.
        """
        sums_D, counts_D = document_sums(micro_batch, output.losses_S)
        whole_2D = torch.stack([sums_D, counts_D])
        # ranks that share a document sum over its pieces
        if self._world.sequence_group is not None:
            dist.all_reduce(whole_2D, group=self._world.sequence_group)
        # Summed over the ranks that share a document, `piece * whole` becomes `whole * whole`.
        whole_sums_D, whole_counts_D = whole_2D
        sums = [
            sums_D.sum(),
            sums_D @ whole_sums_D,
            sums_D @ whole_counts_D,
            counts_D @ whole_counts_D,
            output.hits_S.sum().double(),
        ]
        self._local[:NUM_SUMS] += torch.stack(sums)
        if self._tokens_by_source:
            self._local.index_add_(0, micro_batch.sources_D + NUM_SUMS, sums_D)

    def end_batch(self, batch: StepBatch, *, is_stopping: bool) -> bool:
        """Sum over ranks. Return True if any rank was asked to stop. Collective."""
        local: Values = {"sums": self._local, "num_stop_requests": is_stopping}
        totals = reduce_packet(self._world, sums=local).read()
        self._local.zero_()
        self._totals += totals.vectors["sums"]
        self._tokens_by_source.update(batch.loss_tokens_by)
        self._counts += (batch.num_loss_tokens, batch.num_tokens, batch.num_samples, 1)
        return totals.sums["num_stop_requests"] > 0

    def row(self, *, train_loss: float) -> dict[str, float]:
        """Return the metrics. `train_loss`: the smoothed training loss, for `val/gap`.

        The standard error is for a ratio of sums over samples: sqrt(sum (L_i - m n_i)**2) / sum
        n_i, where sample i has the loss L_i and n_i tokens, and m is the mean loss per token
        (Cochran, Sampling Techniques, section 6.3, for a large population).
        """
        num_loss_tokens, num_tokens, num_samples, num_batches = map(int, self._counts)
        loss_sum, squares, products, square_counts, num_hits, *by_source = map(float, self._totals)
        mean = loss_sum / num_loss_tokens
        # sum (L_i - m n_i)**2, expanded because the mean m is known only at the end
        residual = max(0.0, squares - 2 * mean * products + mean**2 * square_counts)
        # an overflow becomes NaN: the square root of infinity is not a standard error
        stderr = math.sqrt(residual) if math.isfinite(residual) else math.nan
        # one sample says nothing about others
        spread = {"val/loss_stderr": stderr / num_loss_tokens} if num_samples > 1 else {}
        total_s = time.perf_counter() - self._started_s
        return {
            "val/loss": mean,
            **spread,
            "val/ppl": perplexity(mean),
            "val/token_accuracy": num_hits / num_loss_tokens,
            "val/gap": mean - train_loss,
            "val/samples": num_samples,
            "val/total_valid_token_count": num_loss_tokens,
            **losses_by_source("val", by_source, self._tokens_by_source),
            **{f"val/{name}": value for name, value in self._length_facts.items()},
            "time/eval/step_s": total_s / num_batches,
            "time/eval/total_s": total_s,
            "throughput/eval/tokens_per_s": num_tokens / total_s,
            "throughput/eval/valid_tokens_per_s": num_loss_tokens / total_s,
        }
