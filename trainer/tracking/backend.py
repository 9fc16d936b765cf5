"""What a tracker offers, and what stands between it and training, which never waits."""

import logging
import queue
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from trainer.tracking.events_file import Event
from trainer.tracking.metrics_file import MetricsRow


class Backend(Protocol):
    """A place rows are sent to. Called from one thread; may raise: the facade then drops it."""

    takes_back: ClassVar[bool] = False
    """Whether `open` and `rewind` remove the rows of later steps from what the tracker shows."""

    def open(self) -> None:
        """Before the first row of the attempt."""

    def log(self, row: MetricsRow) -> None: ...

    def log_all(self, rows: Iterable[MetricsRow]) -> None:
        """Send rows of earlier attempts."""
        for row in rows:
            self.log(row)

    def rewind(self, step: int) -> None:
        """The run went back to finished step `step`: rows of later steps come again with other
        values.
        """
        return

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, str | float]]) -> None:
        """Rows of equal columns; where a tracker has no tables nothing is shown."""
        return

    def alert(self, event: Event) -> None:
        """An event of level error."""
        return

    def close(self, exit_code: int) -> None: ...


logger = logging.getLogger(__name__)


class Sink:
    """Hands calls on to a backend: in a daemon thread behind a bounded queue, which starts with
    `open`.

    The backend is dropped, once and for all and with one warning, when a call raises, when one
    lasts longer than `stall_timeout_s`, when `capacity` calls wait, or when it has not closed
    within `close_timeout_s` of `finish`. `is_inline` calls it in the caller's thread instead: for
    the console, whose order among other output matters.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        name: str,
        close_timeout_s: float,
        is_inline: bool = False,
        capacity: int = 1024,
        stall_timeout_s: float = 300.0,
    ) -> None:
        self.is_dropped = False
        self._backend, self._name = backend, name
        self._close_timeout_s, self._stall_timeout_s = close_timeout_s, stall_timeout_s
        self._is_inline, self._is_open = is_inline, False
        self._lock = threading.Lock()
        self._queue: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._work, name=f"tracking-{name}", daemon=True)
        self._call_name, self._call_began_s = "", float("inf")
        self._deadline_s = 0.0

    @property
    def depth(self) -> int:
        """Calls that wait."""
        return self._queue.qsize()

    def open(self) -> None:
        self._is_open = True
        if self._is_inline:
            self._hand_on("open")
        else:
            self._thread.start()

    def send(self, call: str, *args: Any) -> None:
        """Never raises."""
        if time.monotonic() - self._call_began_s > self._stall_timeout_s:
            self._drop(f"{self._call_name}() has not returned for {self._stall_timeout_s:g} s")
        self._hand_on(call, *args)

    def finish(self, exit_code: int) -> None:
        """Ask for the end; `wait` returns when it came or its time is over."""
        self._deadline_s = time.monotonic() + self._close_timeout_s
        if self._is_open:
            self._hand_on("close", exit_code)

    def wait(self) -> None:
        if not self._is_open or self._is_inline or self.is_dropped:
            return
        self._thread.join(max(0.0, self._deadline_s - time.monotonic()))
        if self._thread.is_alive():
            self._drop(
                f"{self._call_name or 'close'}() did not finish within {self._close_timeout_s:g} s"
            )

    def _hand_on(self, call: str, *args: Any) -> None:
        if self.is_dropped:
            return
        try:
            if self._is_inline:
                self._call(call, *args)
            else:
                self._queue.put_nowait((call, args))
        except queue.Full:
            self._drop(
                f"{self._call_name}() hangs or is too slow, {self._queue.maxsize} calls wait"
            )
        except Exception as error:
            self._drop_for(error)

    def _work(self) -> None:
        call, args = "open", ()
        try:
            self._call(call)
            while call != "close" and not self.is_dropped:
                call, args = self._queue.get()
                self._call(call, *args)
        # a library may even raise SystemExit; nothing leaves this thread
        except BaseException as error:
            self._drop_for(error)

    def _call(self, call: str, *args: Any) -> None:
        self._call_name, self._call_began_s = call, time.monotonic()
        getattr(self._backend, call)(*args)
        self._call_began_s = float("inf")

    def _drop_for(self, error: BaseException) -> None:
        reason = (str(error).strip().splitlines() or ["no message"])[0]
        self._drop(f"{self._call_name}() raised {type(error).__name__}: {reason}")

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
