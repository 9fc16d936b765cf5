"""Trackio, on this machine: the database of the project in TRACKIO_DIR, one run continued over all attempts."""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from trainer.tracking.backend import Backend, Held
from trainer.tracking.events_file import Event
from trainer.tracking.metrics_file import MetricsRow
from trainer.tracking.run_info import RunInfo

ROLLBACK = "trainer/rolled_back_to"
"""Of it and what it holds: what was logged before, of later steps, no longer counts."""


def where(info: RunInfo) -> str:
    return f"trackio show --project {info.project_name}"


class TrackioBackend(Backend):
    """What another attempt sent is taken from the database itself: a kill loses what Trackio had not written yet.

    After a rollback the steps repeated have two values: Trackio cannot take points back.
    """

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._run: Any = None
        self._held = Held({})

    def open(self) -> None:
        import trackio

        # Not trackio.init: that finds a run by its name, which runs of other directories may have too.
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
        self._held = Held(self._last_steps())
        for row in self._info.earlier_rows():
            self.log(row)

    def log(self, row: MetricsRow) -> None:
        if data := self._held.missing(row):
            self._run.log(data, step=row.step)

    def rewind(self, step: int) -> None:
        self._held.rewind(step)
        self._run.log({ROLLBACK: step}, step=step)

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, str | float]]) -> None:
        import trackio

        self._run.log({name: trackio.Table(data=[dict(row) for row in rows])}, step=step)

    def alert(self, event: Event) -> None:
        import trackio

        self._run.alert(event.kind, event.message, level=trackio.AlertLevel.ERROR, step=event.step)

    def close(self, exit_code: int) -> None:
        self._run.finish()

    def _last_steps(self) -> dict[str, int]:
        """{metric: its last step}, in the order in which they were written."""
        from trackio.sqlite_storage import SQLiteStorage

        path, last = SQLiteStorage.get_project_db_path(self._info.project_name), dict[str, int]()
        if path.exists():
            with closing(sqlite3.connect(path)) as connection:
                query = "SELECT step, metrics FROM metrics WHERE run_id = ? ORDER BY id"
                for step, text in connection.execute(query, (self._run.id,)):
                    row = json.loads(text)
                    if ROLLBACK in row:
                        last = {key: min(step, known) for key, known in last.items()}
                    last |= {key: max(step, last.get(key, step)) for key in row}
        return last
