"""Saves and loads the state of a run.

This module decides when to try a save, in which thread, and what to do after a failure. Only the
write of a snapshot may run in a background thread: it uses its own process group. The collectives
of the default group run in the training thread, so that all ranks call them in the same order.
"""

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from trainer.checkpoint import fsio, layout, retention, rollback, shards, start
from trainer.checkpoint.layout import CheckpointInfo
from trainer.checkpoint.requests import SaveRequests
from trainer.checkpoint.save import SaveFailedError, Saver, UnresolvedSaveError
from trainer.checkpoint.snapshot import HostBuffers, Snapshot
from trainer.checkpoint.state import State, load_state, rank_state, require_resumable
from trainer.data.loader import TrainLoader
from trainer.errors import CannotWriteError, ResumableError
from trainer.runtime.processes import begun
from trainer.runtime.progress import History, Position, Rollbacks
from trainer.runtime.text import readable

logger = logging.getLogger(__name__)
T = TypeVar("T")
Outcome = tuple[int | SaveFailedError, float]
"""Size of the committed checkpoint in bytes, or the error, and the duration in seconds."""
Tell = Callable[[str, int, str, str], None]
"""A function that reports an event, given its kind, step, message and level."""
RETRY_AFTER_S = (60.0, 300.0)
"""Pauses after the first and second failed saves in a row. A third failure ends the run."""
REQUIRED_RETRY_AFTER_S = (1.0, 5.0)
"""Pauses before the retries of a required save, while training waits."""
CLOSE_TIMEOUT_S = 10.0


