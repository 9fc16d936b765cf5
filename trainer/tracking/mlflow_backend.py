"""Logs to MLflow: to the server at MLFLOW_TRACKING_URI, or to a database in the run directory."""

import logging
import os
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from trainer.errors import EXIT_DONE, EXIT_RESUMABLE
from trainer.runtime.json_lines import flat
from trainer.tracking.backend import ContinuedBackend
from trainer.tracking.metrics_file import MetricsRow

logger = logging.getLogger(__name__)

MAX_PARAM_CHARS = 6000
MAX_PARAMS_PER_CALL = 100


def metric_name(key: str) -> str:
    """Replace the characters that MLflow forbids in a key: `train/lr(1e-3)` -> `train/lr_1e-3`."""
    return re.sub(r"[^\w./: -]+", "_", key).rstrip("_")


class MlflowBackend(ContinuedBackend):
    """All attempts form one MLflow run.

    The exit code determines the run's status, which stays RUNNING if the attempt was killed. After
    a rollback, the repeated steps have two values, because MLflow cannot remove points.
    """

    close_timeout_s = 30.0
    modules = ("mlflow", "sqlalchemy", "alembic")
    install = "'mlflow-skinny>=3.17' 'sqlalchemy>=2' 'alembic>=1.13'"
    environment: ClassVar[Mapping[str, str]] = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_LOGGING_LEVEL": "WARNING",
    }
    _client: Any = None

    def where(self) -> str:
        if uri := os.environ.get("MLFLOW_TRACKING_URI"):
            return "mlflow at " + re.sub("//[^/]*@", "//", uri)  # hides a password
        return f"mlflow ui --backend-store-uri {self._own_store}"

    def connect(self, run_id: str | None) -> str:
        from mlflow.tracking import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        artifacts = None
        if not uri:
            directory = (self.info.run_dir / "mlflow").resolve()
            directory.mkdir(parents=True, exist_ok=True)
            artifacts = (directory / "artifacts").as_uri()
        # The model registry is not used. Its default needs packages that mlflow-skinny lacks.
        self._client = MlflowClient(tracking_uri=uri or self._own_store)
        if run_id is None or not self._continue(run_id):
            run_id = self._new_run(artifacts)
        return run_id

    def send(self, row: MetricsRow) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(metric_name(key), value, round(row.ts * 1000), row.step)
            for key, value in row.data.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def disconnect(self, exit_code: int) -> None:
        status = {EXIT_DONE: "FINISHED", EXIT_RESUMABLE: "KILLED"}.get(exit_code, "FAILED")
        self._client.set_terminated(self._run_id, status=status)

    @property
    def _own_store(self) -> str:
        return f"sqlite:///{(self.info.run_dir / 'mlflow').resolve()}/mlflow.db"

    def _continue(self, run_id: str) -> bool:
        """Set the run to RUNNING again; return False if the server does not know the run."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            logger.warning("MLflow has no run %s; a new run begins", run_id)
            return False
        return True

    def _new_run(self, artifacts: str | None) -> str:
        from mlflow.entities import Param

        name = self.info.project_name
        if experiment := self._client.get_experiment_by_name(name):
            experiment_id = experiment.experiment_id
        else:
            experiment_id = self._client.create_experiment(name, artifacts)
        run = self._client.create_run(experiment_id, run_name=self.info.experiment_name)
        config = flat(self.info.config).items()
        params = [Param(key, str(value)[:MAX_PARAM_CHARS]) for key, value in config]
        for start in range(0, len(params), MAX_PARAMS_PER_CALL):
            batch = params[start : start + MAX_PARAMS_PER_CALL]
            self._client.log_batch(run.info.run_id, params=batch)
        return str(run.info.run_id)
