"""Trackio, on this machine: the database of the project in TRACKIO_DIR, one run continued over
all attempts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.tracking.backend import Backend
from trainer.tracking.events_file import Event
from trainer.tracking.metrics_file import MetricsRow
from trainer.tracking.run_info import RunInfo


def where(info: RunInfo) -> str:
    return f"trackio show --project {info.project_name}"


class TrackioBackend(Backend):
    """After a rollback the repeated steps have two values: Trackio cannot take points back."""

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._run: Any = None

    def open(self) -> None:
        import huggingface_hub
        import trackio

        # The Hub's library reads the environment when it is imported, and transformers imports it
        # earlier.
        huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True
        # Not trackio.init: that finds a run by its name, which runs of other directories may have
        # too.
        self._run = trackio.Run(
            url=None,
            client=None,
            project=self._info.project_name,
            name=self._info.experiment_name,
            group=self._info.group,
            config=dict(self._info.config),
            run_id=self._info.run_file.get("trackio"),
        )
        self._info.run_file.set("trackio", self._run.id)

    def log(self, row: MetricsRow) -> None:
        self._run.log(dict(row.data), step=row.step)

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, str | float]]) -> None:
        import trackio

        self._run.log({name: trackio.Table(data=[dict(row) for row in rows])}, step=step)

    def alert(self, event: Event) -> None:
        import trackio

        self._run.alert(event.kind, event.message, level=trackio.AlertLevel.ERROR, step=event.step)

    def close(self, exit_code: int) -> None:
        self._run.finish()
