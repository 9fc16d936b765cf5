"""Stop signals, and the rank's side of the launcher's protocol.

A rank writes two things into its launcher's status (`trainer/runtime/status.py`): its pid, so that
signals reach it directly, and the exit code of the run, because torchrun reports every failure as
1.
"""

import contextlib
import faulthandler
import gc
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from trainer.errors import EXIT_DONE, EXIT_RESUMABLE
from trainer.runtime.environment import local_rank
from trainer.runtime.log import say
from trainer.runtime.processes import die_with_parent, is_alive
from trainer.runtime.status import Beat, Status, ask_launcher, launcher_status

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
AGENT_PID = "SFT_AGENT_PID"
REPEAT_S = 2.0
"""Signals closer together than this count as one request, because schedulers and terminals send
duplicates.
"""
HANDLED_WITHIN_S = 0.5
"""Within this time, a main thread that runs Python code handles a signal."""
PEER_GONE_S = 1.0
"""A killed process closes its connections a little before it counts as gone."""


def heeded_signals() -> frozenset[signal.Signals]:
    """Return the signals that ask this process to stop. Under `nohup`, this excludes SIGHUP."""
    is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return frozenset(STOP_SIGNALS) - ({signal.SIGHUP} if is_nohup else set())


def become_worker(parent_pid: int, *, code: int) -> None:
    """Tie the life of this forked process to its parent: ignore stop signals, and die with the
    parent.

    A worker that waits for room in its pipe would never notice that its parent is gone.
    """
    die_with_parent(parent_pid, code=code)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class StopRequest:
    """Remembers that someone asked the run to stop.

    Inside `deferred()` a signal only sets the flag, and the loop saves at its next step boundary.
    Outside it there is nothing to save, and the process ends at once. A second, later signal always
    ends the process at once.
    """

    def __init__(self, *, max_time_s: float = math.inf) -> None:
        """After `max_time_s` the request is set without a signal."""
        self.signal_name: str | None = None
        self._first_at = 0.0
        self._is_deferred = False
        self._ends_at = time.monotonic() + max_time_s

    def install(self) -> None:
        for number in heeded_signals():
            signal.signal(number, self._handle)
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(
            target=self._stand_in,
            args=(reader,),
            name="signals",
            daemon=True,
        ).start()

    @property
    def is_set(self) -> bool:
        return self.signal_name is not None or time.monotonic() >= self._ends_at

    @property
    def reason(self) -> str | None:
        """The signal or key that requested the stop; None if another rank received the request."""
        return self.signal_name or ("trainer.max_time" if self.is_set else None)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_first = self.signal_name is None
        if not is_first and now - self._first_at < REPEAT_S:
            return
        if not (is_first and self._is_deferred):
            _leave_unsaved(number)
        self.signal_name = signal.Signals(number).name
        self._first_at = now

    def _stand_in(self, reader: int) -> None:
        """End the process in place of a main thread that is inside C code, for example in a wait
        for other ranks, and therefore runs no handler.
        """
        while numbers := os.read(reader, 1):
            if numbers[0] not in STOP_SIGNALS:
                continue  # torch handles SIGCHLD to notice loader workers that end
            time.sleep(HANDLED_WITHIN_S)
            if self.signal_name is None and not self._is_deferred:
                _leave_unsaved(numbers[0])


def _leave_unsaved(number: int) -> NoReturn:
    if report_exit_code(EXIT_RESUMABLE):
        name = signal.Signals(number).name
        say(f"stopped by {name}; run the same command to continue from the last checkpoint\n")
    os._exit(EXIT_RESUMABLE)


def join_launcher() -> None:
    """Die with the parent process, so that no rank outlives its job.

    From now on SIGUSR2 writes the stacks of all threads for the launcher. The handler is C code
    that does not wait for the interpreter. A fault in native code prints its stacks on stderr.
    """
    faulthandler.enable()
    if (status := launcher_status()) is None:
        return
    die_with_parent(int(os.environ.get(AGENT_PID, os.getppid())), code=EXIT_RESUMABLE)
    stacks = status.open_rank(local_rank())
    faulthandler.register(
        signal.SIGUSR2,
        file=stacks,
        all_threads=True,
        chain=False,
    )


def lost_ranks() -> list[int]:
    """Return the ranks of this machine whose process is gone or ends within `PEER_GONE_S`."""
    beats = ask_launcher(Status.beats, otherwise=dict[int, Beat]())
    deadline = time.monotonic() + PEER_GONE_S
    while True:
        lost = [rank for rank, beat in beats.items() if not is_alive(beat.pid)]
        if lost or not beats or time.monotonic() > deadline:
            return lost
        time.sleep(0.02)


def report_exit_code(code: int) -> bool:
    """Report to the launcher how the run ended. Return True for the first rank of its machine.

    The first rank to fail is the cause. Later ranks do not overwrite its code and need not print
    their errors.
    """
    return ask_launcher(lambda status: status.report(code), otherwise=True)


def reported_exit_code() -> int | None:
    """Return the exit code of the first rank of this machine to fail; None if none has failed."""
    return ask_launcher(Status.exit_code, otherwise=None)


def leave(code: int) -> None:
    """End this process with the run's exit code.

    Under the launcher, an orderly end on which all ranks agree exits with 0, because torchrun
    treats any other code as a crash.
    """
    report_exit_code(code)
    sys.stdout.flush()
    sys.stderr.flush()
    # else the interpreter spends a second on freeing objects one by one
    gc.freeze()
    is_orderly = code in (EXIT_DONE, EXIT_RESUMABLE) and launcher_status() is not None
    sys.exit(EXIT_DONE if is_orderly else code)
