"""Run trainings with a mirror on a storage that kills, refuses, cuts and shows late.

`python tests/faults/mirror_campaign.py` writes benchmarks/results/mirror_faults.json. First it
injects one fault of each kind at every operation of a run. Then it draws runs by seeds: up to eight
faults anywhere, during uploads and restores; between saves a rotation, a rollback, or the loss of
the machine, after which the run continues where another machine restored it. Whenever an upload
ends, a machine with an empty disk restores from what the mirror shows. The checkpoint must be
whole, no older than the last complete upload, not rolled back, and the one that an independent
reading of the storage chooses. That storage is in memory. Last, it draws runs whose real processes
get SIGKILL at any moment, while they upload to a directory or restore from it.
"""

import argparse
import collections
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

sys.path.extend([str(Path(__file__).resolve().parents[1] / n) for n in ("", "unit", "faults")])

from campaign import parser_of, run_campaign
from fsspec.implementations.local import LocalFileSystem
from mirror_faults import KINDS, LAST_FAULT, FaultyStorage, Trial, restored, uploader

from trainer.tools.mirror import restore, upload


class Directory(LocalFileSystem):
    """A storage in a directory, which processes share; it has no faults."""

    cachable = False

    def __init__(self, path: Path) -> None:
        super().__init__(auto_mkdir=True)
        self.path = path
        self.mirror_url = f"file://{path}"

    def seen(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in self.path.rglob("*") if path.is_file()}

    def undisturbed(self) -> AbstractContextManager[None]:
        return nullcontext()

    def revive(self) -> bool:
        return False


class KilledTrial(Trial):
    """A run with real processes. `struck` counts the killed ones by their work."""

    def __init__(self, seed: int, work: Path) -> None:
        super().__init__(seed, work)
        self.struck: collections.Counter[str] = collections.Counter()
        self._lasts_s = dict.fromkeys(("uploading", "taking back"), 0.1)

    def _drawn_storage(self) -> Any:
        return Directory(self._work / "mirror")

    def _bring_up(self, own: upload.Uploader, step: int) -> upload.Uploader:
        for _ in range(3):
            own = uploader(self._run_dir, self.storage)
            self._kill("uploading", own.sync)
            self._lose_for_trial()
        return super()._bring_up(uploader(self._run_dir, self.storage), step)

    def _machine(self) -> Path:
        run_dir = super()._machine()
        self._kill("taking back", lambda: restored(run_dir, self.storage))
        return run_dir

    def _kill(self, name: str, action: Callable[[], object]) -> None:
        """Do this in another process, and kill it at a random moment."""
        if (pid := os.fork()) == 0:
            with suppress(Exception):
                action()
            os._exit(0)
        time.sleep(self._rng.uniform(0.0, self._lasts_s[name]))
        os.kill(pid, signal.SIGKILL)
        if os.waitpid(pid, 0)[1] == signal.SIGKILL:
            self.struck[name] += 1
        else:
            self._lasts_s[name] = max(0.8 * self._lasts_s[name], 0.002)
        self._lasts_s[name] *= 1.1  # so that about as many end before as do not


def everywhere(root: Path, struck: collections.Counter[str]) -> Iterator[str]:
    """Inject each kind of fault at each operation of a run; yield broken promises."""
    for kind in KINDS:
        for at in range(1, LAST_FAULT):
            trial = Trial(at, root / kind / str(at), FaultyStorage(at, kind))
            trial.run()
            yield from trial.faults
            struck[kind] += trial.storage.struck[kind]


def work(root: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    logging.disable(logging.CRITICAL)
    upload.NUM_STREAMS = restore.NUM_STREAMS = 1  # a seed draws the same run each time
    os.fsync = lambda descriptor: None  # type: ignore[assignment]  # power is not lost here
    one_each, drawn, processes = (collections.Counter[str]() for _ in range(3))
    faults = list(everywhere(root, one_each))
    for seed in range(1, 1 + arguments.runs):
        trial = Trial(seed, root / f"seed{seed}")
        trial.run()
        faults += trial.faults
        drawn.update({kind: trial.storage.struck[kind] for kind in KINDS})
    for seed in range(1, 1 + arguments.killed_runs):
        killed = KilledTrial(seed, root / f"killed{seed}")
        killed.run()
        faults += killed.faults
        processes.update(killed.struck)
    struck = one_each + drawn
    num_killed = sum(count for kind, count in struck.items() if kind.startswith("killed"))
    return {
        "kills": num_killed + processes.total(),
        "errors": struck.total() - num_killed,
        "one fault at each operation": one_each,
        "runs drawn": arguments.runs,
        "faults in runs drawn": drawn,
        "runs whose processes were killed": arguments.killed_runs,
        "processes killed": processes,
        "faults": faults,
    }


if __name__ == "__main__":
    parser = parser_of(__doc__, runs=300, killed_runs=40)
    sys.exit(run_campaign("mirror_campaign", parser, sys.argv[1:], work, result="mirror_faults"))
