"""Runs the two processes of a run's mirror. One prepares the mirror before the ranks start; the
other uploads while they train.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.checkpoint.layout import SAVE_TIMEOUT_S, STAGING_PREFIX, read_pointer
from trainer.cli.listing import mirror_of
from trainer.config import Config
from trainer.errors import EXIT_CRASH, EXIT_RESUMABLE
from trainer.launch.ranks import NodeLayout
from trainer.runtime.environment import call
from trainer.runtime.files import tree_bytes
from trainer.runtime.processes import begun, name_signal
from trainer.runtime.signals import REPEAT_S, heeded_signals

POLL_S = 0.1
PEERS_POLL_S = 1.0
RESTART_AFTER_S = 60.0
"""Pause before the upload process is restarted."""


@contextmanager
def mirrored(config: Config, layout: NodeLayout) -> Iterator[int | None]:
    """Upload to the mirror, if there is one, during the block, and wait for the last upload at its
    end.

    Only the first machine uploads. The others wait until it has restored a checkpoint. Yields an
    exit code if the run must not start, else None.
    """
    url = config.trainer.checkpoint.mirror
    if url is None:
        yield None
        return
    prepare = _prepare if layout.node_rank == 0 else _await_first_machine
    code = prepare(config, layout)
    if code is not None or layout.node_rank > 0:
        yield code
        return
    uploads = _Uploads(config)
    try:
        yield None
        if not uploads.end():
            _warn_that_it_lags(config)
    finally:
        uploads.kill()


def warn_if_behind(config: Config) -> None:
    """Warn if the last upload of a finished run failed. Does not contact the storage."""
    run_dir = Path(config.trainer.default_local_dir)
    steps = mirror_of(run_dir).get("steps")
    has_last = isinstance(steps, list) and read_pointer(run_dir).step in steps
    if config.trainer.checkpoint.mirror is not None and not has_last:
        _warn_that_it_lags(config)


def _warn_that_it_lags(config: Config) -> None:
    trainer = config.trainer
    _say(
        f"WARNING: {trainer.checkpoint.mirror} lacks the latest checkpoints.\n"
        f"Fix: run `{call(f'mirror {trainer.default_local_dir}')}`"
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _started(task: str, config: Config) -> subprocess.Popen[str]:
    """Start `trainer.tools.mirror` for `task`. The process dies with the thread that started it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer.tools.mirror", str(os.getpid()), task],
        stdin=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        start_new_session=True,
    )
    with suppress(BrokenPipeError):
        print(json.dumps(config.resolved), file=process.stdin, flush=True)
    return process


def _how_it_ended(code: int, config: Config) -> str:
    why = f"was killed by {name_signal(-code)}" if code < 0 else f"ended with exit code {code}"
    return f"the process that uploads to {config.trainer.checkpoint.mirror} {why}"


def _prepare(config: Config, layout: NodeLayout) -> int | None:
    """Prepare the mirror and the run directory. Return an exit code if the run must not start."""
    process = _started("prepare", config)
    try:
        while (code := process.poll()) is None:
            if _is_signalled():
                return EXIT_RESUMABLE
            time.sleep(POLL_S)
    finally:
        process.kill()
        process.communicate()
    if code >= 0:
        return code or None
    _say(f"ERROR: {_how_it_ended(code, config)}.\nFix: start the same command again")
    return EXIT_CRASH


class _Uploads:
    """The process that uploads, and a thread that restarts it if it ends before the run.

    The kernel may kill it when memory runs out. Without a restart, nobody would notice until a
    machine is lost.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._is_ending = threading.Event()
        self._process = _started("follow", config)
        self._keeper = begun(self._keep)

    def _keep(self) -> None:
        """Restart the process whenever it ends. This thread must outlive the process that it
        started, because the process dies with it.
        """
        while True:
            code = self._process.wait()
            if self._is_ending.is_set():
                return
            _say(
                f"WARNING: {_how_it_ended(code, self._config)}; restart in {RESTART_AFTER_S:.0f} s"
            )
            self._is_ending.wait(RESTART_AFTER_S)
            with self._lock:
                if self._is_ending.is_set():
                    return
                self._process = _started("follow", self._config)

    def end(self) -> bool:
        """Wait for the last upload. Return False if it failed, took longer than a save may, or a
        signal arrived.
        """
        with self._lock:
            self._is_ending.set()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        url = self._config.trainer.checkpoint.mirror
        started = time.monotonic()
        print(f"mirror: waiting for uploads to {url}; a stop signal ends the wait", flush=True)
        while self._process.poll() is None:
            waited_s = time.monotonic() - started
            if waited_s > SAVE_TIMEOUT_S or (_is_signalled() and waited_s > REPEAT_S):
                return False
            time.sleep(POLL_S)
        return self._process.returncode == 0

    def kill(self) -> None:
        with self._lock:
            self._is_ending.set()
        self._process.kill()
        self._keeper.result()


def _await_first_machine(config: Config, layout: NodeLayout) -> int | None:
    """Wait until the first machine listens. Return an exit code if it does not start to.

    The wait ends `dist_timeout_s` seconds after the last byte arrived in the shared run directory.
    """
    run_dir = Path(config.trainer.default_local_dir)
    timeout_s = config.trainer.dist_timeout_s
    arrived_bytes = 0
    seen_at = time.monotonic()
    while not _listens(layout):
        if _is_signalled():
            return EXIT_RESUMABLE
        before = arrived_bytes
        arrived_bytes = sum(map(tree_bytes, run_dir.glob(f"{STAGING_PREFIX}*")))
        if arrived_bytes != before:
            seen_at = time.monotonic()
        elif time.monotonic() - seen_at > timeout_s:
            _say(
                f"ERROR: within {timeout_s} s, the first machine did not listen at "
                f"{layout.master_addr}:{layout.master_port}, and nothing arrived from "
                f"{config.trainer.checkpoint.mirror}.\nFix: start the same command on each machine"
            )
            return EXIT_RESUMABLE
        time.sleep(PEERS_POLL_S)
    return None


def _listens(layout: NodeLayout) -> bool:
    """Return True if the first machine's agent accepts connections. It starts after the restore."""
    address = layout.master_addr, layout.master_port
    with suppress(OSError), socket.create_connection(address, timeout=PEERS_POLL_S):
        return True
    return False


def _is_signalled() -> bool:
    """Return True if a stop signal has arrived. The launcher keeps these signals blocked."""
    return signal.sigtimedwait(heeded_signals(), 0) is not None
