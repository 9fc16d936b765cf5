"""The process that keeps the mirror of a run: started before its ranks, waited for after them
(floor 5, no torch).
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

from trainer.checkpoint.layout import STAGING_PREFIX, read_pointer
from trainer.config import Config
from trainer.errors import EXIT_CRASH, EXIT_RESUMABLE
from trainer.launch.ranks import NodeLayout
from trainer.mirror import STATE
from trainer.runtime.environment import call
from trainer.runtime.json_lines import read_object
from trainer.runtime.processes import begun, name_signal
from trainer.runtime.signals import REPEAT_S, heeded_signals

POLL_S, PEERS_POLL_S, SAID_AFTER_S = 0.2, 1.0, 3.0
RESTART_AFTER_S = (10.0, 60.0, 300.0)
"""The last one again and again."""


@contextmanager
def mirrored(config: Config, layout: NodeLayout) -> Iterator[int | None]:
    """Where there is a mirror, keep it during the block, and wait for what was saved last at its
    end: on the first machine. The others wait for it to have taken what the run continues from.

    The block is given the exit code if the run must not begin: then it does nothing.
    """
    if config.trainer.checkpoint.mirror is None or layout.node_rank > 0:
        yield None if config.trainer.checkpoint.mirror is None else _first_missing(config, layout)
        return
    uploads = _Uploads(config)
    try:
        yield (code := uploads.begin())
        uploads.end()
        if code is None and not _ends_within(uploads.process, config):
            say_behind(config)
    finally:
        uploads.kill()


class _Uploads:
    """The process, and a thread that starts it again where something ends it before the run does:
    the kernel, when memory runs out. Nobody else would notice until a machine is lost.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._lock, self._is_ending = threading.Lock(), threading.Event()
        self._keeper: Future[None] | None = None
        self._start()

    def _start(self) -> None:
        self._ready, told = os.pipe()
        command = [sys.executable, "-m", "trainer.mirror", str(os.getpid()), str(told)]
        env = {**os.environ, "PYTHONSAFEPATH": "1"}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            text=True,
            env=env,
            pass_fds=[told],
            start_new_session=True,
        )
        os.close(told)
        with suppress(BrokenPipeError):
            print(json.dumps(self._config.resolved), file=self.process.stdin, flush=True)

    def begin(self) -> int | None:
        """What `_refusal` says; it is kept from here on."""
        code = _refusal(self.process, self._ready)
        if code is None:
            self._keeper = begun(self._keep)
        elif (self.process.returncode or 0) < 0:
            print(f"ERROR: {self._how_it_ended()}; continue with the same command", file=sys.stderr)
        return code

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
        """Ends after what it starts, which would be killed with this thread (`die_with_parent`)."""
        for again_after_s in itertools.chain(
            RESTART_AFTER_S, itertools.repeat(RESTART_AFTER_S[-1])
        ):
            self.process.wait()
            if self._is_ending.is_set():
                return
            print(
                f"WARNING: {self._how_it_ended()}: started again in {again_after_s:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            self._is_ending.wait(again_after_s)
            with self._lock:
                if self._is_ending.is_set():
                    return
                os.close(self._ready)
                self._start()


def say_behind(config: Config) -> None:
    command = call(f"checkpoint mirror {config.trainer.default_local_dir}")
    said = f"{config.trainer.checkpoint.mirror} does not hold what was saved last: {command} brings it up"
    print(f"WARNING: {said}, or a start that trains on", file=sys.stderr, flush=True)


def is_up(config: Config) -> bool:
    """Whether what the run ends with is in its mirror, as the last upload left it; so without
    one. Asks no network.
    """
    run_dir, url = Path(config.trainer.default_local_dir), config.trainer.checkpoint.mirror
    state = read_object(run_dir / STATE)
    is_whole = state.get("url") == (url or "").rstrip("/") and not state.get("failed")
    found = state.get("steps")
    steps = found if isinstance(found, list) else []
    return url is None or (
        is_whole and read_pointer(run_dir).step in (state.get("pointer"), *steps)
    )


def _first_missing(config: Config, layout: NodeLayout) -> int | None:
    """Wait for the first machine, at most `dist_timeout_s` beyond what was last seen to arrive from
    the mirror in the run directory, which all machines share; the exit code if it does not come.
    """
    arrived, seen_at, timeout_s = (0, 0), time.monotonic(), config.trainer.dist_timeout_s
    while not _listens(layout):
        if _is_signalled():
            return EXIT_RESUMABLE
        before, arrived = arrived, _arrived(Path(config.trainer.default_local_dir))
        if arrived != before:
            seen_at = time.monotonic()
        elif time.monotonic() - seen_at > timeout_s:
            where = f"{layout.master_addr}:{layout.master_port}"
            print(
                f"ERROR: the machines did not meet: for {timeout_s} s nobody listened at {where}, "
                f"and nothing arrived from {config.trainer.checkpoint.mirror}; start the same "
                f"command on each",
                file=sys.stderr,
            )
            return EXIT_RESUMABLE
        time.sleep(PEERS_POLL_S)
    return None


def _listens(layout: NodeLayout) -> bool:
    with (
        suppress(OSError),
        socket.create_connection((layout.master_addr, layout.master_port), timeout=PEERS_POLL_S),
    ):
        return True
    return False


def _arrived(run_dir: Path) -> tuple[int, int]:
    """Files and bytes of what is in the making."""
    sizes = []
    for path in run_dir.glob(f"{STAGING_PREFIX}*/**/*"):
        with suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return len(sizes), sum(sizes)


def _refusal(process: subprocess.Popen, ready: int) -> int | None:
    """Wait until the run may begin; its exit code if it must not, or is not wanted any more."""
    while not select.select([ready], [], [], POLL_S)[0]:
        if _is_signalled():
            return EXIT_RESUMABLE
    if os.read(ready, 1):
        return None
    code = process.wait()
    return code if code > 0 else EXIT_CRASH


def _ends_within(process: subprocess.Popen, config: Config) -> bool:
    """Whether all is up before a save would be given up, and before another signal."""
    started, is_said, timeout_s = time.monotonic(), False, config.trainer.checkpoint.save_timeout_s
    while process.poll() is None:
        waited_s = time.monotonic() - started
        if waited_s > SAID_AFTER_S and not is_said:
            is_said = True
            print(
                f"waiting for {config.trainer.checkpoint.mirror}; a signal leaves at once",
                flush=True,
            )
        if waited_s > timeout_s or (_is_signalled() and waited_s > REPEAT_S):
            return False
        time.sleep(POLL_S)
    return process.returncode == 0


def _is_signalled() -> bool:
    """Whether somebody asked to stop; the launcher keeps its signals blocked."""
    return signal.sigtimedwait(heeded_signals(), 0) is not None
