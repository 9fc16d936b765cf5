"""Tiny checkpoints written with the real functions, for the tests of `trainer/checkpoint` that
need no torch.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from small_files import read_json

from trainer.checkpoint import choice, fsio, layout, retention
from trainer.checkpoint.manifest import (
    MANIFEST,
    OWN_DIGEST,
    Manifest,
    TensorInfo,
    digest_of,
    verify_files,
)
from trainer.runtime.progress import History

WORLD_SIZE = 2


def content_of(step):
    """Relative path -> bytes of the checkpoint of one step, except `manifest.json`."""
    ranks = range(WORLD_SIZE)
    shards = {
        layout.model_file(WORLD_SIZE, rank): f"model {step} {rank}".encode() * 3 for rank in ranks
    }
    return shards | {
        layout.optim_file(WORLD_SIZE, 0): f"optim {step}".encode(),
        "data.pt": f"data {step}".encode(),
        "fsdp_config.json": b'{"FSDP_version": 2, "world_size": 2}',
        "huggingface/config.json": b"{}",
    }


def manifest_of(step, files, *, nonce=""):
    return Manifest(
        step=step,
        epoch=0,
        samples_consumed=4 * step,
        world_size=WORLD_SIZE,
        mesh={"fsdp": WORLD_SIZE},
        created_utc="2026-01-01T00:00:00Z",
        nonce=nonce or f"a1b{step}",
        files=files,
        tensors={"lm_head.weight": TensorInfo((4, 2), "float32")},
        fingerprints={"config": "c0ffee"},
        loss=1.5,
        grad_norm=0.1,
    )


def sealed(tree):
    """Return the text of a manifest with these values and a matching digest, as an attacker or
    another writer would write it.
    """
    tree = {name: value for name, value in tree.items() if name != OWN_DIGEST}
    return json.dumps(tree | {OWN_DIGEST: digest_of(tree)})


def rewrite_manifest(path, change):
    """Let `change` alter the manifest of the checkpoint at `path`, then update its digest."""
    tree = read_json(path / MANIFEST)
    change(tree)
    (path / MANIFEST).write_text(sealed(tree))


def stage(run_dir, step, *, nonce=""):
    """A finished staging directory, not yet committed. With a `nonce`, each file differs from that
    of any other save of the step.
    """
    staging = layout.staging_dir(run_dir, step)
    fsio.make_dir(staging)
    fsio.make_dir(staging / "huggingface")
    records = tuple(
        fsio.write_file(staging / name, data + nonce.encode(), root=staging)
        for name, data in content_of(step).items()
    )
    manifest = manifest_of(step, records, nonce=nonce)
    fsio.write_file(staging / MANIFEST, manifest.to_json().encode(), root=staging)
    fsio.fsync_tree(staging)
    return staging


def commit(run_dir, step, *, nonce=""):
    return layout.commit(stage(run_dir, step, nonce=nonce), step, nonce=nonce or f"a1b{step}")


def save(run_dir, *steps, nonce=""):
    for step in steps:
        commit(run_dir, step, nonce=nonce)
        layout.publish(run_dir, step)


def write_unfinished(run_dir, step):
    """A directory without a manifest, as another trainer leaves it."""
    path = run_dir / layout.step_dir_name(step)
    path.mkdir(parents=True)
    (path / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 2}')
    for rank in range(WORLD_SIZE):
        for file in (layout.model_file, layout.optim_file, layout.extra_file):
            (path / file(WORLD_SIZE, rank)).write_bytes(b"weights")
    return path


def files_of(directory):
    """Relative path to bytes of every file below a directory."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def is_whole(path):
    """Check independently of the code under test that every byte is as in `content_of`, and that
    there is a manifest.
    """
    try:
        return all(
            (path / name).read_bytes() == data for name, data in expected_files(path.name).items()
        )
    except FileNotFoundError:
        return False


@cache
def expected_files(name):
    step = int(name.removeprefix("global_step_"))
    files = content_of(step)
    records = (
        fsio.FileRecord(file, len(data), hashlib.sha256(data).hexdigest())
        for file, data in files.items()
    )
    return files | {MANIFEST: manifest_of(step, tuple(records)).to_json().encode()}


@dataclass
class Run:
    """A trainer reduced to its checkpoint calls, in the order of the real one, with tiny files."""

    run_dir: Path
    keep: int
    step: int = 0

    def save(self):
        """Save in the order of `trainer.checkpoint.save`."""
        self.step += 1
        layout.clean_leftovers(self.run_dir)
        commit(self.run_dir, self.step)
        self._settle(self.step)

    def _settle(self, step, **settings):
        retention.settle(self.run_dir, step, keep=self.keep, history=History(), **settings)

    def restart(self):
        """Start in the order of `trainer.checkpoint.start` and the load after it. Return the step
        to continue from, or None if no checkpoint is usable.
        """
        layout.clean_leftovers(self.run_dir)
        try:
            candidates = choice.select(self.run_dir).candidates
        except choice.NoUsableCheckpointError:
            return None
        for info in candidates:
            if problems := verify_files(info.path, info.manifest):
                layout.quarantine(info.path, problems[0])
                continue
            self._settle(info.step, protect={info.step})
            self.step = info.step
            return info.step
        return None
