"""The one object the loop logs to: writes rows and events to files and hands them to the chosen
backends.
"""

import importlib
import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.errors import EXIT_DONE
from trainer.progress import MAIN
from trainer.runtime import heartbeat
from trainer.tracking import (
    events_file,
    metrics_file,
    mlflow_backend,
    run_info,
    tensorboard_backend,
    trackio_backend,
    wandb_backend,
)
from trainer.tracking.backend import Backend, Sink
from trainer.tracking.console_backend import ConsoleBackend
from trainer.tracking.continued import Continued
from trainer.tracking.events_file import Event, EventsFile
from trainer.tracking.histories import FILE_NAMES, HistoryBackend
from trainer.tracking.metrics_file import MetricsFile, MetricsRow, Past
from trainer.tracking.mlflow_backend import MlflowBackend
from trainer.tracking.run_info import ELSEWHERE, RunFile, RunInfo
from trainer.tracking.tensorboard_backend import TensorboardBackend
from trainer.tracking.trackio_backend import TrackioBackend
from trainer.tracking.wandb_backend import WandbBackend

logger = logging.getLogger(__name__)

LOG_LEVELS = {"warn": logging.WARNING, "error": logging.ERROR}
USE_WANDB = "USE_WANDB"


@dataclass(frozen=True)
class BackendSpec:
    build: Callable[[RunInfo], Backend]
    close_timeout_s: float = 15.0
    inline: bool = False
    is_continued: bool = False
    """Whether a restart continues the same tracker run, which then is sent only what it lacks."""
    modules: tuple[str, ...] = ()
    """What it imports."""
    install: str = ""
    """The words for pip that bring them, as in pyproject.toml."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Defaults set before the import: no library reports on its users."""
    where: Callable[[RunInfo], str] | None = None
    """How to look at it, for the start of a run."""


