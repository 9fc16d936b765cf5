"""The single object to which the training loop logs. It writes rows and events to files, and passes
them to the chosen backends.
"""

import importlib
import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.errors import EXIT_DONE
from trainer.runtime import heartbeat
from trainer.runtime.json_lines import flat
from trainer.runtime.log import labelled
from trainer.tracking import events_file, metrics_file, row_losses, run_info
from trainer.tracking.backend import Backend, Sink
from trainer.tracking.console_backend import ConsoleBackend
from trainer.tracking.events_file import Event, EventsFile
from trainer.tracking.histories import FILE_NAMES, HistoryBackend
from trainer.tracking.metrics_file import MetricsFile, MetricsRow
from trainer.tracking.mlflow_backend import MlflowBackend
from trainer.tracking.row_losses import RowLossFile, SampleLosses
from trainer.tracking.run_info import ELSEWHERE, RunFile, RunInfo
from trainer.tracking.tensorboard_backend import TensorboardBackend
from trainer.tracking.trackio_backend import TrackioBackend
from trainer.tracking.wandb_backend import WandbBackend

logger = logging.getLogger(__name__)

LOG_LEVELS = {"warn": logging.WARNING, "error": logging.ERROR}
USE_WANDB = "USE_WANDB"
BACKENDS: dict[str, type[Backend]] = {
    "console": ConsoleBackend,
    "tensorboard": TensorboardBackend,
    "mlflow": MlflowBackend,
    "trackio": TrackioBackend,
    "wandb": WandbBackend,
}
"""The names that `trainer.logger` may contain. To add a tracker, add an entry to this table."""


