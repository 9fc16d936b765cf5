"""Turns what a step measured into its row of metrics, and keeps the totals that a restart must
not lose.
"""

import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, SupportsFloat

import psutil
import torch

from trainer import metrics
from trainer.batch import StepBatch, StepFlops
from trainer.metrics.table import PHASES
from trainer.metrics.words import COMBINED
from trainer.monitor.clock import PhaseClock, Span
from trainer.monitor.memory import DEVICE_FIELDS, GIB, GpuSampler, Memory
from trainer.monitor.packet import Totals, losses_by_source
from trainer.monitor.throughput import PEAK_TFLOPS, Window, known_as
from trainer.progress import MAIN, Remembered
from trainer.runtime.distributed import World

RARE_EVERY = 50
"""Steps between measurements that cost a pass over the parameters or change slowly."""
EMA_DECAY = 0.98
MAX_PPL_LOSS = 50.0
"""Perplexity is capped at exp of this: a number, not an infinity."""
PARAM_SQUARES = "param_square_sum"
"""In the packet of a rare step: the squared norm of the parameters before its update."""
BLOCK_SQUARES = "grad_square_sum/"
"""Before the name of a block: its part of the squared gradient norm."""
OWN_PHASES = ("data", "shard", "logging", "guard")
"""In which a rank works by itself: in the others it may be waiting for a slower one."""


@dataclass(frozen=True)
class Plan:
    """What is ahead of a run, and what its earlier attempts took; counts of steps, seconds."""

    total_steps: int
    save_freq: int
    test_freq: int
    max_norm: float
    attempt: int = 1
    past_s: float = 0.0
    num_lost_steps: int = 0
    run_dir: Path = Path()
    data_facts: Mapping[str, float] = field(default_factory=dict)
    """What was done to the rows of the training data, as metrics."""
    tracker_health: Callable[[], Mapping[str, float]] = dict


