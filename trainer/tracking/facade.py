"""The one object the loop logs to: writes `metrics.jsonl` and hands each row to the chosen backends."""

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.protocols import Backend
from trainer.tracking.console_backend import ConsoleBackend
from trainer.tracking.csv_backend import CsvBackend
from trainer.tracking.metrics_file import FILE_NAME, MetricsFile, checked
from trainer.tracking.mlflow_backend import MlflowBackend
from trainer.tracking.run_info import RunIds, RunInfo
from trainer.tracking.sink import InlineSink, Sink, ThreadSink
from trainer.tracking.tensorboard_backend import TensorboardBackend
from trainer.tracking.wandb_backend import WandbBackend


@dataclass(frozen=True)
class BackendSpec:
    build: Callable[[RunInfo], Backend]
    close_timeout_s: float = 15.0
    inline: bool = False
    modules: tuple[str, ...] = ()
    """What it imports, and what to install for that."""
    install: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Defaults set before the import: no library reports on its users."""


BACKENDS: dict[str, BackendSpec] = {
    "console": BackendSpec(ConsoleBackend, inline=True),
    "csv": BackendSpec(CsvBackend),
    "tensorboard": BackendSpec(
        TensorboardBackend, modules=("torch.utils.tensorboard",), install="'fsdp-sft[tensorboard]'"
    ),
    "mlflow": BackendSpec(
        MlflowBackend,
        close_timeout_s=30.0,
        modules=("mlflow", "sqlalchemy", "alembic"),
        install="'fsdp-sft[mlflow]'",
        environment={"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "WARNING"},
    ),
    "wandb": BackendSpec(
        WandbBackend,
        close_timeout_s=60.0,
        modules=("wandb",),
        install="wandb",
        environment={"WANDB_ERROR_REPORTING": "false"},
    ),
}


class Tracking:
    """Metrics of one attempt of a run; rank 0 builds it, and its owner calls `finish` in a `finally`.

    `log` writes the row to `run_dir/metrics.jsonl` and queues it for the backends; these open with the first row.
    Raises `ConfigError` for an unknown backend or one whose package is missing, `CannotWriteError` when `metrics.jsonl`
    cannot be opened. After that no failure of a disk, a network or a tracker reaches the caller.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | Sequence[str],
        config: Mapping[str, Any],
        *,
        run_dir: Path,
        total_steps: int,
    ) -> None:
        names = [default_backend] if isinstance(default_backend, str) else list(dict.fromkeys(default_backend))
        specs = {name: _importable(name) for name in names}
        self._metrics_file = MetricsFile(run_dir / FILE_NAME)
        self._info = RunInfo(
            project_name=project_name,
            experiment_name=experiment_name,
            config=config,
            run_dir=run_dir,
            total_steps=total_steps,
            attempt=self._metrics_file.attempt,
            run_ids=RunIds(run_dir / "run.json"),
        )
        self._sinks = [_sink(name, spec, self._info) for name, spec in specs.items()]
        self._has_rows = False
        self._finished = False

    @property
    def attempt(self) -> int:
        """1 for the first start of a run that logged anything, one more for each later one."""
        return self._info.attempt

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Record the metrics of a step; a row with a `val/` key counts as validation. Values are plain int or float."""
        if self._finished:
            raise RuntimeError(f"Tracking.log called after finish (step {step})")
        numbers = checked(data)
        if not self._has_rows:
            self._has_rows = True
            self._info.resume_step = step - 1
        self._metrics_file.append(numbers, step)
        for sink in self._sinks:
            sink.log(numbers, step)

    def finish(self, exit_code: int) -> None:
        """Close all backends at once, waiting for each at most its `close_timeout_s`; a second call does nothing."""
        if self._finished:
            return
        self._finished = True
        self._metrics_file.close()
        for sink in self._sinks:
            sink.finish(exit_code)
        for sink in self._sinks:
            sink.wait()

    def state_dict(self) -> dict[str, Any]:
        """Names of the run and the ids under which trackers know it."""
        return self._identity() | {"run_ids": self._info.run_ids.as_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the tracker runs of a checkpoint where `run.json` names none; before the first row.

        Ids of another project or experiment are left alone: a branched run is a run of its own.
        """
        if self._has_rows:
            raise RuntimeError("Tracking.load_state_dict comes too late: the trackers opened with the first row")
        if self._identity().items() <= state_dict.items():
            self._info.run_ids.adopt(state_dict["run_ids"])

    def _identity(self) -> dict[str, str]:
        return {"project_name": self._info.project_name, "experiment_name": self._info.experiment_name}


def _importable(name: str) -> BackendSpec:
    """The spec of a backend whose packages import; in the caller's thread, as imports from two threads can clash."""
    if name not in BACKENDS:
        raise ConfigError(f"'trainer.logger' must be any of {', '.join(BACKENDS)}; got '{name}'")
    spec = BACKENDS[name]
    for key, value in spec.environment.items():
        os.environ.setdefault(key, value)
    for module in spec.modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # a broken package raises anything
            raise ConfigError(
                f"'trainer.logger' has '{name}', but its package cannot be imported ({type(error).__name__}: {error}): "
                f"pip install {spec.install}, or remove '{name}' from 'trainer.logger'"
            ) from error
    return spec


def _sink(name: str, spec: BackendSpec, info: RunInfo) -> Sink:
    backend = spec.build(info)
    if spec.inline:
        return InlineSink(backend, name=name)
    return ThreadSink(backend, name=name, close_timeout_s=spec.close_timeout_s)
