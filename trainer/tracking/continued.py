"""Continue a tracker run over kills, restarts and rollbacks, from the last step that `run.json`
records as sent.
"""

import time

from trainer.tracking.backend import Backend
from trainer.tracking.events_file import Event
from trainer.tracking.metrics_file import MetricsRow

RECORD_INTERVAL_S = 10.0
"""How often the last step sent is recorded. After a kill in between, the next attempt sends some
steps twice.
"""


class Continued(Backend):
    """Sends a tracker what it lacks of earlier attempts, then the rows of this one.

    A killed attempt has sent more steps than its checkpoint holds. The next one repeats them, and
    they are not sent again. Trackers keep rows for a moment before they write them: what is
    recorded as sent was handed over at least `RECORD_INTERVAL_S` earlier, so a kill loses no row.
    """

    def __init__(self, backend: Backend, *, name: str) -> None:
        super().__init__(backend.info)
        self._backend, self._name = backend, name
        self.close_timeout_s = backend.close_timeout_s  # type: ignore[misc]
        self._sent_before = 0
        """The last step that earlier attempts sent."""
        self._newest = self._handed_over = 0
        """The newest step sent, and the last one that was complete at the last record."""
        self._recorded_s = 0.0

    def where(self) -> str:
        return self._backend.where()

    def open(self) -> None:
        """Open the tracker and send it the rows of earlier attempts that it lacks."""
        self._backend.open()
        resume_step = self.info.resume_step
        sent = self.info.run_file.last_sent(self._name)
        if self._backend.takes_back:
            # also what a killed attempt wrote without recording it: those rows are sent again
            sent = min(sent, resume_step)
            self._backend.rewind(sent)
        self._sent_before = sent
        self._newest = self._handed_over = sent
        self._backend.log_all(row for row in self.info.earlier_rows() if row.step > sent)
        self._newest = self._handed_over = max(sent, resume_step)
        self._recorded_s = time.monotonic()

    def log(self, row: MetricsRow) -> None:
        """Send a row, unless it repeats a step that an earlier attempt sent."""
        if self.info.resume_step < row.step <= self._sent_before:
            return
        self._backend.log(row)
        self._newest = max(self._newest, row.step)
        if time.monotonic() - self._recorded_s >= RECORD_INTERVAL_S:
            self._record(self._handed_over)
            self._handed_over = max(self._handed_over, self._newest - 1)

    def rewind(self, step: int) -> None:
        self._backend.rewind(step)
        self._sent_before = min(self._sent_before, step)
        self._newest = self._handed_over = min(self._newest, step)
        self._record(self._newest)

    def alert(self, event: Event) -> None:
        self._backend.alert(event)

    def close(self, exit_code: int) -> None:
        self._backend.close(exit_code)
        self._record(self._newest)

    def _record(self, step: int) -> None:
        self.info.run_file.set_last_sent(self._name, step)
        self._recorded_s = time.monotonic()
