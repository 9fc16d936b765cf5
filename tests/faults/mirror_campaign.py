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
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.extend([str(Path(__file__).resolve().parents[1] / name) for name in ("", "unit")])

from checkpoint_fakes import content_of, manifest_of
from fsspec.implementations.local import LocalFileSystem
from mirror_faults import KINDS, FaultyStorage, Killed, campaign, restored, roll_back, uploader
from result_file import write_result

from trainer.checkpoint import choice, fsio, layout, retention
from trainer.checkpoint.choice import NoUsableCheckpointError
from trainer.checkpoint.manifest import MANIFEST, parse_manifest
from trainer.checkpoint.storage import StorageError
from trainer.errors import ResumableError
from trainer.tools.mirror import restore, upload

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "mirror_faults.json"
NUM_FAULTS, LAST_FAULT, MAX_TRIES = 10, 120, 60


class Trial:
    """One run drawn by its seed. `faults` lists broken promises."""

    def __init__(self, seed: int, work: Path) -> None:
        self._rng, self._work, self._seed = random.Random(seed), work, seed
        self.storage = self._drawn_storage()
        self._run_dir, self._num_machines = work / "run", 0
        self._run_dir.mkdir(parents=True)
        (self._run_dir / "metrics.jsonl").write_text("{}\n")
        self._saved: dict[str, dict[str, bytes]] = {}
        self._up, self._undone = 0, set[str]()
        self.faults: list[str] = []

    def _drawn_storage(self) -> Any:
        numbers = self._rng.sample(range(1, LAST_FAULT), self._rng.randint(1, NUM_FAULTS))
        late_by = self._rng.randint(1, 25)
        return FaultyStorage(faults={n: self._rng.choice(KINDS) for n in numbers}, late_by=late_by)

    def run(self) -> None:
        step, own = 0, uploader(self._run_dir, self.storage)
        for _ in range(self._rng.randint(3, 5)):
            step += self._rng.randint(1, 2)
            self._save(step)
            own = self._bring_up(own, step)
            event = self._rng.choice(("", "rotate", "roll back", "lose"))
            if event == "rotate":
                retention.rotate(self._run_dir, keep=1)
            elif event == "roll back" and (
                steps := [info.step for info in layout.committed(self._run_dir)[:-1]]
            ):
                step = self._roll_back(self._rng.choice(steps))
                own = self._bring_up(own, step)
            elif event == "lose":
                step = self._lose() or step
                own = uploader(self._run_dir, self.storage)

    def _save(self, step: int) -> None:
        """Save as a run does; no two saves are equal."""
        nonce = f"{len(self._saved):08d}"
        files = {name: data + nonce.encode() for name, data in content_of(step).items()}
        staging = layout.staging_dir(self._run_dir, step)
        (staging / "huggingface").mkdir(parents=True)
        records = tuple(
            fsio.write_file(staging / name, data, root=staging) for name, data in files.items()
        )
        manifest = replace(manifest_of(step, records), nonce=nonce)
        fsio.write_file(staging / MANIFEST, manifest.to_json().encode(), root=staging)
        layout.commit(staging, step, nonce=nonce)
        layout.publish(self._run_dir, step)
        self._saved[nonce] = files | {MANIFEST: manifest.to_json().encode()}

    def _bring_up(self, own: upload.Uploader, step: int) -> upload.Uploader:
        for _ in range(MAX_TRIES):
            try:
                own.sync()
                self._up = step
                self._undone |= set(self._discarded())
                self._lose_for_trial()
                return own
            except (StorageError, Killed):
                if self.storage.revive():
                    own = uploader(self._run_dir, self.storage)
            self._lose_for_trial()
        self._tell(f"step {step} never goes up")
        return own

    def _lose_for_trial(self) -> None:
        with self.storage.undisturbed():
            expected, taken = self._expected(), self._taken(self._machine())
        if taken is not None and taken[1] != expected:
            self._tell(f"{taken} is taken, the storage shows {expected}")
        self._judge(taken)

    def _lose(self) -> int | None:
        """Continue on another machine, whose restore may fail too. Return its step, or None."""
        run_dir = self._machine()
        for _ in range(MAX_TRIES):
            try:
                taken = self._taken(run_dir)
                break
            except (ResumableError, Killed):
                self.storage.revive()
        else:
            self._tell("nothing comes back")
            return None
        self._judge(taken)
        if taken is None:
            return None
        self._run_dir, self._up = run_dir, taken[0]
        return taken[0]

    def _machine(self) -> Path:
        self._num_machines += 1
        return self._work / f"machine{self._num_machines}"

    def _taken(self, run_dir: Path) -> tuple[int, str] | None:
        """Return step and nonce of the checkpoint that a machine restores."""
        with suppress(NoUsableCheckpointError):
            path = restored(run_dir, self.storage)
            if path is None:
                return None
            nonce = parse_manifest((path / MANIFEST).read_bytes()).nonce
            found = {name: (path / name).read_bytes() for name in self._saved[nonce]}
            if found != self._saved[nonce] or not (run_dir / "metrics.jsonl").exists():
                self._tell(f"{path} is not whole")
            chosen = choice.select(run_dir).chosen
            if chosen is None or chosen.path != path:
                self._tell(f"{path} is there, the run goes on from {chosen}")
            return layout.inspect(path).step, nonce
        return None

    def _judge(self, taken: tuple[int, str] | None) -> None:
        if self._up and taken is None:
            self._tell(f"step {self._up} was up, nothing is taken")
        elif taken is not None and taken[0] < self._up:
            self._tell(f"step {self._up} was up, {taken} is taken")
        elif taken is not None and taken[1] in self._undone:
            self._tell(f"{taken} was undone")

    def _expected(self) -> str | None:
        """Return the nonce of the checkpoint to restore, from the bytes that the storage shows."""
        root = self.storage.mirror_url.partition(":/")[2].replace("//", "/")
        shown = {name.removeprefix(f"{root}/"): data for name, data in self.storage.seen().items()}
        whole = self._whole(shown)
        text = shown.get(layout.POINTER, b"").decode()
        pointer = int(text) if text.endswith("\n") else None
        steps = [step for step in whole if pointer is not None and step <= pointer] or list(whole)
        return whole[max(steps)] if steps else None

    def _whole(self, shown: dict[str, bytes]) -> dict[int, str]:
        steps = {
            nonce: parse_manifest(files[MANIFEST]).step for nonce, files in self._saved.items()
        }
        return {
            steps[nonce]: nonce
            for nonce, files in self._saved.items()
            if all(
                shown.get(f"global_step_{steps[nonce]}/{name}") == data
                for name, data in files.items()
            )
        }

    def _roll_back(self, target: int) -> int:
        newer = [info for info in layout.committed(self._run_dir) if info.step > target]
        discarded = [*self._discarded(), *(info.manifest.nonce for info in newer if info.manifest)]
        roll_back(self._run_dir, target, [info.step for info in newer], discarded)
        self._up = min(self._up, target)
        return target

    def _discarded(self) -> list[str]:
        path = self._run_dir / "rollbacks.json"
        if not path.exists():
            return []
        return list(json.loads(path.read_text())["rollbacks"][0]["discarded"])

    def _tell(self, fault: str) -> None:
        self.faults.append(f"seed {self._seed}: {fault}")


