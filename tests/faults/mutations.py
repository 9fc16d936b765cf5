"""The safeguards of checkpoint and resume, removed one at a time: the tests named beside each must then fail.

`python tests/faults/mutations.py` runs all of them in a copy of the repository and writes
benchmarks/results/mutations.json; `--only NAME` runs one and replaces its line. test_mutations.py keeps the list in
step with the code.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results" / "mutations.json"


@dataclass(frozen=True)
class Mutation:
    """`old`, which stands once in `file` below trainer/, becomes `new`; one of `tests` below tests/ must then fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


FSIO, LAYOUT, MANIFEST = "checkpoint/fsio.py", "checkpoint/layout.py", "checkpoint/manifest.py"
SAVE, BOARD, MANAGER = "checkpoint/save.py", "checkpoint/board.py", "checkpoint/manager.py"
START, CHOICE = "checkpoint/start.py", "checkpoint/choice.py"
LOCK, SHARDS = "checkpoint/lock.py", "checkpoint/shards.py"
CRASH, SYNCED = "faults/test_crash_states.py", "unit/test_checkpoint_fsio.py"

MUTATIONS = (
    Mutation(
        "no fsync of a file",
        FSIO,
        '                _announce("fsync", self._path)\n                os.fsync(self._file.fileno())\n',
        "",
        (SYNCED, CRASH),
    ),
    Mutation("the fsync of a file is only announced", FSIO, "os.fsync(self._file.fileno())", "pass", (SYNCED,)),
    Mutation(
        "the fsync of a directory is only announced",
        FSIO,
        "            os.fsync(descriptor)\n",
        "            pass\n",
        (SYNCED,),
    ),
    Mutation(
        "no directory fsync after mkdir",
        FSIO,
        "    os.mkdir(path)\n    fsync_dir(path.parent)\n",
        "    os.mkdir(path)\n",
        (SYNCED, CRASH),
    ),
    Mutation(
        "no directory fsync after the commit's rename",
        LAYOUT,
        "    fsio.fsync_dir(final.parent)\n",
        "",
        (SYNCED, CRASH),
    ),
    Mutation(
        "no directory fsync after the pointer's rename",
        FSIO,
        "        raise\n    fsync_dir(path.parent)\n",
        "        raise\n",
        (SYNCED, CRASH),
    ),
    Mutation(
        "no directory fsyncs before the commit",
        FSIO,
        "        fsync_dir(Path(directory))\n",
        "        pass\n",
        (SYNCED, CRASH),
    ),
    Mutation(
        "no directory fsync after the mark",
        LAYOUT,
        "    fsio.fsync_dir(step_dir)\n",
        "",
        (CRASH, "unit/test_checkpoint_layout.py"),
    ),
    Mutation("a file may be overwritten", FSIO, 'open(path, "xb")', 'open(path, "wb")', (SYNCED,)),
    Mutation(
        "the size on disk is not compared after writing",
        FSIO,
        "if found_bytes != self._size_bytes:",
        "if False:",
        (SYNCED,),
    ),
    Mutation(
        "no fsyncs of directories in a save",
        SAVE,
        "        fsio.fsync_tree(staging)\n",
        "",
        ("distributed/test_save_guards.py",),
    ),
    Mutation(
        "no acknowledgement: an error of a rank is not reported",
        SAVE,
        'error = f"{type(failure).__name__}: {failure}"',
        "pass",
        ("distributed/test_checkpoint.py",),
    ),
    Mutation(
        "no acknowledgement: the main rank ignores what others report",
        BOARD,
        'if report["error"]]\n',
        "if False]\n",
        ("distributed/test_checkpoint.py",),
    ),
    Mutation(
        "a silent rank counts as done",
        BOARD,
        '{"value": None, "error": NO_ANSWER}',
        '{"value": [], "error": None}',
        ("distributed/test_save_guards.py",),
    ),
    Mutation(
        "the main rank leaves before the others have read its verdict",
        BOARD,
        '                    self._wait_for(f"{topic}/read by {rank}", deadline)\n',
        "                    pass\n",
        ("distributed/test_checkpoint.py",),
    ),
    Mutation(
        "the lock is not checked before the commit",
        SAVE,
        "        self._require_lock()\n        layout.commit",
        "        layout.commit",
        ("distributed/test_save_guards.py",),
    ),
    Mutation(
        "files are not awaited before the manifest",
        SAVE,
        "        self._await_files(staging, records)\n        manifest",
        "        manifest",
        ("distributed/test_save_guards.py",),
    ),
    Mutation(
        "the deadline is not checked before the commit",
        SAVE,
        "time.monotonic() > self._deadline",
        "False",
        ("distributed/test_save_guards.py",),
    ),
    Mutation(
        "hashes are not compared",
        MANIFEST,
        "fsio.sha256_of(root / record.path) != record.sha256",
        "False",
        ("unit/test_checkpoint_manifest.py",),
    ),
    Mutation(
        "sizes are not compared",
        FSIO,
        "    if size_bytes == record.size_bytes:\n",
        "    if True:\n",
        ("unit/test_checkpoint_layout.py",),
    ),
    Mutation(
        "the manifest does not prove itself",
        MANIFEST,
        'tree.pop(OWN_DIGEST, None) != digest_of({"format": version, **tree})',
        "tree.pop(OWN_DIGEST, None) is None",
        ("unit/test_checkpoint_manifest.py",),
    ),
    Mutation(
        "contents are not proven on resume",
        START,
        "        if not problems:\n",
        "        if True:\n",
        ("distributed/test_checkpoint.py",),
    ),
    Mutation(
        "a changed run is continued",
        START,
        "    for change in lineage.compare(",
        "    for change in () and lineage.compare(",
        ("distributed/test_checkpoint.py",),
    ),
    Mutation(
        "a directory that is not shared is used",
        START,
        "if blind := [rank for rank, rank_sees in enumerate(seen) if not rank_sees]:",
        "if blind := []:",
        ("distributed/test_start.py",),
    ),
    Mutation(
        "rotation takes what the pointer names",
        LAYOUT,
        "{*protect, read_pointer(run_dir).step}",
        "{*protect}",
        ("unit/test_checkpoint_layout.py",),
    ),
    Mutation(
        "a damaged checkpoint means step 0",
        CHOICE,
        "        _require_new(run_dir, found, pointer)\n",
        "",
        ("unit/test_checkpoint_layout.py",),
    ),
    Mutation(
        "a newer unpublished checkpoint is passed over",
        CHOICE,
        "    if pointed is None or unpublished:\n",
        "    if pointed is None:\n",
        ("unit/test_checkpoint_layout.py", CRASH),
    ),
    Mutation(
        "a poisoned state is saved",
        MANAGER,
        "if not self._is_finite(snapshot):",
        "if False:",
        ("distributed/test_checkpoint.py",),
    ),
    Mutation(
        "a save behind training writes what later steps change",
        MANAGER,
        "            snapshot = buffers.copy(snapshot)\n",
        "            pass\n",
        ("distributed/test_async_save.py",),
    ),
    Mutation(
        "a failed save ends nothing",
        MANAGER,
        "if self._num_failed_in_a_row > len(self._retry_after_s) and not is_required:",
        "if False:",
        ("distributed/test_async_save.py",),
    ),
    Mutation(
        "pickles may run code",
        SHARDS,
        "torch.load(path, weights_only=True,",
        "torch.load(path, weights_only=False,",
        ("unit/test_checkpoint_security.py",),
    ),
    Mutation(
        "a fenced run still holds the lock",
        LOCK,
        "            return self._is_ours()\n        except",
        "            return True\n        except",
        ("unit/test_checkpoint_lock.py",),
    ),
)


