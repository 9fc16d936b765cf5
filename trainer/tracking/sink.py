"""What stands between training and a backend: training hands rows over and never waits, fails or hears of it again."""

import logging
import queue
import threading
import time
from typing import Any, Protocol

from trainer.tracking.backend import Backend

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Hands calls on to a backend, after `open`.

    `send` never raises; `finish` asks for the end, `wait` returns when it came or its time is over.
    """

    @property
    def depth(self) -> int:
        """Calls that wait."""
        ...

    @property
    def is_dropped(self) -> bool: ...

    def open(self) -> None: ...

    def send(self, call: str, *args: Any) -> None: ...

    def finish(self, exit_code: int) -> None: ...

    def wait(self) -> None: ...


class Breaker:
    """Drops a backend once and for all, with exactly one warning."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self.tripped = False

    def trip(self, cause: str) -> None:
        with self._lock:
            if self.tripped:
                return
            self.tripped = True
        logger.warning("tracker '%s' dropped: %s; training goes on, metrics.jsonl has every row", self._name, cause)

    def trip_on(self, call: str, error: BaseException) -> None:
        reason = (str(error).strip().splitlines() or ["no message"])[0]
        self.trip(f"{call}() raised {type(error).__name__}: {reason}")


class InlineSink:
    """Calls the backend in the caller's thread: for the console, whose order among other output matters."""

    def __init__(self, backend: Backend, *, name: str) -> None:
        self._backend = backend
        self._breaker = Breaker(name)
        self._opened = False

    @property
    def depth(self) -> int:
        return 0

    @property
    def is_dropped(self) -> bool:
        return self._breaker.tripped

    def open(self) -> None:
        self._opened = True
        self._call("open")

    def send(self, call: str, *args: Any) -> None:
        self._call(call, *args)

    def finish(self, exit_code: int) -> None:
        if self._opened:
            self._call("close", exit_code)

    def wait(self) -> None:
        return

    def _call(self, call: str, *args: Any) -> None:
        if self._breaker.tripped:
            return
        try:
            getattr(self._backend, call)(*args)
        except Exception as error:
            self._breaker.trip_on(call, error)


class ThreadSink:
    """Calls the backend in a daemon thread behind a bounded queue; the thread starts with `open`.

    The backend is dropped when a call raises, when one lasts longer than `stall_timeout_s`, when `capacity` calls wait,
    or when it has not closed within `close_timeout_s` of `finish`.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        name: str,
        close_timeout_s: float,
        capacity: int = 1024,
        stall_timeout_s: float = 300.0,
    ) -> None:
        self._backend = backend
        self._breaker = Breaker(name)
        self._close_timeout_s = close_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._queue: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._work, name=f"tracking-{name}", daemon=True)
        self._call_name, self._call_began_s = "", float("inf")
        self._deadline_s = 0.0

    @property
    def depth(self) -> int:
        return self._queue.qsize()

    @property
    def is_dropped(self) -> bool:
        return self._breaker.tripped

    def open(self) -> None:
        self._thread.start()

    def send(self, call: str, *args: Any) -> None:
        if time.monotonic() - self._call_began_s > self._stall_timeout_s:
            self._breaker.trip(f"{self._call_name}() has not returned for {self._stall_timeout_s:g} s")
        self._put(call, *args)

    def finish(self, exit_code: int) -> None:
        self._deadline_s = time.monotonic() + self._close_timeout_s
        if self._thread.ident is not None:
            self._put("close", exit_code)

    def wait(self) -> None:
        if self._thread.ident is None or self._breaker.tripped:
            return
        self._thread.join(max(0.0, self._deadline_s - time.monotonic()))
        if self._thread.is_alive():
            self._breaker.trip(f"{self._call_name or 'close'}() did not finish within {self._close_timeout_s:g} s")

    def _put(self, call: str, *args: Any) -> None:
        if self._breaker.tripped:
            return
        try:
            self._queue.put_nowait((call, args))
        except queue.Full:
            self._breaker.trip(f"{self._call_name}() hangs or is too slow, {self._queue.maxsize} calls wait")

    def _work(self) -> None:
        call, args = "open", ()
        try:
            self._call(call)
            while call != "close" and not self._breaker.tripped:
                call, args = self._queue.get()
                self._call(call, *args)
        except BaseException as error:  # a library may even raise SystemExit; nothing leaves this thread
            self._breaker.trip_on(self._call_name, error)

    def _call(self, call: str, *args: Any) -> None:
        self._call_name, self._call_began_s = call, time.monotonic()
        getattr(self._backend, call)(*args)
        self._call_began_s = float("inf")
