"""Logs to Trackio on this machine, in the project's database in TRACKIO_DIR."""

from collections.abc import Mapping
from typing import Any, ClassVar

from trainer.tracking.backend import ContinuedBackend
from trainer.tracking.metrics_file import MetricsRow


class TrackioBackend(ContinuedBackend):
    """All attempts form one Trackio run. After a rollback, the repeated steps have two values,
    because Trackio cannot remove points.
    """

    close_timeout_s = 35.0  # Trackio waits up to 30 s for its own thread
    modules = ("trackio",)
    install = "'trackio>=0.43'"
    environment: ClassVar[Mapping[str, str]] = {
        "TRACKIO_STORAGE_MODE": "sqlite",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    _run: Any = None

    def where(self) -> str:
        return f"trackio show --project {self.info.project_name}"

    def connect(self, run_id: str | None) -> str:
        import huggingface_hub
        import trackio

        # huggingface_hub reads the environment only when it is imported, and transformers has
        # imported it already.
        huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True
        if run_id is not None:
            # A mirror does not restore the database, which is outside the run directory.
            storage = trackio.sqlite_storage.SQLiteStorage
            last_step = storage.get_max_step_for_run(self.info.project_name, run_id=run_id)
            self._is_empty = last_step is None
        # trackio.init would find a run by its name, which runs in other directories may share.
        self._run = trackio.Run(
            url=None,
            client=None,
            project=self.info.project_name,
            name=self.info.experiment_name,
            group=self.info.group,
            config=dict(self.info.config),
            run_id=run_id,
        )
        return str(self._run.id)

    def send(self, row: MetricsRow) -> None:
        self._run.log(dict(row.data), step=row.step)

    def disconnect(self, exit_code: int) -> None:
        self._run.finish()
