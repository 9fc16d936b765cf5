"""The interface of trackers, and the queue that keeps training from waiting for a tracker."""

import logging
import queue
import threading
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from trainer.tracking.events_file import Event
from trainer.tracking.metrics_file import MetricsRow
from trainer.tracking.run_info import NOTHING_SENT, RunInfo

logger = logging.getLogger(__name__)
CAPACITY = 1024
"""The number of calls that may wait in a tracker's queue."""
RECORD_INTERVAL_S = 10.0
"""Seconds between records of the last step sent. If the run is killed between two records, the next
attempt sends some steps twice.
"""


class Backend:
    """A tracker. All methods are called from one thread. A tracker whose method raises is
    dropped.
    """

    close_timeout_s: ClassVar[float] = 15.0
    is_inline: ClassVar[bool] = False
    """True if calls run in the caller's thread. The console needs this to keep its lines in order.
    """
    modules: ClassVar[tuple[str, ...]] = ()
    """The modules that the backend imports."""
    install: ClassVar[str] = ""
    """The arguments for `pip install`, as in pyproject.toml."""
    environment: ClassVar[Mapping[str, str]] = {}
    """Environment variables to set before the import unless they are set already. They keep the
    libraries from sending usage reports.
    """

    def __init__(self, info: RunInfo, name: str) -> None:
        self.info = info
        self.name = name

    def where(self) -> str:
        """Return a hint on how to view the tracker. The run prints it at its start."""
        return ""

    def open(self) -> None:
        """Prepare for the first row of the attempt."""

    def log(self, row: MetricsRow) -> None: ...

    def rewind(self, step: int) -> None:
        """Continue from the finished step `step`. Rows of later steps will follow again, with
        different values after a rollback.
        """

    def alert(self, event: Event) -> None:
        """Report an event with level "error"."""

    def close(self, exit_code: int) -> None: ...


class ContinuedBackend(Backend):
    """A tracker whose run continues across kills, restarts and rollbacks.

    It first receives the rows of earlier attempts that it lacks, then the rows of this attempt. A
    killed attempt has sent rows of steps that come after its last checkpoint. The next attempt
    repeats these steps, and the same rows are not sent again. Trackers buffer rows briefly.
    Therefore `run.json` records a step as sent only `RECORD_INTERVAL_S` after it was sent, so that
    a kill loses no row.
    """

    _run_id: str
    _is_empty = False
    """True if `connect` finds no row in the run that it continues."""
    _repeated: set[tuple[int, str]]
    """Step and kind of the rows that earlier attempts sent and this attempt repeats."""
    _newest: int
    """The newest step sent."""
    _handed_over: int
    """The last step that was complete at the last record. The next record writes it."""
    _recorded_s: float

    def connect(self, run_id: str | None) -> str:
        """Continue the tracker's run with this id, or begin a new run. Return the run's id."""
        raise NotImplementedError

    def send(self, row: MetricsRow) -> None:
        raise NotImplementedError

    def take_back(self, step: int) -> bool:
        """Remove the rows of steps after `step`. Return False if the tracker cannot remove rows."""
        return False

    def disconnect(self, exit_code: int) -> None:
        raise NotImplementedError

    def open(self) -> None:
        """Connect, and send the rows of earlier attempts that the tracker lacks.

        1. Read the last step that the tracker certainly has. A new or emptied run has none.
        2. If the tracker can, remove the rows after that step or after the step from which this
           attempt continues, whichever is earlier.
        3. Send the rows of earlier attempts that are missing now.
        4. Note the rows that the tracker keeps although this attempt repeats their steps.
        """
        run_id, sent = self.info.run_file.tracker(self.name)
        self._run_id = self.connect(run_id)
        if self._is_empty and sent > NOTHING_SENT:
            logger.warning(
                "tracker '%s' has lost the rows of its run %s, to which earlier attempts sent the "
                "steps up to %d; this attempt resends every earlier step",
                self.name,
                run_id,
                sent,
            )
        if self._is_empty or self._run_id != run_id:
            sent = NOTHING_SENT
        resume_step = self.info.resume_step
        if self.take_back(min(sent, resume_step)):
            # this also removed rows that a killed attempt sent but did not record: send them again
            sent = min(sent, resume_step)
        self._record(sent)
        for row in self.info.earlier_rows():
            if row.step > sent:
                self.send(row)
        self._repeated = self.info.repeated_rows(sent)
        self._newest = self._handed_over = max(sent, resume_step)

    def log(self, row: MetricsRow) -> None:
        """Send a row, unless it repeats one that an earlier attempt sent."""
        if (row.step, row.kind) in self._repeated:
            return
        self.send(row)
        self._newest = max(self._newest, row.step)
        if time.monotonic() - self._recorded_s >= RECORD_INTERVAL_S:
            self._record(self._handed_over)
            # the newest step is not complete yet: the row of its validation may follow
            self._handed_over = max(self._handed_over, self._newest - 1)

    def rewind(self, step: int) -> None:
        self.take_back(step)
        self._repeated = {place for place in self._repeated if place[0] <= step}
        self._newest = self._handed_over = min(self._newest, step)
        self._record(self._newest)

    def close(self, exit_code: int) -> None:
        self.disconnect(exit_code)
        self._record(self._newest)

    def _record(self, step: int) -> None:
        self.info.run_file.set_tracker(self.name, self._run_id, step)
        self._recorded_s = time.monotonic()


