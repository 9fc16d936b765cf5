"""MLflow: at MLFLOW_TRACKING_URI, or a database file in the run directory without one."""

import logging
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from trainer.errors import EXIT_DONE, EXIT_RESUMABLE
from trainer.runtime.json_lines import flat
from trainer.tracking.backend import Backend
from trainer.tracking.metrics_file import MetricsRow
from trainer.tracking.run_info import RunInfo

logger = logging.getLogger(__name__)

NAME_TAG = "metric_name/"
MAX_PARAM_CHARS = 6000
MAX_PARAMS_PER_CALL = 100
MAX_METRICS_PER_CALL = 1000


def where(info: RunInfo) -> str:
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return re.sub("//[^/]*@", "//", uri)  # without a password
    return f"mlflow ui --backend-store-uri {_store(info)}"


def _store(info: RunInfo) -> str:
    return (
        os.environ.get("MLFLOW_TRACKING_URI")
        or f"sqlite:///{(info.run_dir / 'mlflow').resolve()}/mlflow.db"
    )


class MetricNames:
    """Metric names as MLflow allows them (no brackets): `train/lr(1e-3)` becomes `train/lr_1e-3`.

    Reversible: a run tag `metric_name/<new>` holds the name each changed one stands for.
    """

    def __init__(self, tags: Mapping[str, str]) -> None:
        """`tags` are those of the run so far."""
        self._new_names = {
            name: tag.removeprefix(NAME_TAG)
            for tag, name in tags.items()
            if tag.startswith(NAME_TAG)
        }

    def convert(self, name: str) -> tuple[str, bool]:
        """The name to use, and whether it is a changed one seen for the first time."""
        if name in self._new_names:
            return self._new_names[name], False
        new = re.sub(r"[^\w./: -]+", "_", name).rstrip("_") or "_"
        while new in self._new_names.values():
            new += "_"
        self._new_names[name] = new
        return new, new != name


class MlflowBackend(Backend):
    """One run continued over all attempts; its status follows from the exit code, and is RUNNING
    after a kill.

    After a rollback the repeated steps have two values: MLflow cannot take points back.
    """

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._client: Any = None
        self._run_id = ""
        self._names = MetricNames({})

    def open(self) -> None:
        from mlflow.tracking import MlflowClient

        artifacts: str | None = None
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            directory = (self._info.run_dir / "mlflow").resolve()
            directory.mkdir(parents=True, exist_ok=True)
            artifacts = (directory / "artifacts").as_uri()
        # The model registry is not used; its default needs packages that mlflow-skinny lacks.
        self._client = MlflowClient(tracking_uri=_store(self._info))
        run = self._continued_run() or self._new_run(artifacts)
        self._run_id = run.info.run_id
        self._info.run_file.set("mlflow", self._run_id)
        self._names = MetricNames(run.data.tags)

    def log(self, row: MetricsRow) -> None:
        self.log_all([row])

    def log_all(self, rows: Iterable[MetricsRow]) -> None:
        """In as few calls as MLflow allows; a changed name is known before its first value."""
        from mlflow.entities import Metric, RunTag

        metrics: list[Metric] = []
        for row in rows:
            for key, value in row.data.items():
                name, is_first = self._names.convert(key)
                if is_first:
                    self._client.log_batch(self._run_id, tags=[RunTag(NAME_TAG + name, key)])
                metrics.append(Metric(name, value, round(row.ts * 1000), row.step))
                if len(metrics) == MAX_METRICS_PER_CALL:
                    self._client.log_batch(self._run_id, metrics=metrics)
                    metrics = []
        if metrics:
            self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, exit_code: int) -> None:
        status = {EXIT_DONE: "FINISHED", EXIT_RESUMABLE: "KILLED"}.get(exit_code, "FAILED")
        self._client.set_terminated(self._run_id, status=status)

    def _continued_run(self) -> Any | None:
        from mlflow.exceptions import MlflowException

        run_id = self._info.run_file.get("mlflow")
        if run_id is None:
            return None
        try:
            self._client.update_run(run_id, status="RUNNING")
            return self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            logger.warning(
                "mlflow does not know run %s of this directory (other tracking URI?): new run",
                run_id,
            )
            return None

    def _new_run(self, artifacts: str | None) -> Any:
        from mlflow.entities import Param

        name = self._info.project_name
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = (
            experiment.experiment_id
            if experiment
            else self._client.create_experiment(name, artifacts)
        )
        run = self._client.create_run(experiment_id, run_name=self._info.experiment_name)
        params = [
            Param(key, str(value)[:MAX_PARAM_CHARS])
            for key, value in flat(self._info.config).items()
        ]
        for start in range(0, len(params), MAX_PARAMS_PER_CALL):
            self._client.log_batch(
                run.info.run_id, params=params[start : start + MAX_PARAMS_PER_CALL]
            )
        return run