class Tracking:
    """Logs the metrics and events of one attempt of a run.

    Only rank 0 builds it, and its owner calls `finish` in a `finally` block. `log` writes the row
    to `run_dir/metrics.jsonl` and queues it for the backends, which are opened when the attempt
    starts. `USE_WANDB=true` in the environment adds "wandb" to the backends, and `USE_WANDB=false`
    removes it. Any thread may call the methods.

    `log_every` is the number of steps between console lines. Trackers show runs with the same
    `group` together. It defaults to the name of the experiment; the environment variable
    `WANDB_RUN_GROUP` overrides it. `run_dir` defaults to `trainer.default_local_dir` from `config`,
    or else to `checkpoints/<project>/<experiment>`.

    Raises `ConfigError` for an unknown backend, for a backend whose package is missing, and for a
    directory that holds a different run or in which a different process is training. Raises
    `CannotWriteError` if one of its own files cannot be opened. After that, failures of a disk, a
    network or a tracker never reach the caller.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | Sequence[str] = "console",
        config: Mapping[str, Any] | None = None,
        *,
        run_dir: str | Path | None = None,
        total_steps: int | None = None,
        log_every: int = 1,
        group: str | None = None,
    ) -> None:
        """Check the run directory, open this run's own files and start one queue for each backend."""
        config = config or {}
        local_dir = flat(config).get("trainer.default_local_dir")
        run_dir = Path(run_dir or local_dir or Path("checkpoints", project_name, experiment_name))
        names = [default_backend] if isinstance(default_backend, str) else list(default_backend)
        # import in the caller's thread, because imports from two threads can clash
        backends = require_backends(names, load=True)
        run_file = RunFile(run_dir / run_info.FILE_NAME)
        run_file.require(project_name, experiment_name)
        if (pid := heartbeat.trainer_pid(run_dir)) not in (None, os.getpid()):
            raise ConfigError(f"pid {pid} is training in '{run_dir}'. {ELSEWHERE}")
        self._metrics_file = MetricsFile(run_dir / metrics_file.FILE_NAME)
        self.past = self._metrics_file.past
        """Facts about the earlier attempts of this run."""
        self.attempt = self._metrics_file.attempt
        """The number of this attempt, counted from 1. Attempts that logged nothing do not count."""
        self._row_losses = RowLossFile(run_dir / row_losses.FILE_NAME, attempt=self.attempt)
        self._events_file = EventsFile(run_dir / events_file.FILE_NAME, attempt=self.attempt)
        self._info = RunInfo(
            project_name=project_name,
            experiment_name=experiment_name,
            config=config,
            run_dir=run_dir,
            total_steps=total_steps,
            log_every=log_every,
            attempt=self.attempt,
            run_file=run_file,
            group=os.environ.get("WANDB_RUN_GROUP") or group or experiment_name,
        )
        backends["csv"] = HistoryBackend
        self._sinks = [Sink(backend(self._info, name)) for name, backend in backends.items()]
        self._lock = threading.RLock()
        self._last_step = 0
        self._has_started = self._has_finished = False

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Store facts about this attempt in `run.json`, in place of the facts about earlier
        attempts.
        """
        self._info.run_file.update(**facts)

    def start(self, step: int) -> None:
        """Begin the attempt, which continues after the finished step `step`. Without this call, the
        first logged row begins it.
        """
        info = self._info
        with self._lock:
            if self._has_started:
                raise RuntimeError(
                    f"Tracking.start({step}) was called too late: attempt {self.attempt} has started"
                )
            self._has_started = True
            info.resume_step = step
            self._continue_from(metrics_file.START, step)
            planned = {} if info.total_steps is None else {"total_steps": info.total_steps}
            info.run_file.update(
                project_name=info.project_name,
                experiment_name=info.experiment_name,
                group=info.group,
                config=info.config,
                **planned,
            )
            self.event("start", step, f"attempt {self.attempt} continues from step {step}")
            files = (metrics_file.FILE_NAME, events_file.FILE_NAME, *FILE_NAMES.values())
            places = [f"\n  {place}" for sink in self._sinks if (place := sink.backend.where())]
            logs = f"{info.run_dir}: {', '.join(files)}{''.join(places)}"
            logger.info("%s", labelled("logs", logs))
            for sink in self._sinks:
                sink.open()

    def log(
        self,
        data: Mapping[str, float],
        step: int,
        kind: str | None = None,
    ) -> None:
        """Record the metrics of a step. Values must be plain ints or floats.

        Without `kind`, the kind of a row with a `val/` key is "val", and any other row is "train".
        Other kinds, such as "system" or "epoch", are allowed. If a metric is logged several times
        for the same kind and step, the last value counts.
        """
        row = MetricsRow.of(data, step, kind)
        with self._lock:
            self._require_open("log", step)
            if not self._has_started:
                # only a training row shows where the run continues; a result may have any step
                self.start(step - 1 if row.kind == "train" else max(step, self.past.last_step))
            self._last_step = step
            self._metrics_file.write(row)
            self._send("log", row)

    def log_rows(
        self,
        step: int,
        losses: SampleLosses,
        location: Callable[[int], str],
    ) -> None:
        """Record the losses of a step's samples. `location` returns the place of a sample, given
        its id.
        """
        with self._lock:
            self._require_open("log_rows", step)
            self._row_losses.write(step, losses, location)

    def rewind(self, step: int) -> None:
        """Go back to the finished step `step` within this attempt. Rows of later steps no longer
        count.
        """
        with self._lock:
            self._require_open("rewind", step)
            self._continue_from(metrics_file.ROLLBACK, step)
            self._send("rewind", step)

    def event(
        self,
        kind: str,
        step: int,
        message: str,
        level: str = "info",
        **fields: Any,
    ) -> None:
        """Record an event. The levels "warn" and "error" are shown on the console; "error" also
        triggers an alert in W&B.
        """
        event = Event(kind, step, message, level, fields)
        with self._lock:
            self._require_open("event", step)
            self._events_file.write(event)
            if level == "error":
                self._send("alert", event)
        if level in LOG_LEVELS:
            logger.log(LOG_LEVELS[level], "step %d: %s", step, message)

    def flush(self) -> None:
        """Start to sync the logged data to disk, so that it survives a crash of the machine. Does
        not wait for the sync.
        """
        for file in (self._metrics_file, self._row_losses, self._events_file):
            file.sync_soon()

    def finish(self, exit_code: int = EXIT_DONE) -> None:
        """Close all backends in parallel, then record the end of the attempt.

        Waits for each backend at most its `close_timeout_s`. A second call does nothing.
        """
        with self._lock:
            if self._has_finished:
                return
            self._has_finished = True
        self._metrics_file.close()
        self._row_losses.close()
        for sink in self._sinks:
            sink.finish(exit_code)
        for sink in self._sinks:
            sink.wait()
        if self._has_started or exit_code != EXIT_DONE:
            step = self._last_step
            level = "info" if exit_code == EXIT_DONE else "warn"
            message = f"attempt {self.attempt} ended after step {step} with exit code {exit_code}"
            self._events_file.write(Event("end", step, message, level, {"exit_code": exit_code}))
        self._events_file.close()

    def _continue_from(self, kind: str, step: int) -> None:
        self._last_step = step
        self._metrics_file.mark(kind, step)
        self._row_losses.mark(kind, step)

    def _require_open(self, call: str, step: int) -> None:
        if self._has_finished:
            raise RuntimeError(f"Tracking.{call} called after finish (step {step})")

    def _send(self, call: str, *args: Any) -> None:
        for sink in self._sinks:
            sink.send(call, *args)


def with_environment(names: Sequence[str]) -> list[str]:
    """Return the chosen backends without duplicates, with "wandb" added or removed according to
    USE_WANDB.
    """
    wish = os.environ.get(USE_WANDB, "").lower()
    if wish not in ("", "true", "false"):
        raise ConfigError(
            f"the environment variable {USE_WANDB} must be true or false, got '{wish}'"
        )
    chosen = [name for name in dict.fromkeys(names) if name != "wandb" or not wish]
    return [*chosen, "wandb"] if wish == "true" else chosen


def require_backends(names: Sequence[str], *, load: bool = False) -> dict[str, type[Backend]]:
    """Return the chosen backends by name.

    Raises `ConfigError` for an unknown backend, and for one whose packages are missing or, with
    `load`, cannot be imported.
    """
    found: dict[str, type[Backend]] = {}
    for name in with_environment(names):
        if name not in BACKENDS:
            raise ConfigError(
                f"'trainer.logger' must be any of {', '.join(BACKENDS)}; got '{name}'"
            )
        backend = found[name] = BACKENDS[name]
        for key, value in backend.environment.items():
            os.environ.setdefault(key, value)
        for module in backend.modules:
            try:
                if load:
                    importlib.import_module(module)
                elif importlib.util.find_spec(module.partition(".")[0]) is None:
                    raise ModuleNotFoundError(f"there is no module '{module}'")
            except Exception as error:  # a broken package may raise anything
                raise ConfigError(
                    f"'trainer.logger' has '{name}', but its package cannot be imported "
                    f"({type(error).__name__}: {error}).\n"
                    f"Fix: pip install {backend.install}, or remove '{name}' from 'trainer.logger'"
                ) from error
    return found