class Sink:
    """Passes calls to a backend through a bounded queue and a daemon thread.

    The backend is dropped for good, with one warning, if a call raises, if `CAPACITY` calls are
    waiting, or if it has not closed within `close_timeout_s` after `finish`.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._is_open = False
        """True from `open` until the backend is dropped."""
        self._queue: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(CAPACITY)
        self._thread = threading.Thread(
            target=self._work,
            name=f"tracking-{backend.name}",
            daemon=True,
        )
        self._call_name = ""
        self._deadline_s = 0.0
        """The time at which the backend must have closed; 0 while the run trains."""

    def open(self) -> None:
        self._is_open = True
        if not self.backend.is_inline:
            self._thread.start()
        self.send("open")

    def send(self, call: str, *args: Any) -> None:
        """Pass a call on to the backend if it is open. Never raises."""
        if not self._is_open:
            return
        if self.backend.is_inline:
            self._call(call, *args)
            return
        try:
            self._queue.put_nowait((call, args))
        except queue.Full:
            self._drop(f"{self._call_name}() hangs or is too slow: {CAPACITY} calls are waiting")

    def finish(self, exit_code: int) -> None:
        """Ask the backend to close. `wait` returns when it has closed or its time is up."""
        self._deadline_s = time.monotonic() + self.backend.close_timeout_s
        self.send("close", exit_code)

    def wait(self) -> None:
        if self.backend.is_inline or not self._is_open:
            return
        self._thread.join(max(0.0, self._deadline_s - time.monotonic()))
        if self._thread.is_alive():
            limit_s = self.backend.close_timeout_s
            self._drop(f"{self._call_name}() did not finish within {limit_s:g} s")

    def _work(self) -> None:
        call = ""
        while call != "close" and self._is_open:
            call, args = self._queue.get()
            self._call(call, *args)

    def _call(self, call: str, *args: Any) -> None:
        self._call_name = call
        try:
            getattr(self.backend, call)(*args)
        except BaseException as error:  # a library may even raise SystemExit
            reason = " ".join(str(error).split())[:300] or "no message"
            self._drop(f"{call}() raised {type(error).__name__}: {reason}")

    def _drop(self, cause: str) -> None:
        if not self._is_open:
            return
        self._is_open = False
        logger.warning(
            "tracker '%s' dropped: %s; %smetrics.jsonl does not depend on it",
            self.backend.name,
            cause,
            "" if self._deadline_s else "training continues, and ",
        )