BACKENDS: dict[str, BackendSpec] = {
    "console": BackendSpec(ConsoleBackend, inline=True),
    "tensorboard": BackendSpec(
        TensorboardBackend,
        is_continued=True,
        modules=("tensorboard", "torch.utils.tensorboard"),
        install="'tensorboard>=2.18'",
        where=tensorboard_backend.where,
    ),
    "mlflow": BackendSpec(
        MlflowBackend,
        is_continued=True,
        close_timeout_s=30.0,
        modules=("mlflow", "sqlalchemy", "alembic"),
        install="'mlflow-skinny>=3.17' 'sqlalchemy>=2' 'alembic>=1.13'",
        environment={"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "WARNING"},
        where=mlflow_backend.where,
    ),
    "trackio": BackendSpec(
        TrackioBackend,
        is_continued=True,
        close_timeout_s=35.0,  # it waits for its own thread for 30
        modules=("trackio",),
        install="'trackio>=0.43'",
        environment={"TRACKIO_STORAGE_MODE": "sqlite", "HF_HUB_DISABLE_TELEMETRY": "1"},
        where=trackio_backend.where,
    ),
    "wandb": BackendSpec(
        WandbBackend,
        is_continued=True,
        close_timeout_s=60.0,
        modules=("wandb",),
        install="'wandb>=0.31'",
        environment={"WANDB_ERROR_REPORTING": "false"},
        where=wandb_backend.where,
    ),
}
HISTORIES = BackendSpec(HistoryBackend)
"""The CSV files, always written."""


class Tracking:
    """Metrics and events of one attempt of a run; rank 0 builds it, and its owner calls `finish` in
    a `finally`.

    `log` writes the row to `run_dir/metrics.jsonl` and queues it for the backends, which open with
    the attempt. `USE_WANDB=true` in the environment adds "wandb" to the backends and
    `USE_WANDB=false` takes it away; `WANDB_PROJECT` replaces the project name there, so that
    training and evaluation runs share one. Calls may come from any thread.

    `group`, or `WANDB_RUN_GROUP` before it, names the run that this one belongs to, by default
    itself: trackers show them together.
    `run_dir` is by default `trainer.default_local_dir` of `config`, else
    `checkpoints/<project>/<experiment>`.

    Raises `ConfigError` for an unknown backend or one whose package is missing and for a directory
    that holds another run or in which another process trains, `CannotWriteError` when a file of its
    own cannot be opened. After that no failure of a disk, a network or a tracker reaches the
    caller.
    """

    state_of = MAIN

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | Sequence[str] = "console",
        config: Mapping[str, Any] | None = None,
        *,
        run_dir: str | Path | None = None,
        total_steps: int | None = None,
        group: str | None = None,
    ) -> None:
        config = config or {}
        run_dir = Path(
            run_dir or _local_dir(config) or Path("checkpoints", project_name, experiment_name)
        )
        names = (
            [default_backend]
            if isinstance(default_backend, str)
            else list(dict.fromkeys(default_backend))
        )
        self._specs = {name: importable(name) for name in with_environment(names)}
        run_file = RunFile(run_dir / run_info.FILE_NAME)
        run_file.require(project_name, experiment_name)
        if (pid := heartbeat.trainer_pid(run_dir)) not in (None, os.getpid()):
            raise ConfigError(f"'{run_dir}' is being trained in by pid {pid}: {ELSEWHERE}")
        self._metrics_file = MetricsFile(run_dir / metrics_file.FILE_NAME)
        self._events_file = EventsFile(
            run_dir / events_file.FILE_NAME, attempt=self._metrics_file.attempt
        )
        self._info = RunInfo(
            project_name=project_name,
            experiment_name=experiment_name,
            config=config,
            run_dir=run_dir,
            metrics_path=run_dir / metrics_file.FILE_NAME,
            total_steps=total_steps,
            attempt=self._metrics_file.attempt,
            run_file=run_file,
            group=os.environ.get("WANDB_RUN_GROUP") or group or experiment_name,
        )
        self._sinks = [
            _sink(name, spec, self._info)
            for name, spec in {"csv": HISTORIES, **self._specs}.items()
        ]
        self._lock = threading.RLock()
        self._last_step = 0
        self._has_started = self._has_finished = self._is_closed = False

    @property
    def attempt(self) -> int:
        """1 for the first start of a run that logged anything, one more for each later one."""
        return self._info.attempt

    @property
    def past(self) -> Past:
        """What earlier attempts of this run left behind."""
        return self._metrics_file.past

    def start(self, step: int) -> None:
        """Say that this attempt goes on from finished step `step`, before its first row, which
        else says it.
        """
        with self._lock:
            if self._has_started:
                raise RuntimeError(
                    f"Tracking.start({step}) comes too late: attempt {self.attempt} has started"
                )
            self._has_started = True
            self._info.resume_step = self._last_step = step
            self._metrics_file.mark(metrics_file.START, step)
            self._info.run_file.describe(self._info.description())
            self.event("start", step, f"attempt {self.attempt} goes on from step {step}")
            logger.info("%s", _where_logs_are(self._info, self._specs))
            for sink in self._sinks:
                sink.open()

    def log(self, data: Mapping[str, float], step: int, kind: str | None = None) -> None:
        """Record the metrics of a step. Values are plain int or float; a suffix such as `@sum` of a
        key is dropped.

        Without `kind`, a row with a `val/` key is "val" and any other "train"; kinds such as
        "system" or "epoch" may be added. Of each kind, step and metric the last value counts.
        """
        row = MetricsRow.of(data, step, kind)
        with self._lock:
            self._require_open("log", step)
            if not self._has_started:
                # only a training row says where the run goes on; a result may be of any of its
                # steps
                self.start(step - 1 if row.kind == "train" else max(step, self.past.last_step))
            self._last_step = step
            self._metrics_file.write(row)
            self._send("log", row)

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, str | float]]) -> None:
        """Show rows of equal columns, such as generated samples, in trackers that have tables;
        kept nowhere else.
        """
        with self._lock:
            self._require_open("table", step)
            if rows:
                self._send("table", name, step, rows)

    def rewind(self, step: int) -> None:
        """The run went back to finished step `step` inside this attempt: rows of later steps no
        longer count.
        """
        with self._lock:
            self._require_open("rewind", step)
            self._last_step = step
            self._metrics_file.mark(metrics_file.ROLLBACK, step)
            self._send("rewind", step)

    def event(self, kind: str, step: int, message: str, level: str = "info", **fields: Any) -> None:
        """Record what happened. Level "warn" and "error" are shown on the console, "error" also
        alerts in W&B.
        """
        event = Event(kind, step, message, level, fields)
        with self._lock:
            if self._is_closed:  # backends tell some while they close
                raise RuntimeError(f"Tracking.event called after finish (step {step})")
            self._events_file.write(event)
            # backends open once the resume step is known
            if level == "error" and self._has_started:
                self._send("alert", event)
        if level in LOG_LEVELS:
            logger.log(LOG_LEVELS[level], "step %d: %s", step, message)

    def health(self) -> dict[str, float]:
        """Metrics of the logging itself: calls that wait for a tracker, and trackers that were
        dropped.
        """
        depths = [sink.depth for sink in self._sinks]
        return {
            "obs/queue_depth": max(depths),
            "obs/dropped_trackers": sum(sink.is_dropped for sink in self._sinks),
        }

    def flush(self) -> None:
        """Make what was logged survive a crash of the machine soon, without waiting for it."""
        self._metrics_file.sync_soon()
        self._events_file.sync_soon()

    def finish(self, exit_code: int = EXIT_DONE) -> None:
        """Close all backends at once, waiting for each at most its `close_timeout_s`, then record
        the attempt's end.

        A second call does nothing.
        """
        with self._lock:
            if self._has_finished:
                return
            self._has_finished = True
        self._metrics_file.close()
        for sink in self._sinks:
            sink.finish(exit_code)
        for sink in self._sinks:
            sink.wait()
        if self._has_started or exit_code != EXIT_DONE:
            level = "info" if exit_code == EXIT_DONE else "warn"
            message = f"attempt {self.attempt} ended after step {self._last_step} with exit code {exit_code}"
            self._events_file.write(
                Event("end", self._last_step, message, level, {"exit_code": exit_code})
            )
        self._is_closed = True
        self._events_file.close()

    def state_dict(self) -> dict[str, Any]:
        """Names of the run and the ids under which trackers know it."""
        return self._info.identity | {"run_ids": self._info.run_file.as_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the tracker runs of a checkpoint where `run.json` names none.

        Ids of another project or experiment are left alone: a branched run is a run of its own. So
        are trackers that are open already: a rollback goes on in them.
        """
        if not self._has_started and self._info.identity.items() <= state_dict.items():
            self._info.run_file.adopt(state_dict["run_ids"])

    def _require_open(self, call: str, step: int) -> None:
        if self._has_finished:
            raise RuntimeError(f"Tracking.{call} called after finish (step {step})")

    def _send(self, call: str, *args: Any) -> None:
        for sink in self._sinks:
            sink.send(call, *args)


def _sink(name: str, spec: BackendSpec, info: RunInfo) -> Sink:
    backend = spec.build(info)
    if spec.is_continued:
        backend = Continued(backend, info, name=name)
    return Sink(backend, name=name, close_timeout_s=spec.close_timeout_s, is_inline=spec.inline)


def _local_dir(config: Mapping[str, Any]) -> str | None:
    """`trainer.default_local_dir` of a configuration, nested as verl's and ours or flat."""
    trainer = config.get("trainer")
    places = [trainer] if isinstance(trainer, Mapping) else []
    return next(
        (str(found) for place in (*places, config) if (found := place.get("default_local_dir"))),
        None,
    )


def with_environment(names: list[str]) -> list[str]:
    """The backends chosen, with or without "wandb" as USE_WANDB says."""
    wish = os.environ.get(USE_WANDB, "").lower()
    if wish not in ("", "true", "false"):
        raise ConfigError(f"{USE_WANDB} in the environment must be true or false, got '{wish}'")
    others = [name for name in names if name != "wandb"]
    return {"": names, "true": [*others, "wandb"], "false": others}[wish]


def _where_logs_are(info: RunInfo, specs: Mapping[str, BackendSpec]) -> str:
    files = (metrics_file.FILE_NAME, events_file.FILE_NAME, *FILE_NAMES.values())
    lines = [f"logs in {info.run_dir}: {', '.join(files)}"]
    lines += [
        f"  {name:<12} {spec.where(info)}" for name, spec in specs.items() if spec.where is not None
    ]
    return "\n".join(lines)


def require_installed(names: Sequence[str]) -> None:
    """The packages of all backends chosen are there, asked without importing them. Raises
    `ConfigError`.
    """
    for name in with_environment(list(names)):
        spec = _spec(name)
        for module in spec.modules:
            if importlib.util.find_spec(module.partition(".")[0]) is None:
                raise _cannot_import(name, spec, f"there is no module '{module}'")


def importable(name: str) -> BackendSpec:
    """The spec of a backend whose packages import; in the caller's thread, as imports from two
    threads can clash.
    """
    spec = _spec(name)
    for key, value in spec.environment.items():
        os.environ.setdefault(key, value)
    for module in spec.modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # a broken package raises anything
            raise _cannot_import(name, spec, f"{type(error).__name__}: {error}") from error
    return spec


def _spec(name: str) -> BackendSpec:
    if name not in BACKENDS:
        raise ConfigError(f"'trainer.logger' must be any of {', '.join(BACKENDS)}; got '{name}'")
    return BACKENDS[name]


def _cannot_import(name: str, spec: BackendSpec, reason: str) -> ConfigError:
    return ConfigError(
        f"'trainer.logger' has '{name}', but its package cannot be imported ({reason}): pip "
        f"install {spec.install}, or remove '{name}' from 'trainer.logger'"
    )
