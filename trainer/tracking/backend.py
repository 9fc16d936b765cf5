"""The interface of trackers, and the queue between a tracker and training, which never waits."""

import logging
import queue
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from trainer.tracking.events_file import Event
from trainer.tracking.metrics_file import MetricsRow
from trainer.tracking.run_info import RunInfo

logger = logging.getLogger(__name__)
CAPACITY = 1024
"""Calls that may wait for a tracker."""
RECORD_INTERVAL_S = 10.0
"""How often the last step sent is recorded. After a kill in between, the next attempt sends some
steps twice.
"""


class Backend:
    """A tracker. Its methods are called from one thread; one that raises is dropped."""

    close_timeout_s: ClassVar[float] = 15.0
    is_inline: ClassVar[bool] = False
    """Calls run in the caller's thread: the console's order among other output matters."""
    modules: ClassVar[tuple[str, ...]] = ()
    """The modules it imports."""
    install: ClassVar[str] = ""
    """The arguments of pip that install them, as in pyproject.toml."""
    environment: ClassVar[Mapping[str, str]] = {}
    """Defaults set before the import: no library reports on its users."""

    def __init__(self, info: RunInfo, name: str) -> None:
        self.info, self.name = info, name

    def where(self) -> str:
        """Return how to look at it, for the start of a run."""
        return ""

    def open(self) -> None:
        """Prepare for the first row of the attempt."""

    def log(self, row: MetricsRow) -> None: ...

    def rewind(self, step: int) -> None:
        """Continue from finished step `step`: rows of later steps come again, with other values
        after a rollback.
        """

    def alert(self, event: Event) -> None:
        """Report an event of level error."""

    def close(self, exit_code: int) -> None: ...


class ContinuedBackend(Backend):
    """A tracker whose run continues over kills, restarts and rollbacks. It is sent what it lacks of
    earlier attempts, then the rows of this one.

    A killed attempt has sent more steps than its checkpoint holds. The next one repeats them, and
    they are not sent again. Trackers keep rows for a moment before they write them: what `run.json`
    records as sent was handed over at least `RECORD_INTERVAL_S` earlier, so a kill loses no row.
    """

    takes_back: ClassVar[bool] = False
    """`take_back` removes the rows of later steps from what the tracker shows."""
    _sent_before = 0
    """The last step that earlier attempts sent."""
    _newest = 0
    """The newest step sent."""
    _handed_over = 0
    """The last step that was complete at the last record."""
    _recorded_s = 0.0

    def connect(self) -> None:
        """Begin or continue the tracker's run."""
        raise NotImplementedError

    def send(self, rows: Iterable[MetricsRow]) -> None:
        raise NotImplementedError

    def take_back(self, step: int) -> None:
        """Remove the rows of steps after `step`, where the tracker can."""

    def disconnect(self, exit_code: int) -> None:
        raise NotImplementedError

    def open(self) -> None:
        self.connect()
        resume_step = self.info.resume_step
        sent = self.info.run_file.last_sent(self.name)
        if self.takes_back:
            # also what a killed attempt wrote without recording it: those rows are sent again
            sent = min(sent, resume_step)
            self.take_back(sent)
        self.send(row for row in self.info.earlier_rows() if row.step > sent)
        self._sent_before = sent
        self._newest = self._handed_over = max(sent, resume_step)
        self._recorded_s = time.monotonic()

    def log(self, row: MetricsRow) -> None:
        """Send a row, unless it repeats a step that an earlier attempt sent."""
        if self.info.resume_step < row.step <= self._sent_before:
            return
        self.send([row])
        self._newest = max(self._newest, row.step)
        if time.monotonic() - self._recorded_s >= RECORD_INTERVAL_S:
            self._record(self._handed_over)
            self._handed_over = max(self._handed_over, self._newest - 1)

    def rewind(self, step: int) -> None:
        self.take_back(step)
        self._sent_before = min(self._sent_before, step)
        self._newest = self._handed_over = min(self._newest, step)
        self._record(self._newest)

    def close(self, exit_code: int) -> None:
        self.disconnect(exit_code)
        self._record(self._newest)

    def _record(self, step: int) -> None:
        self.info.run_file.set_last_sent(self.name, step)
        self._recorded_s = time.monotonic()


class Sink:
    """Calls a backend in a daemon thread, from a bounded queue.

    The backend is dropped, once and for all and with one warning, when a call raises, when
    `CAPACITY` calls wait, or when it has not closed within its `close_timeout_s` of `finish`.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.is_dropped = False
        self._lock = threading.Lock()
        self._queue: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(CAPACITY)
        self._thread = threading.Thread(
            target=self._work, name=f"tracking-{backend.name}", daemon=True
        )
        self._call_name = ""
        self._is_open = False
        self._deadline_s = 0.0

    @property
    def depth(self) -> int:
        """The number of calls that wait."""
        return self._queue.qsize()

    def open(self) -> None:
        self._is_open = True
        if self.backend.is_inline:
            self._call("open")
        else:
            self._thread.start()

    def send(self, call: str, *args: Any) -> None:
        """Hand on a call. Never raises."""
        if not self._is_open or self.is_dropped:
            return
        if self.backend.is_inline:
            self._call(call, *args)
            return
        try:
            self._queue.put_nowait((call, args))
        except queue.Full:
            self._drop(f"{self._call_name}() hangs or is too slow, {CAPACITY} calls wait")

    def finish(self, exit_code: int) -> None:
        """Ask for the end; `wait` returns when it came or its time is over."""
        self._deadline_s = time.monotonic() + self.backend.close_timeout_s
        self.send("close", exit_code)

    def wait(self) -> None:
        if self._thread.ident is None or self.is_dropped:
            return
        self._thread.join(max(0.0, self._deadline_s - time.monotonic()))
        if self._thread.is_alive():
            limit_s = self.backend.close_timeout_s
            self._drop(f"{self._call_name}() did not finish within {limit_s:g} s")

    def _work(self) -> None:
        call = "open"
        self._call(call)
        while call != "close" and not self.is_dropped:
            call, args = self._queue.get()
            self._call(call, *args)

    def _call(self, call: str, *args: Any) -> None:
        self._call_name = call
        try:
            getattr(self.backend, call)(*args)
        except BaseException as error:  # a library may even raise SystemExit
            reason = (str(error).strip().splitlines() or ["no message"])[0]
            self._drop(f"{call}() raised {type(error).__name__}: {reason}")

    def _drop(self, cause: str) -> None:
        with self._lock:
            if self.is_dropped:
                return
            self.is_dropped = True
        logger.warning(
            "tracker '%s' dropped: %s; training goes on, metrics.jsonl has every row",
            self.backend.name,
            cause,
        )
