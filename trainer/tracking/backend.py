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


class Backend:
    """A tracker. Its methods are called from one thread; one that raises is dropped."""

    close_timeout_s: ClassVar[float] = 15.0
    is_inline: ClassVar[bool] = False
    """Called in the caller's thread: for the console, whose order among other output matters."""
    is_continued: ClassVar[bool] = False
    """A restart continues the same tracker run, which is sent only what it lacks."""
    takes_back: ClassVar[bool] = False
    """`rewind` removes the rows of later steps from what the tracker shows."""
    modules: ClassVar[tuple[str, ...]] = ()
    """The modules it imports."""
    install: ClassVar[str] = ""
    """The arguments of pip that install them, as in pyproject.toml."""
    environment: ClassVar[Mapping[str, str]] = {}
    """Defaults set before the import: no library reports on its users."""

    def __init__(self, info: RunInfo) -> None:
        self.info = info

    def where(self) -> str:
        """Return how to look at it, for the start of a run."""
        return ""

    def open(self) -> None:
        """Called before the first row of the attempt."""

    def log(self, row: MetricsRow) -> None: ...

    def log_all(self, rows: Iterable[MetricsRow]) -> None:
        """Send rows of earlier attempts."""
        for row in rows:
            self.log(row)

    def rewind(self, step: int) -> None:
        """The run continues from finished step `step`: rows of later steps come again, with other
        values after a rollback.
        """

    def alert(self, event: Event) -> None:
        """An event of level error happened."""

    def close(self, exit_code: int) -> None: ...


class Sink:
    """Calls a backend in a daemon thread, from a bounded queue.

    The backend is dropped, once and for all and with one warning, when a call raises, when
    `CAPACITY` calls wait, or when it has not closed within its `close_timeout_s` of `finish`.
    """

    def __init__(self, backend: Backend, *, name: str) -> None:
        self.is_dropped = False
        self.backend, self._name = backend, name
        self._lock = threading.Lock()
        self._queue: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(CAPACITY)
        self._thread = threading.Thread(target=self._work, name=f"tracking-{name}", daemon=True)
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
            self._call("open", ())
        else:
            self._thread.start()

    def send(self, call: str, *args: Any) -> None:
        """Hand on a call. Never raises."""
        if not self._is_open or self.is_dropped:
            return
        if self.backend.is_inline:
            self._call(call, args)
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
        call, args = "open", ()
        self._call(call, args)
        while call != "close" and not self.is_dropped:
            call, args = self._queue.get()
            self._call(call, args)

    def _call(self, call: str, args: tuple[Any, ...]) -> None:
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
            self._name,
            cause,
        )
