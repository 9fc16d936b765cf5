"""The one object that the loop logs to. It writes rows and events to files and hands them to the
chosen backends.
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
"""The names that `trainer.logger` may have; another tracker is an entry here."""


class Tracking:
    """Metrics and events of one attempt of a run. Rank 0 builds it, and its owner calls `finish` in
    a `finally`.

    `log` writes the row to `run_dir/metrics.jsonl` and queues it for the backends, which open with
    the attempt. `USE_WANDB=true` in the environment adds "wandb" to the backends and
    `USE_WANDB=false` removes it. Calls may come from any thread.

    `log_every` is the number of steps between lines of the console. `group`, unless
    `WANDB_RUN_GROUP` is set, names the run that this one belongs to, by default itself: trackers
    show them together. `run_dir` is by default `trainer.default_local_dir` of `config`, else
    `checkpoints/<project>/<experiment>`.

    Raises `ConfigError` for an unknown backend or one whose package is missing and for a directory
    that holds another run or in which another process trains, `CannotWriteError` when a file of its
    own cannot be opened. After that no failure of a disk, a network or a tracker reaches the
    caller.
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
        config = config or {}
        own = flat(config)
        local_dir = own.get("trainer.default_local_dir") or own.get("default_local_dir")
        run_dir = Path(run_dir or local_dir or Path("checkpoints", project_name, experiment_name))
        names = [default_backend] if isinstance(default_backend, str) else list(default_backend)
        # imported in the caller's thread, as imports from two threads can clash
        backends = require_backends(names, load=True)
        run_file = RunFile(run_dir / run_info.FILE_NAME)
        run_file.require(project_name, experiment_name)
        if (pid := heartbeat.trainer_pid(run_dir)) not in (None, os.getpid()):
            raise ConfigError(f"pid {pid} is training in '{run_dir}'. {ELSEWHERE}")
        self._metrics_file = MetricsFile(run_dir / metrics_file.FILE_NAME)
        self.past = self._metrics_file.past
        """Facts from the earlier attempts of this run."""
        self.attempt = self._metrics_file.attempt
        """1 for the first start of a run that logged anything, one more for each later one."""
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
        """Keep facts of this attempt in `run.json`; they replace those of earlier attempts."""
        self._info.run_file.update(**facts)

    def start(self, step: int) -> None:
        """Begin the attempt after finished step `step`. Without this call the first row begins
        it.
        """
        info = self._info
        with self._lock:
            if self._has_started:
                raise RuntimeError(
                    f"Tracking.start({step}) comes too late: attempt {self.attempt} has started"
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

    def log(self, data: Mapping[str, float], step: int, kind: str | None = None) -> None:
        """Record the metrics of a step. Values are plain int or float.

        Without `kind`, a row with a `val/` key is "val" and any other "train"; kinds such as
        "system" or "epoch" may be added. Of each kind, step and metric the last value counts.
        """
        row = MetricsRow.of(data, step, kind)
        with self._lock:
            self._require_open("log", step)
            if not self._has_started:
                # only a training row tells where the run continues; a result may be of any step
                self.start(step - 1 if row.kind == "train" else max(step, self.past.last_step))
            self._last_step = step
            self._metrics_file.write(row)
            self._send("log", row)

    def log_rows(self, step: int, losses: SampleLosses, location: Callable[[int], str]) -> None:
        """Record the losses of the samples of a step; `location` returns the place of a sample."""
        with self._lock:
            self._require_open("log_rows", step)
            self._row_losses.write(step, losses, location)

    def rewind(self, step: int) -> None:
        """Go back to finished step `step` inside this attempt: rows of later steps no longer
        count.
        """
        with self._lock:
            self._require_open("rewind", step)
            self._continue_from(metrics_file.ROLLBACK, step)
            self._send("rewind", step)

    def event(self, kind: str, step: int, message: str, level: str = "info", **fields: Any) -> None:
        """Record what happened. The levels "warn" and "error" are shown on the console, "error"
        also alerts in W&B.
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
        """Make what was logged survive a crash of the machine soon, without waiting for it."""
        for file in (self._metrics_file, self._row_losses, self._events_file):
            file.sync_soon()

    def finish(self, exit_code: int = EXIT_DONE) -> None:
        """Close all backends at once, waiting for each at most its `close_timeout_s`, then record
        the attempt's end. A second call does nothing.
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
            step, level = self._last_step, "info" if exit_code == EXIT_DONE else "warn"
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
    """Return the chosen backends, once each, with or without "wandb" as USE_WANDB asks."""
    wish = os.environ.get(USE_WANDB, "").lower()
    if wish not in ("", "true", "false"):
        raise ConfigError(f"{USE_WANDB} in the environment must be true or false, got '{wish}'")
    chosen = [name for name in dict.fromkeys(names) if name != "wandb" or not wish]
    return [*chosen, "wandb"] if wish == "true" else chosen


def require_backends(names: Sequence[str], *, load: bool = False) -> dict[str, type[Backend]]:
    """Return the chosen backends. Raises `ConfigError` for an unknown one, and for one whose
    packages are missing or, with `load`, cannot be imported.
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
            except Exception as error:  # a broken package raises anything
                raise ConfigError(
                    f"'trainer.logger' has '{name}', but its package cannot be imported "
                    f"({type(error).__name__}: {error}).\n"
                    f"Fix: pip install {backend.install}, or remove '{name}' from 'trainer.logger'"
                ) from error
    return found
