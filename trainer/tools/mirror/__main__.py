"""The processes that maintain a run's mirror. The launcher starts them.

`python -m trainer.tools.mirror LAUNCHER_PID TASK` reads the configuration from the first line of
its input. The task `prepare` prepares the mirror and the run directory. The task `follow` uploads
checkpoints until its input ends, then uploads the final checkpoints. Both processes die with the
launcher.
"""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path

from trainer.checkpoint.layout import SAVE_TIMEOUT_S
from trainer.checkpoint.storage import SilentError, Storage
from trainer.config import TrainerConfig, parse_recorded
from trainer.errors import EXIT_CRASH, EXIT_DONE
from trainer.runtime import log
from trainer.runtime.exit_codes import DOCUMENTED, code_of
from trainer.runtime.processes import begun
from trainer.runtime.signals import become_worker
from trainer.tools.mirror.restore import prepare, unreachable
from trainer.tools.mirror.upload import Uploader
from trainer.tracking.events_file import FILE_NAME, Event, EventsFile, read_events

POLL_S = 1.0
RETRY_AFTER_S = 60.0
"""Seconds to wait after a failure while the run trains."""
LAST_RETRY_AFTER_S = (1.0, 5.0)
"""Seconds to wait between attempts at the end of the run."""

logger = logging.getLogger("trainer.tools.mirror")


def main(argv: list[str]) -> int:
    become_worker(int(argv[0]), code=EXIT_CRASH)
    log.configure(0)
    trainer = parse_recorded(json.loads(sys.stdin.readline())).trainer
    assert trainer.checkpoint.mirror is not None, "else nothing starts this"
    try:
        storage = Storage(trainer.checkpoint.mirror)
        if argv[1] == "prepare":
            prepare_in_time(trainer, storage)
            return EXIT_DONE
    except tuple(DOCUMENTED) as error:
        logger.error("%s", error)
        return code_of(error)
    ending = threading.Event()

    def await_end() -> None:
        sys.stdin.read()
        ending.set()

    begun(await_end)
    return follow(trainer, storage, ending)


def prepare_in_time(trainer: TrainerConfig, storage: Storage) -> None:
    """Run `prepare`, and raise the same errors. A silent storage counts as unreachable."""
    try:
        _answered(lambda: prepare(trainer, storage), storage, limit_s=trainer.dist_timeout_s)
    except SilentError as error:
        unreachable(trainer, error)


def follow(trainer: TrainerConfig, storage: Storage, ending: threading.Event) -> int:
    """Upload until `ending` is set and everything is uploaded, or until the last attempt fails.

    Returns the exit code. If the storage stops responding, the process exits, because a library
    call cannot be interrupted in any other way. The launcher then starts the process again.
    """

    def record(event: Event) -> None:
        if not ending.is_set():  # the last event of a run must be its end
            _record(trainer, event)

    uploader = Uploader(trainer, storage, record=record)
    is_failing = False
    last_pauses_s = list(LAST_RETRY_AFTER_S)
    while True:
        is_last = ending.is_set()
        try:
            if uploader.is_behind:
                _answered(uploader.sync, storage, limit_s=SAVE_TIMEOUT_S)
        except Exception as error:  # a library may raise anything; the run continues
            if not is_failing:
                logger.warning("cannot update the mirror (training continues): %s", error)
                record(Event("mirror_failed", 0, str(error), "warn"))
            is_failing = True
            if isinstance(error, SilentError) or (is_last and not last_pauses_s):
                return EXIT_CRASH
            if is_last:
                time.sleep(last_pauses_s.pop(0))
            else:
                ending.wait(RETRY_AFTER_S)
            continue
        if is_failing:
            logger.info("%s: up to date again", storage.url)
            is_failing = False
        if is_last:
            return EXIT_DONE
        ending.wait(POLL_S)


def _answered(work: Callable[[], None], storage: Storage, *, limit_s: float) -> None:
    """Do the work. Raises `SilentError` if the storage does not respond for `limit_s`."""
    storage.answered_at = time.monotonic()
    done = begun(work)
    while not wait([done], timeout=POLL_S).done:
        if time.monotonic() - storage.answered_at > limit_s:
            raise SilentError(f"{storage.url} has not responded for {limit_s:.0f} s")
    done.result()


def _record(trainer: TrainerConfig, event: Event) -> None:
    """Add an event to the run's current attempt, if the run has begun an attempt."""
    path = Path(trainer.default_local_dir, FILE_NAME)
    if events := read_events(path):
        file = EventsFile(path, attempt=events[-1]["attempt"], is_guest=True)
        file.write(event)
        file.close()


if __name__ == "__main__":
    log.keep_streams_safe(reports_loss=False)
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread that waits for a storage must not delay the exit
