"""The process that keeps the mirror of a run: started before the ranks, awaited after them (floor
5, no torch).
"""

import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.checkpoint.layout import SAVE_TIMEOUT_S, STAGING_PREFIX
from trainer.config import Config
from trainer.errors import EXIT_CRASH, EXIT_RESUMABLE
from trainer.launch.ranks import NodeLayout
from trainer.runtime.environment import call
from trainer.runtime.files import tree_bytes
from trainer.runtime.processes import begun, name_signal
from trainer.runtime.signals import REPEAT_S, heeded_signals

POLL_S, PEERS_POLL_S, SAID_AFTER_S = 0.2, 1.0, 3.0
RESTART_AFTER_S = (10.0, 60.0, 300.0)
"""Pauses before the process is started again; the last one repeats."""


@contextmanager
def mirrored(config: Config, layout: NodeLayout) -> Iterator[int | None]:
    """Keep the mirror, if there is one, during the block, and wait at its end for the last upload.

    The first machine does so; the others wait until it has restored a checkpoint. The block gets an
    exit code if the run must not begin.
    """
    if config.trainer.checkpoint.mirror is None:
        yield None
        return
    if layout.node_rank > 0:
        yield _await_first_machine(config, layout)
        return
    uploads = _Uploads(config)
    try:
        yield (code := uploads.begin())
        uploads.end()
        if code is None and not _ends_in_time(uploads.process, config):
            command = call(f"mirror {config.trainer.default_local_dir}")
            print(
                f"WARNING: {config.trainer.checkpoint.mirror} does not hold what was saved last: "
                f"{command} brings it up, or a start that trains on",
                file=sys.stderr,
                flush=True,
            )
    finally:
        uploads.kill()


class _Uploads:
    """The process, and a thread that starts it again if it ends before the run.

    The kernel may kill it when memory runs out; nobody would notice until a machine is lost.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._lock, self._is_ending = threading.Lock(), threading.Event()
        self._keeper: Future[None] | None = None
        self._start()

    def _start(self) -> None:
        self._ready, told = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trainer.mirror", str(os.getpid()), str(told)],
            stdin=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            pass_fds=[told],
            start_new_session=True,
        )
        os.close(told)
        with suppress(BrokenPipeError):
            print(json.dumps(self._config.resolved), file=self.process.stdin, flush=True)

    def begin(self) -> int | None:
        """Wait until the run may begin; return its exit code if it must not."""
        while not select.select([self._ready], [], [], POLL_S)[0]:
            if _is_signalled():
                return EXIT_RESUMABLE
        if os.read(self._ready, 1):
            self._keeper = begun(self._keep)
            return None
        code = self.process.wait()
        if code < 0:
            print(f"ERROR: {self._how_it_ended()}; continue with the same command", file=sys.stderr)
        return code if code > 0 else EXIT_CRASH

    def end(self) -> None:
        """Have it upload what is still to come, and leave."""
        with self._lock:
            self._is_ending.set()
            assert self.process.stdin is not None
            with suppress(BrokenPipeError):
                self.process.stdin.close()

    def kill(self) -> None:
        with self._lock:
            self._is_ending.set()
        self.process.kill()
        self.process.wait()
        if self._keeper is not None:
            self._keeper.result()
        os.close(self._ready)

    def _how_it_ended(self) -> str:
        code = self.process.wait()
        why = f"was killed by {name_signal(-code)}" if code < 0 else f"left with exit code {code}"
        return f"the process that uploads to {self._config.trainer.checkpoint.mirror} {why}"

    def _keep(self) -> None:
        """Start the process again. This thread outlives it: it dies with the thread."""
        pauses_s = itertools.chain(RESTART_AFTER_S, itertools.repeat(RESTART_AFTER_S[-1]))
        for pause_s in pauses_s:
            self.process.wait()
            if self._is_ending.is_set():
                return
            print(
                f"WARNING: {self._how_it_ended()}: started again in {pause_s:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            self._is_ending.wait(pause_s)
            with self._lock:
                if self._is_ending.is_set():
                    return
                os.close(self._ready)
                self._start()


def _await_first_machine(config: Config, layout: NodeLayout) -> int | None:
    """Wait until the first machine listens; return an exit code if it does not come.

    Its time is up `dist_timeout_s` after the last byte that arrived in the shared run directory.
    """
    run_dir, timeout_s = Path(config.trainer.default_local_dir), config.trainer.dist_timeout_s
    arrived_bytes, seen_at = 0, time.monotonic()
    while not _listens(layout):
        if _is_signalled():
            return EXIT_RESUMABLE
        before, arrived_bytes = (
            arrived_bytes,
            sum(map(tree_bytes, run_dir.glob(f"{STAGING_PREFIX}*"))),
        )
        if arrived_bytes != before:
            seen_at = time.monotonic()
        elif time.monotonic() - seen_at > timeout_s:
            print(
                f"ERROR: the machines did not meet: for {timeout_s} s nobody listened at "
                f"{layout.master_addr}:{layout.master_port}, and nothing arrived from "
                f"{config.trainer.checkpoint.mirror}.\nFix: start the same command on each",
                file=sys.stderr,
            )
            return EXIT_RESUMABLE
        time.sleep(PEERS_POLL_S)
    return None


def _listens(layout: NodeLayout) -> bool:
    address = layout.master_addr, layout.master_port
    with suppress(OSError), socket.create_connection(address, timeout=PEERS_POLL_S):
        return True
    return False


def _ends_in_time(process: subprocess.Popen, config: Config) -> bool:
    """Return True if everything is up before a save would time out, and before another signal."""
    started, is_said = time.monotonic(), False
    while process.poll() is None:
        waited_s = time.monotonic() - started
        if waited_s > SAID_AFTER_S and not is_said:
            is_said = True
            print(
                f"waiting for {config.trainer.checkpoint.mirror}; a signal leaves at once",
                flush=True,
            )
        if waited_s > SAVE_TIMEOUT_S or (_is_signalled() and waited_s > REPEAT_S):
            return False
        time.sleep(POLL_S)
    return process.returncode == 0


def _is_signalled() -> bool:
    """Return True if somebody asked to stop; the launcher keeps its signals blocked."""
    return signal.sigtimedwait(heeded_signals(), 0) is not None
