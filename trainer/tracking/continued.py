"""A tracker run that goes on over kills, restarts and rollbacks, from the last step that
`run.json` says it has.
"""

import time
from collections.abc import Mapping, Sequence

from trainer.tracking.backend import Backend
from trainer.tracking.events_file import Event
from trainer.tracking.metrics_file import MetricsRow
from trainer.tracking.run_info import RunInfo

RECORD_INTERVAL_S = 10.0
"""How often the last step sent is recorded. A kill in between makes the next attempt send some
steps twice.
"""


class Continued(Backend):
    """Sends a tracker what it lacks of earlier attempts, then the rows of this one.

    A killed attempt has sent more steps than its checkpoint holds. The next one repeats them, and
    they are not sent again. Trackers keep rows for a moment before they write them: what is
    recorded as sent is what was handed over at least `RECORD_INTERVAL_S` earlier, so a kill loses
    no row.
    """

    def __init__(self, backend: Backend, info: RunInfo, *, name: str) -> None:
        self._backend, self._info, self._name = backend, info, name
        self._sent_before = self._newest = self._complete = self._settled = info.resume_step
        self._recorded_s = time.monotonic()

    def open(self) -> None:
        """Open the tracker and send it the rows of earlier attempts that it lacks.

        A run whose last step was never recorded has everything up to where this attempt goes on: it
        is known by an id of a checkpoint alone.
        """
        self._backend.open()
        resume_step = self._info.resume_step
        recorded = self._info.run_file.last_sent(self._name)
        self._sent_before = resume_step if recorded is None else recorded
        if self._backend.takes_back:
            self._sent_before = min(self._sent_before, resume_step)
        self._set_all(self._sent_before)
        self._backend.log_all(
            row for row in self._info.earlier_rows() if row.step > self._sent_before
        )
        self._set_all(max(self._sent_before, resume_step))
        self._recorded_s = time.monotonic()

    def log(self, row: MetricsRow) -> None:
        """Send a row, unless it repeats a step that an earlier attempt sent."""
        if self._info.resume_step < row.step <= self._sent_before:
            return
        self._backend.log(row)
        if row.step > self._newest:
            self._complete, self._newest = self._newest, row.step
        if time.monotonic() - self._recorded_s >= RECORD_INTERVAL_S:
            self._record()

    def rewind(self, step: int) -> None:
        self._backend.rewind(step)
        self._sent_before = min(self._sent_before, step)
        self._set_all(min(self._newest, step))
        self._record()

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, str | float]]) -> None:
        self._backend.table(name, step, rows)

    def alert(self, event: Event) -> None:
        self._backend.alert(event)

    def close(self, exit_code: int) -> None:
        self._backend.close(exit_code)
        self._set_all(self._newest)
        self._record()

    def _set_all(self, step: int) -> None:
        self._newest = self._complete = self._settled = step

    def _record(self) -> None:
        """Record what was complete at the last call, and what is complete now for the next."""
        self._info.run_file.set_last_sent(self._name, self._settled)
        self._settled = self._complete
        self._recorded_s = time.monotonic()
