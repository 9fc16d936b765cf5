"""MLflow: at MLFLOW_TRACKING_URI, or a database file in the run directory without one."""

import logging
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from trainer.errors import EXIT_DONE, EXIT_RESUMABLE
from trainer.runtime.json_lines import flat
from trainer.tracking.backend import Backend
from trainer.tracking.metrics_file import MetricsRow

logger = logging.getLogger(__name__)

MAX_PARAM_CHARS = 6000
MAX_PARAMS_PER_CALL = 100
MAX_METRICS_PER_CALL = 1000


def metric_name(key: str) -> str:
    """Return the key as MLflow allows it, without brackets: `train/lr(1e-3)` -> `train/lr_1e-3`."""
    return re.sub(r"[^\w./: -]+", "_", key).rstrip("_")


class MlflowBackend(Backend):
    """One run continued over all attempts; its status follows from the exit code, and is RUNNING
    after a kill.

    After a rollback the repeated steps have two values: MLflow cannot take points back.
    """

    close_timeout_s = 30.0
    is_continued = True
    modules = ("mlflow", "sqlalchemy", "alembic")
    install = "'mlflow-skinny>=3.17' 'sqlalchemy>=2' 'alembic>=1.13'"
    environment: ClassVar[Mapping[str, str]] = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_LOGGING_LEVEL": "WARNING",
    }
    _client: Any = None
    _run_id = ""

    def where(self) -> str:
        if uri := os.environ.get("MLFLOW_TRACKING_URI"):
            return "mlflow at " + re.sub("//[^/]*@", "//", uri)  # without a password
        return f"mlflow ui --backend-store-uri {self._store}"

    def open(self) -> None:
        from mlflow.tracking import MlflowClient

        if not os.environ.get("MLFLOW_TRACKING_URI"):
            (self.info.run_dir / "mlflow").mkdir(parents=True, exist_ok=True)
        # The model registry is not used; its default needs packages that mlflow-skinny lacks.
        self._client = MlflowClient(tracking_uri=self._store)
        self._run_id = self._continued_run() or self._new_run()
        self.info.run_file.set("mlflow", self._run_id)

    def log(self, row: MetricsRow) -> None:
        self.log_all([row])

    def log_all(self, rows: Iterable[MetricsRow]) -> None:
        """Send rows in as few calls as MLflow allows."""
        from mlflow.entities import Metric

        batch: list[Metric] = []
        for row in rows:
            for key, value in row.data.items():
                batch.append(Metric(metric_name(key), value, round(row.ts * 1000), row.step))
            if len(batch) + len(row.data) > MAX_METRICS_PER_CALL:
                self._send(batch)
                batch = []
        self._send(batch)

    def close(self, exit_code: int) -> None:
        status = {EXIT_DONE: "FINISHED", EXIT_RESUMABLE: "KILLED"}.get(exit_code, "FAILED")
        self._client.set_terminated(self._run_id, status=status)

    @property
    def _store(self) -> str:
        own = f"sqlite:///{(self.info.run_dir / 'mlflow').resolve()}/mlflow.db"
        return os.environ.get("MLFLOW_TRACKING_URI") or own

    def _send(self, batch: list[Any]) -> None:
        for start in range(0, len(batch), MAX_METRICS_PER_CALL):
            metrics = batch[start : start + MAX_METRICS_PER_CALL]
            self._client.log_batch(self._run_id, metrics=metrics)

    def _continued_run(self) -> str | None:
        from mlflow.exceptions import MlflowException

        run_id = self.info.run_file.get("mlflow")
        if run_id is None:
            return None
        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            logger.warning(
                "mlflow does not know run %s of this directory (other tracking URI?): new run",
                run_id,
            )
            return None
        return run_id

    def _new_run(self) -> str:
        from mlflow.entities import Param

        name, artifacts = self.info.project_name, None
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            artifacts = (self.info.run_dir / "mlflow/artifacts").resolve().as_uri()
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = (
            experiment.experiment_id
            if experiment
            else self._client.create_experiment(name, artifacts)
        )
        run = self._client.create_run(experiment_id, run_name=self.info.experiment_name)
        params = [
            Param(key, str(value)[:MAX_PARAM_CHARS])
            for key, value in flat(self.info.config).items()
        ]
        for start in range(0, len(params), MAX_PARAMS_PER_CALL):
            part = params[start : start + MAX_PARAMS_PER_CALL]
            self._client.log_batch(run.info.run_id, params=part)
        return str(run.info.run_id)
