"""The process beside the ranks of a run that keeps its mirror; `launch` starts it (floor 3, no
torch).

`python -m trainer.mirror LAUNCHER_PID READY_FD`. It reads the configuration from the first line of
its input, prepares, writes a byte to READY_FD, and uploads what is saved until its input ends: then
what is still to come, and leaves. It dies with the launcher.
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

from trainer.config import TrainerConfig, parse_config
from trainer.errors import EXIT_CRASH, EXIT_DONE
from trainer.mirror.hub import storage_of, uploader_of
from trainer.mirror.restore import prepare, unreachable
from trainer.mirror.storage import SilentError, Storage
from trainer.runtime import log
from trainer.runtime.exit_codes import DOCUMENTED
from trainer.runtime.processes import begun
from trainer.runtime.signals import become_worker
from trainer.tracking.events_file import FILE_NAME, Event, EventsFile, read_events

POLL_S = 1.0
RETRY_AFTER_S = (10.0, 60.0, 300.0)
LAST_RETRY_AFTER_S = (1.0, 5.0)

logger = logging.getLogger("trainer.mirror")


def main(argv: list[str]) -> int:
    become_worker(int(argv[0]), code=EXIT_CRASH)
    log.configure(0)
    trainer = parse_config(json.loads(sys.stdin.readline())).trainer
    assert trainer.checkpoint.mirror is not None, "else nothing starts this"
    try:
        storage = _prepared(trainer, storage_of(trainer.checkpoint.mirror))
    except tuple(DOCUMENTED) as error:
        logger.error("%s", error)
        return next(code for kind, code in DOCUMENTED.items() if isinstance(error, kind))
    os.write(int(argv[1]), b"1")
    ending = threading.Event()
    threading.Thread(target=_await_end, args=(ending,), daemon=True).start()
    return follow(trainer, storage, ending)


def _prepared(trainer: TrainerConfig, storage: Storage) -> Storage:
    """What to go on with. Raises what `prepare` does."""
    try:
        _answered(lambda: prepare(trainer, storage), storage, limit_s=trainer.dist_timeout_s)
        return storage
    except SilentError as error:
        unreachable(trainer, error)
        return storage.given_up()


def _await_end(ending: threading.Event) -> None:
    sys.stdin.read()
    ending.set()


def follow(trainer: TrainerConfig, storage: Storage, ending: threading.Event) -> int:
    """Upload until `ending` is set and all is up, or fails again and again."""

    def tell(step: int, size_bytes: int, duration_s: float) -> None:
        if not ending.is_set():
            fields = {"size_bytes": size_bytes, "duration_s": round(duration_s, 3)}
            _record(
                trainer, Event("mirror", step, f"step {step} is in {storage.url}", fields=fields)
            )

    uploader, num_failed, num_last = uploader_of(trainer, storage, tell=tell), 0, 0
    while True:
        is_last = ending.is_set()
        try:
            if uploader.is_behind:
                _answered(uploader.sync, storage, limit_s=trainer.checkpoint.save_timeout_s)
            if num_failed:
                logger.info("%s: up to date again", storage.url)
            num_failed = 0
            if is_last:
                return EXIT_DONE
            ending.wait(POLL_S)
        except Exception as error:  # whatever a library of a storage raises, the run goes on
            if num_failed == 0:
                logger.warning("the mirror waits, training does not: %s", error)
                if not is_last:
                    _record(trainer, Event("mirror_failed", 0, str(error), "warn"))
            num_failed += 1
            if isinstance(error, SilentError):
                storage = storage.given_up()
                uploader = uploader_of(trainer, storage, tell=tell)
            if not is_last:
                ending.wait(RETRY_AFTER_S[min(num_failed, len(RETRY_AFTER_S)) - 1])
            elif num_last == len(LAST_RETRY_AFTER_S):
                return EXIT_CRASH
            else:
                time.sleep(LAST_RETRY_AFTER_S[num_last])
                num_last += 1


def _answered(work: Callable[[], None], storage: Storage, *, limit_s: float) -> None:
    """Raises `SilentError` for a storage that has not answered for so long: nothing else ends a
    call of a library.
    """
    storage.answered_at = time.monotonic()
    done = begun(work)
    while not wait([done], timeout=POLL_S).done:
        if time.monotonic() - storage.answered_at > limit_s:
            raise SilentError(f"{storage.url} has not answered for {limit_s:.0f} s")
    done.result()


def _record(trainer: TrainerConfig, event: Event) -> None:
    """Among the events of the attempt under way; before its first one nobody is there to read
    it.
    """
    path = Path(trainer.default_local_dir, FILE_NAME)
    if events := read_events(path):
        file = EventsFile(path, attempt=events[-1]["attempt"], is_guest=True)
        file.write(event)
        file.close()


if __name__ == "__main__":
    log.keep_streams_safe(says_so=False)
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no thread that waits for a storage holds it up