def mutated_copy(mutation: Mutation, target: Path) -> None:
    """The repository as it is, with one safeguard removed."""
    for name in ("trainer", "tests", "conf"):
        shutil.copytree(REPOSITORY / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "run_sft.sh", "README.md"):
        shutil.copy(REPOSITORY / name, target / name)
    path = target / "trainer" / mutation.file
    path.write_text(apply(mutation, path.read_text()))


def apply(mutation: Mutation, text: str) -> str:
    if text.count(mutation.old) != 1:
        raise ValueError(
            f"'{mutation.name}': what it removes stands {text.count(mutation.old)} times in {mutation.file}"
        )
    return text.replace(mutation.old, mutation.new)


def caught_by(mutation: Mutation) -> str | None:
    """The first test file that fails without the safeguard; None if all pass."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as directory:
        root = Path(directory)
        mutated_copy(mutation, root)
        for test in mutation.tests:
            command = [sys.executable, "-m", "pytest", "-x", "-q", "--timeout=300", f"tests/{test}"]
            environment = {**os.environ, "PYTHONPATH": str(root)}
            done = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            if done.returncode == 1:
                return test
            if done.returncode != 0:
                raise RuntimeError(f"'{mutation.name}': {test} could not run:\n{done.stdout.decode()[-3000:]}")
    return None


def _record(found: dict[str, str | None], output: Path, *, minutes: float) -> None:
    """Add what was found to the results: one safeguard run alone replaces its own line."""
    known = json.loads(output.read_text()) if output.exists() else {}
    lines = {**known.get("failed test by safeguard removed", {}), **found}
    lines = {mutation.name: lines[mutation.name] for mutation in MUTATIONS if mutation.name in lines}
    result = {
        "command": "python tests/faults/mutations.py",
        "failed test by safeguard removed": lines,
        "missed": [name for name, test in lines.items() if test is None],
        "minutes": round(known.get("minutes", 0.0) * (len(found) < len(lines)) + minutes, 1),
    }
    output.write_text(json.dumps(result, indent=1) + "\n")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    started, found = time.monotonic(), {}
    for mutation in MUTATIONS:
        if arguments.only in (None, mutation.name):
            found[mutation.name] = caught_by(mutation)
            print(f"{'MISSED' if found[mutation.name] is None else 'caught'} {mutation.name}", flush=True)
    missed = [name for name, test in found.items() if test is None]
    _record(found, arguments.output, minutes=(time.monotonic() - started) / 60)
    print(f"{len(found) - len(missed)} of {len(found)} caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