class Meter(Remembered):
    """One per rank; rows differ between ranks only where the table says that rank 0's counts.
    Survives restarts.
    """

    state_of = MAIN  # ranks measure their own times
    KEPT: ClassVar = (
        *("_num_samples", "_num_tokens", "_num_valid_tokens", "_productive_s", "_ema", "_num_ema"),
        "_clipped",
    )

    def __init__(
        self,
        world: World,
        *,
        plan: Plan,
        cost: StepFlops | None,
        memory: Memory,
        observe: Callable[[Span], None] | None,
    ) -> None:
        self.clock = PhaseClock(world.device, observe=observe)
        self._world, self._plan, self._cost, self._memory = world, plan, cost, memory
        name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else ""
        self._peak_tflops = PEAK_TFLOPS.get(known_as(name) or "")
        self._device_gib = memory.device_total_gib
        self._gpu = GpuSampler(world.device)
        self._started = time.monotonic()
        self._window, self._clipped = Window(), deque[bool](maxlen=100)
        self._durations: dict[str, float] = {}
        self._num_lost_steps = plan.num_lost_steps
        self._is_first = True
        self._num_samples = self._num_tokens = self._num_valid_tokens = 0
        self._productive_s = 0.0
        self._ema, self._num_ema = 0.0, 0

    def measured(self) -> dict[str, SupportsFloat]:
        """What this rank tells the others in a step's packet: all that was put and is combined
        over ranks.
        """
        self._put_memory()
        for key, value in self._gpu.last().items():
            metrics.put(key, value)
        taken = metrics.take(COMBINED)
        return {slot: taken.get(slot, metrics.ABSENT) for slot in metrics.travelling()}

    def is_rare(self, step: int) -> bool:
        """Whether slow and costly things are measured in this step (counted from 1)."""
        return step % RARE_EVERY == 0

    def signals(self, batch: StepBatch, totals: Totals, *, lr: float) -> dict[str, float]:
        """What of a row all ranks agree on bit by bit: the guard and its rules may act on it."""
        loss, grad_norm = totals.sums["loss_sum"] / batch.num_loss_tokens, totals.sums["grad_norm"]
        if len(set(totals.by_rank["decisions"])) > 1:
            raise RuntimeError(
                f"the guards of the ranks disagree; numbers of decisions: "
                f"{totals.by_rank['decisions']}"
            )
        clip_coef = min(1.0, self._plan.max_norm / grad_norm) if grad_norm > 0 else 1.0
        self._count(batch, loss, clip_coef)
        return {
            "train/loss": loss,
            "train/loss_ema": self.loss_ema,
            "train/lr(1e-3)": lr * 1e3,
            "train/grad_norm": grad_norm,
            "train/ppl": perplexity(loss),
            "train/token_accuracy": totals.sums["num_hits"] / batch.num_loss_tokens,
            **self._objective(batch, totals),
            **{
                f"train/{key}": value
                for key, value in losses_by_source(totals.sums, batch.loss_tokens_by).items()
            },
            **{key: value for key, value in totals.sums.items() if key in metrics.METRICS},
            **{f"train/{name}": value for name, value in batch.length_facts.items()},
            "train/total_token_count": batch.num_tokens,
            "train/total_valid_token_count": batch.num_loss_tokens,
            **batch.deal_facts,
            "optim/clip_coef": clip_coef,
            "optim/clipped_frac": sum(self._clipped) / len(self._clipped),
            **self._progress(batch),
            **metrics.combined(totals.by_rank, is_rare=self._is_rare_row(batch.step)),
            **metrics.take_numbers(("global",)),
        }

    def row(
        self, batch: StepBatch, signals: Mapping[str, float], totals: Totals
    ) -> dict[str, float]:
        """The metrics of a finished step; ends its time.

        What its phases took is known on all ranks by the next step's packet, so the next row
        reports it; an attempt's first row has nothing to report but this step on its own rank.
        """
        phases = self.clock.lap()
        step_s, update_s = (
            phases["step"],
            sum(phases.get(phase, 0.0) for phase in ("forward", "backward", "optimizer")),
        )
        self._productive_s += step_s
        self._window.add(batch.num_tokens, step_s)
        times = {f"time/train/{phase}_s": phases.get(phase, 0.0) for phase in (*PHASES, "step")}
        times["time/train/update_s"] = update_s
        for key, seconds in times.items():
            metrics.put(key, seconds)
        metrics.put("time/train/slowest_rank", sum(phases.get(phase, 0.0) for phase in OWN_PHASES))
        row = {
            **times,
            **signals,
            "train/time(s)": step_s,
            **self._speed(batch, step_s, update_s),
            **self._ahead(batch.step),
            "obs/overhead_frac": (phases.get("logging", 0.0) + phases.get("guard", 0.0)) / step_s,
        }
        if self._is_rare_row(batch.step):
            row |= self._rare(totals) | {"data/epoch_repeat": batch.epoch + 1}
        self._is_first = False
        return row

    def note_duration(self, what: str, seconds: float) -> None:
        """Remember what a validation or a save kept training waiting, for the time left."""
        self._durations[what] = seconds
        if what == "eval":
            metrics.put("time/train/eval_s", seconds)

    def lose_steps(self, count: int) -> None:
        """A rollback: so many steps have to be trained again."""
        self._num_lost_steps += count

    @property
    def loss_ema(self) -> float:
        """Training loss smoothed over about 50 steps, bias-corrected; NaN before the first
        finite one.
        """
        return self._ema / (1 - EMA_DECAY**self._num_ema) if self._num_ema else math.nan

    def _is_rare_row(self, step: int) -> bool:
        return self.is_rare(step) or self._is_first

    def _objective(self, batch: StepBatch, totals: Totals) -> dict[str, float]:
        """The mean of the trained loss, where that is not cross-entropy."""
        if "objective_sum" not in totals.sums:
            return {}
        return {"train/objective": totals.sums["objective_sum"] / batch.num_loss_tokens}

    def _count(self, batch: StepBatch, loss: float, clip_coef: float) -> None:
        self._num_samples += batch.num_samples
        self._num_tokens += batch.num_tokens
        self._num_valid_tokens += batch.num_loss_tokens
        self._clipped.append(clip_coef < 1.0)
        if math.isfinite(loss):
            self._ema = EMA_DECAY * self._ema + (1 - EMA_DECAY) * loss
            self._num_ema += 1

    def _speed(self, batch: StepBatch, step_s: float, update_s: float) -> dict[str, float]:
        tokens_per_s = batch.num_tokens / step_s
        found: dict[str, float] = {
            "throughput/train/tokens_per_s": tokens_per_s,
            "throughput/train/valid_tokens_per_s": batch.num_loss_tokens / step_s,
            "throughput/train/samples_per_s": batch.num_samples / step_s,
            "throughput/train/valid_tokens_per_s_update": batch.num_loss_tokens / update_s,
            "throughput/train/tokens_per_s_per_gpu": tokens_per_s / self._world.size,
            "throughput/train/tokens_per_s_avg": self._window.tokens_per_s,
        }
        if self._cost is not None:
            tflops = self._cost.of(batch) / step_s / self._world.size / 1e12
            found["throughput/train/tflops_per_gpu"] = tflops
            if self._peak_tflops is not None:
                found["throughput/train/mfu"] = tflops / self._peak_tflops
        return found

    def _progress(self, batch: StepBatch) -> dict[str, float]:
        return {
            "progress/step": batch.step,
            "progress/epoch": batch.epoch,
            "progress/pct": 100.0 * batch.step / self._plan.total_steps,
            "progress/samples": self._num_samples,
            "progress/tokens": self._num_tokens,
            "progress/valid_tokens": self._num_valid_tokens,
        }

    def _ahead(self, step: int) -> dict[str, float]:
        """What is left, and what all attempts took."""
        plan = self._plan
        elapsed_s, remaining = (
            plan.past_s + time.monotonic() - self._started,
            plan.total_steps - step,
        )
        num_evals = remaining // plan.test_freq + 1 if plan.test_freq > 0 else 1
        num_saves = remaining // plan.save_freq + 1 if plan.save_freq > 0 else 1
        eta_s = remaining * self._window.median_step_s
        eta_s += num_evals * self._durations.get("eval", 0.0) + num_saves * self._durations.get(
            "save", 0.0
        )
        return {
            "progress/eta_s": eta_s if remaining else 0.0,
            "progress/elapsed_s": elapsed_s,
            "progress/attempt": plan.attempt,
            "progress/lost_steps": self._num_lost_steps,
            "progress/goodput": min(1.0, self._productive_s / elapsed_s),
        }

    def _put_memory(self) -> None:
        sample = self._memory.sample()
        metrics.put("memory/cpu/rss_gib", sample["rss_gib"])
        metrics.put("memory/cpu/vms_gib", sample["vms_gib"])
        if self._device_gib is None:
            return
        for name in DEVICE_FIELDS:
            metrics.put(f"memory/{name}_gib", sample[f"{name}_gib"])
            metrics.put(f"memory/{name}_frac", sample[f"{name}_gib"] / self._device_gib)
        metrics.put("memory/alloc_retries", sample["alloc_retries"])
        metrics.put("memory/ooms", sample["ooms"])
        if sample["reserved_gib"]:
            metrics.put(
                "memory/fragmentation", 1 - sample["allocated_gib"] / sample["reserved_gib"]
            )

    def _rare(self, totals: Totals) -> dict[str, float]:
        found: dict[str, float] = {
            "system/cpu_util": psutil.cpu_percent(),
            "system/disk_free_gib": shutil.disk_usage(self._plan.run_dir).free / GIB,
            **self._plan.data_facts,
            **self._plan.tracker_health(),
        }
        if PARAM_SQUARES in totals.sums:
            found["optim/param_norm"] = math.sqrt(totals.sums[PARAM_SQUARES])
        for name, square in totals.sums.items():
            if name.startswith(BLOCK_SQUARES):
                found[f"optim/grad_norm/{name.removeprefix(BLOCK_SQUARES)}"] = math.sqrt(square)
        return found


def perplexity(loss: float) -> float:
    """exp(loss), capped."""
    return math.exp(min(loss, MAX_PPL_LOSS)) if math.isfinite(loss) else loss