class Directory(LocalFileSystem):
    """A storage in a directory, which processes share; it has no faults."""

    cachable = False

    def __init__(self, path: Path) -> None:
        super().__init__(auto_mkdir=True)
        self.path, self.mirror_url = path, f"file://{path}"

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
            storage = FaultyStorage(at, kind)
            yield from campaign(at, kind, root / kind / str(at), storage)
            if storage.count < at:
                break
            struck[kind] += storage.struck[kind]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--killed-runs", type=int, default=40)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)
    upload.NUM_STREAMS = restore.NUM_STREAMS = 1  # a seed draws the same run each time
    os.fsync = lambda descriptor: None  # type: ignore[assignment]  # power is not lost here
    one_each, drawn, processes = (collections.Counter[str]() for _ in range(3))
    with tempfile.TemporaryDirectory(prefix="mirror-", dir=os.environ.get("KILLS_DIR")) as root:
        faults = list(everywhere(Path(root), one_each))
        for seed in range(1, 1 + arguments.runs):
            trial = Trial(seed, Path(root, f"seed{seed}"))
            trial.run()
            faults += trial.faults
            drawn.update({kind: trial.storage.struck[kind] for kind in KINDS})
        for seed in range(1, 1 + arguments.killed_runs):
            killed = KilledTrial(seed, Path(root, f"killed{seed}"))
            killed.run()
            faults += killed.faults
            processes.update(killed.struck)
    struck = one_each + drawn
    num_killed = sum(count for kind, count in struck.items() if kind.startswith("killed"))
    result = {
        "kills": num_killed + processes.total(),
        "errors": struck.total() - num_killed,
        "one fault at each operation": one_each,
        "runs drawn": arguments.runs,
        "faults in runs drawn": drawn,
        "runs whose processes were killed": arguments.killed_runs,
        "processes killed": processes,
        "faults": faults,
    }
    write_result(arguments.output, result)
    print(json.dumps(result, indent=1))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