@dataclass(eq=False)
class CheckpointManager:
    """Writes and loads the `global_step_*` directories of one run. Its methods are collective.

    `state`: the parts to save; `tell`: called with the result of each save.
    """

    saver: Saver
    state: State
    tell: Tell
    save_every_s: float = math.inf

    def __post_init__(self) -> None:
        self.run_dir = self.saver.run_dir
        self._world = self.saver.world
        self._requests = SaveRequests(self.run_dir, every_s=self.save_every_s)
        is_async = self.saver.config.async_save
        self._buffers = HostBuffers(self.saver.device) if is_async else None
        self._pending: tuple[int, Future[Outcome]] | None = None
        self._num_failed_in_a_row = 0
        self._failed_at = 0.0
        self._last_error = ""
        self._committed_step: int | None = None
        self._metrics: dict[str, float] = {}

    def prepare(self) -> None:
        """Check that a checkpoint fits on the disk, and copy the tensors that exports need.

        Afterwards, no save reads the model directory. Raises `ConfigError`, `CannotWriteError`.
        """
        state = [part.state_dict() for part in self.state.values()]
        needed_bytes = self.saver.size_bytes(state)
        self._on_main(partial(retention.require_space, self.run_dir, needed_bytes))
        self.saver.keep_sources()

    def save(
        self,
        position: Position,
        *,
        loss: float,
        grad_norm: float,
        history: History,
        is_required: bool,
    ) -> None:
        """Save the current state, at `position`, unless this step is already saved.

        A background save is finished first. With `is_required`, the state is on disk when this
        returns, or `CannotWriteError` is raised. Without it, `ResumableError` is raised after the
        third failure in a row. Raises `ConfigError` on all ranks for a state that could not be
        resumed.
        """
        started = time.perf_counter()
        self.finish()
        step = position.step
        for pause_s in (0.0, *(REQUIRED_RETRY_AFTER_S if is_required else ())):
            if step == self._committed_step:
                break
            self._raise_if_exhausted(is_required)
            time.sleep(pause_s)
            self._requests.begin()
            extra = rank_state(self.state, step)
            require_resumable(extra, self.state)
            # The live state of this rank: the next step changes its tensors.
            snapshot = Snapshot(
                position=position,
                model=self.state["model"].state_dict(),
                optim=self.state["optimizer"].state_dict(),
                extra=extra,
                data=self.state["data"].state_dict(),
                loss=loss if math.isfinite(loss) else None,
                grad_norm=grad_norm if math.isfinite(grad_norm) else None,
                history=history,
            )
            self._try(snapshot, in_background=self._buffers is not None and not is_required)
        if is_required and step != self._committed_step:
            raise CannotWriteError(
                f"the checkpoint of step {step} cannot be written: {self._last_error}.\n"
                f"Fix: resolve the cause, then run the same command to continue"
            )
        self._raise_if_exhausted(is_required)
        self._metrics["time/train/checkpoint_s"] = time.perf_counter() - started

    def before_update(self) -> None:
        """Wait while a background save is still copying the state."""
        if self._buffers is not None:
            self._buffers.before_update()

    def is_save_due(self) -> bool:
        """Return True on the main rank if a save is due now.

        A save is due by time, by the file SAVE, or as the retry of a failed save.
        """
        if self._pending is not None and self._pending[1].done():
            self.finish()
        if self._num_failed_in_a_row == 0:
            return self._pending is None and self._requests.is_due()
        # after the last failure there is no pause: `save` is called at once, and ends the run
        pauses_s = (*RETRY_AFTER_S, 0.0)
        pause_s = pauses_s[min(self._num_failed_in_a_row, len(pauses_s)) - 1]
        return time.monotonic() - self._failed_at >= pause_s

    def finish(self) -> None:
        """Wait for a background save; all ranks share its outcome."""
        pending = self._pending
        self._pending = None
        if pending is not None:
            step, future = pending
            outcome, duration_s = future.result()
            self._note(step, outcome, duration_s)
            if isinstance(outcome, int):
                self._metrics["time/train/checkpoint_bg_s"] = duration_s

    def take_metrics(self, step: int) -> dict[str, float]:
        """Return the metrics of the saves since the last call."""
        metrics = self._metrics
        self._metrics = {}
        if self._committed_step is not None:
            metrics["ckpt/age_steps"] = step - self._committed_step
        return metrics

    def _try(self, snapshot: Snapshot, *, in_background: bool) -> None:
        """Save a snapshot, or refuse it if a value is not finite.

        In the background, the thread writes a copy of the snapshot, so that training can continue.
        """
        step = snapshot.position.step
        if not self._is_finite(snapshot):
            error = "a parameter or optimizer moment is not finite, and such a state is never saved"
            self._note(step, SaveFailedError(error), 0.0)
            return
        self.saver.prepare()
        buffers = self._buffers
        # On a GPU, always copy first. Otherwise the write would fetch the tensors one by one,
        # through memory that is not page-locked.
        if buffers is not None and (in_background or self.saver.device.type == "cuda"):
            snapshot = buffers.copy(snapshot)

        def write() -> Outcome:
            started = time.perf_counter()
            if buffers is not None:
                buffers.wait_until_ready()
            outcome: int | SaveFailedError
            try:
                outcome = self.saver.save(snapshot)
            except SaveFailedError as error:
                # The frames of its traceback would keep the snapshot in memory.
                outcome = error.with_traceback(None)
            return outcome, time.perf_counter() - started

        if in_background:
            self._pending = step, begun(write, name="checkpoint")
        else:
            self._note(step, *write())

    def _note(
        self,
        step: int,
        outcome: int | SaveFailedError,
        duration_s: float,
    ) -> None:
        """Record the outcome of a save: its metrics, an event, and the number of failures in a row.

        Raises `ResumableError` if the ranks cannot tell whether the checkpoint was committed.
        """
        if isinstance(outcome, UnresolvedSaveError):
            raise ResumableError(
                f"cannot confirm that step {step} was saved: {outcome}.\n"
                f"Fix: run the same command to find out and continue"
            ) from outcome
        if isinstance(outcome, SaveFailedError):
            self._num_failed_in_a_row += 1
            self._failed_at = time.monotonic()
            # without its fix, because the error that ends the run has a different one
            self._last_error = str(outcome).partition(".\nFix:")[0]
            self._metrics["checkpoint/failed_in_a_row"] = self._num_failed_in_a_row
            text = f"the save failed, and older checkpoints are unchanged: {outcome}"
            self.tell("checkpoint_failed", step, text, "warn")
            return
        self._num_failed_in_a_row = 0
        self._committed_step = step
        if self._world.is_main:
            self._requests.settle()
        self._metrics |= {"ckpt/bytes": outcome, "ckpt/save_s": duration_s}
        with suppress(OSError):  # a failed count for the log must not end the run
            names = fsio.list_dir(self.run_dir)
            self._metrics["ckpt/kept"] = sum(layout.parse_step(name) is not None for name in names)
        path = self.run_dir / layout.step_dir_name(step)
        self.tell("checkpoint", step, f"saved {path}", "info")
        logger.info("saved %s (%s, %.1f s)", path, readable(outcome), duration_s)

    def _raise_if_exhausted(self, is_required: bool) -> None:
        if self._num_failed_in_a_row > len(RETRY_AFTER_S) and not is_required:
            raise ResumableError(
                f"{self._num_failed_in_a_row} saves in a row failed; last error: "
                f"{self._last_error}.\n"
                f"Fix: resolve the cause, then run the same command to continue from the last checkpoint"
            )

    def _is_finite(self, snapshot: Snapshot) -> bool:
        """Return True if all parameters and optimizer moments are finite on every rank."""
        tensors = shards.local_tensors([snapshot.model, snapshot.optim["state"]])
        are_bad = [(~torch.isfinite(tensor)).any() for tensor in tensors if tensor.numel()]
        num_bad = torch.stack(are_bad).sum().to(self._world.device).double()
        dist.all_reduce(num_bad)
        return num_bad.item() == 0

    def load(self, checkpoint: CheckpointInfo) -> None:
        """Load a verified checkpoint. Raises `ConfigError` if it is from a different model."""
        load_state(checkpoint, self.state, self._world)
        self._committed_step = checkpoint.step

    def decide_rollback(
        self,
        batches: TrainLoader,
        *,
        onset: int,
        history: History,
        reason: str,
    ) -> tuple[CheckpointInfo, Rollbacks] | None:
        """Return the newest good checkpoint well before step `onset`, and all rollbacks of the run.

        Returns None if there is no such checkpoint. Collective. The rollback is recorded before
        anything changes. The caller loads the checkpoint.
        """
        self.finish()
        now = self.saver.fingerprints
        for info in self._on_main(
            lambda: rollback.candidates(
                self.run_dir,
                onset=onset,
                history=history,
                fingerprints=now,
                leads_here=batches.follows,
            )
        ):
            if not start.verify(info, self._world):
                break
        else:
            logger.warning(
                "no rollback: there is no checkpoint of the same batches from well before step "
                "%d, so training continues: %s",
                onset,
                reason,
            )
            return None

        def decide() -> Rollbacks:
            self.saver.require_lock()
            return rollback.decide(
                self.run_dir,
                info,
                onset=onset,
                found_step=batches.step,
                last_step=batches.last_step,
                reason=reason,
            )

        return info, self._on_main(decide)

    def settle(self, step: int, history: History) -> None:
        """Point to the checkpoint of `step`, and delete checkpoints that are no longer needed."""

        def point_and_delete() -> None:
            self.saver.require_lock()
            # The directory is missing if this run begins with another run's checkpoint.
            if (self.run_dir / layout.step_dir_name(step)).is_dir():
                retention.settle(
                    self.run_dir,
                    step,
                    keep=self.saver.keep,
                    history=history,
                    protect={step},
                )

        self._on_main(point_and_delete)

    def close(self) -> None:
        """Wait briefly for a background save. Once the run's lock is released, a slower save
        fails.
        """
        if self._pending is not None:
            wait([self._pending[1]], CLOSE_TIMEOUT_S)

    def _on_main(self, action: Callable[[], T]) -> T:
        return start.on_main(action, self.run_dir, self._world)
