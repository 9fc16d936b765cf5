"""Turn a step's measurements into its row of metrics.

The meter also keeps the totals that must survive a restart.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from trainer.data.batch import StepBatch
from trainer.model.flops import StepFlops
from trainer.runtime.distributed import World
from trainer.runtime.progress import MAIN, Remembered
from trainer.tracking import metrics
from trainer.tracking.metrics.table import PHASES
from trainer.train.clock import PhaseClock, TraceFile
from trainer.train.memory import Memory
from trainer.train.packet import Values
from trainer.train.parts import Part, StepResult, is_rare
from trainer.train.source_losses import perplexity
from trainer.train.throughput import peak_tflops

EMA_DECAY = 0.98
WINDOW_STEPS = 100
OWN_PHASES = ("data", "shard", "logging", "guard")
"""Phases in which a rank works without the other ranks. In other phases it may be waiting for a slower rank."""
UPDATE_PHASES = ("forward", "backward", "optimizer")


class Meter(Remembered, Part):
    """Makes the row of metrics of each step. Each rank has its own meter, whose totals survive
    restarts.

    All ranks get equal rows, except for metrics that the table of metrics takes from rank 0.
    """

    state_of = MAIN  # ranks measure their own times
    KEPT: ClassVar = ("_num_tokens", "_productive_s", "_ema", "_num_ema")

    def __init__(
        self,
        world: World,
        *,
        total_steps: int,
        cost: StepFlops | None,
        past_s: float = 0.0,
        data_facts: Mapping[str, float] = MappingProxyType({}),
        trace: TraceFile | None = None,
    ) -> None:
        """`past_s`: seconds that earlier attempts took. `data_facts`: metrics from preparing the
        training data.
        """
        self.clock = PhaseClock(world.device, trace=trace)
        self._world = world
        self._total_steps = total_steps
        self._cost = cost
        self._past_s = past_s
        self._data_facts = data_facts
        self._memory = Memory(world.device)
        self._peak_tflops = peak_tflops(world.device)
        self._combined = metrics.combined_metrics()
        # in the same order on every rank
        self._slots = sorted({entry.source for entry in self._combined if "<" not in entry.source})
        self._started_s = time.monotonic()
        self._step_s = deque[float](maxlen=WINDOW_STEPS)
        self._num_tokens = 0
        self._productive_s = 0.0
        self._ema = 0.0
        self._num_ema = 0

    def by_rank(self) -> Values:
        """Return this rank's values of all metrics that are combined over ranks."""
        measured = {**self._memory.sample(), **metrics.take_travelling()}
        return {slot: measured.get(slot, metrics.ABSENT) for slot in self._slots}

    def signals(self, step: StepResult) -> Mapping[str, float]:
        """Return the loss and all other metrics of the step that are equal on all ranks."""
        batch = step.batch
        sums = step.totals.sums
        loss = sums["loss_sum"] / batch.num_loss_tokens
        grad_norm = sums["grad_norm"]
        self._num_tokens += batch.num_tokens
        if math.isfinite(loss):
            self._ema = EMA_DECAY * self._ema + (1 - EMA_DECAY) * loss
            self._num_ema += 1
        found = {
            "train/loss": loss,
            "train/loss_ema": self.loss_ema,
            "train/lr(1e-3)": step.lr * 1e3,
            "train/grad_norm": grad_norm,
            "train/ppl": perplexity(loss),
            "train/token_accuracy": sums["num_hits"] / batch.num_loss_tokens,
            "train/total_token_count": batch.num_tokens,
            "train/total_valid_token_count": batch.num_loss_tokens,
            "progress/step": batch.step,
            "progress/epoch": batch.epoch,
            "progress/pct": 100.0 * batch.step / self._total_steps,
            "progress/tokens": self._num_tokens,
            **batch.deal_facts,
            **{f"train/{name}": value for name, value in batch.length_facts.items()},
            **metrics.combine(self._combined, step.totals.by_rank),
            **{key: value for key, value in sums.items() if key in metrics.METRICS},
        }
        if "objective_sum" in sums:
            found["train/objective"] = sums["objective_sum"] / batch.num_loss_tokens
        return found

    def after_step(self, step: StepResult) -> None:
        """End the timing of the step, and add times and speeds to its row.

        The next step's packet brings the phase times to all ranks, so the next row reports them. An
        attempt's first row reports the phase times of its own step and rank.
        """
        # the first row of an attempt includes the data facts too
        if is_rare(step.batch.step) or not self._step_s:
            step.row |= self._data_facts
        self.clock.mark("guard")
        phases = self.clock.lap()
        step_s = phases["step"]
        update_s = sum(phases[phase] for phase in UPDATE_PHASES)
        times = {f"time/train/{phase}_s": phases[phase] for phase in PHASES}
        times |= {"time/train/step_s": step_s, "time/train/update_s": update_s}
        for key, seconds in times.items():
            metrics.put(key, seconds)
        own_s = sum(phases[phase] for phase in OWN_PHASES)
        metrics.put("time/train/slowest_rank", own_s)
        self._productive_s += step_s
        self._step_s.append(step_s)
        # combined values in `signals` replace this rank's own times
        step.row |= {
            **times,
            **step.signals,
            "train/time(s)": step_s,
            **self._speed(step.batch, step_s, update_s),
            **self._progress(step.batch.step),
        }

    @property
    def loss_ema(self) -> float:
        """The training loss smoothed over about 50 steps, bias-corrected; NaN before the first
        finite loss.
        """
        return self._ema / (1 - EMA_DECAY**self._num_ema) if self._num_ema else math.nan

    @property
    def elapsed_s(self) -> float:
        """Return the seconds that this attempt and all earlier attempts took."""
        return self._past_s + time.monotonic() - self._started_s

    def _speed(
        self,
        batch: StepBatch,
        step_s: float,
        update_s: float,
    ) -> dict[str, float]:
        tokens_per_s = batch.num_tokens / step_s
        found = {
            "throughput/train/tokens_per_s": tokens_per_s,
            "throughput/train/tokens_per_s_per_gpu": tokens_per_s / self._world.size,
            "throughput/train/valid_tokens_per_s": batch.num_loss_tokens / step_s,
            "throughput/train/valid_tokens_per_s_update": batch.num_loss_tokens / update_s,
        }
        if self._cost is not None:
            tflops = self._cost.of(batch) / step_s / self._world.size / 1e12
            found["throughput/train/tflops_per_gpu"] = tflops
            if self._peak_tflops is not None:
                found["throughput/train/mfu"] = tflops / self._peak_tflops
        return found

    def _progress(self, step: int) -> dict[str, float]:
        """Return the remaining time, without validations and saves, and the elapsed time."""
        elapsed_s = self.elapsed_s
        return {
            "progress/eta_s": (self._total_steps - step) * statistics.median(self._step_s),
            "progress/elapsed_s": elapsed_s,
            "progress/goodput": min(1.0, self._productive_s / elapsed_s),
        }
