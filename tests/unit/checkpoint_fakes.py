"""Tiny checkpoints written with the real functions, for the tests of `trainer/checkpoint` that
need no torch.
"""

import hashlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from trainer.checkpoint import fsio, layout
from trainer.checkpoint.manifest import MANIFEST, OWN_DIGEST, Manifest, TensorInfo, digest_of

WORLD_SIZE = 2


def content_of(step: int) -> dict[str, bytes]:
    """Relative path to bytes of the checkpoint of one step, `manifest.json` apart."""
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


def manifest_of(step: int, files: tuple[fsio.FileRecord, ...]) -> Manifest:
    return Manifest(
        step=step,
        epoch=0,
        samples_consumed=4 * step,
        world_size=WORLD_SIZE,
        mesh={"fsdp": WORLD_SIZE},
        created_utc="2026-01-01T00:00:00Z",
        nonce=f"a1b{step}",
        files=files,
        tensors={"lm_head.weight": TensorInfo((4, 2), "float32")},
        fingerprints={"config": "c0ffee"},
        loss=1.5,
        grad_norm=0.1,
    )


def sealed(tree: dict[str, Any]) -> str:
    """The text of a manifest with these values and a digest that fits, as an attacker or another
    writer would leave it.
    """
    tree = {name: value for name, value in tree.items() if name != OWN_DIGEST}
    return json.dumps(tree | {OWN_DIGEST: digest_of(tree)})


def rewrite_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Let `change` alter the manifest of the checkpoint at `path`, and seal it again."""
    tree = json.loads((path / MANIFEST).read_text())
    change(tree)
    (path / MANIFEST).write_text(sealed(tree))


def stage(run_dir: Path, step: int) -> Path:
    """A finished staging directory, not yet committed."""
    staging = layout.staging_dir(run_dir, step)
    fsio.make_dir(staging)
    fsio.make_dir(staging / "huggingface")
    records = tuple(
        fsio.write_file(staging / name, data, root=staging)
        for name, data in content_of(step).items()
    )
    fsio.write_file(staging / MANIFEST, manifest_of(step, records).to_json().encode(), root=staging)
    fsio.fsync_tree(staging)
    return staging


def commit(run_dir: Path, step: int) -> Path:
    return layout.commit(stage(run_dir, step), step, nonce=f"a1b{step}")


def save(run_dir: Path, *steps: int) -> None:
    for step in steps:
        commit(run_dir, step)
        layout.publish(run_dir, step)


def write_unfinished(run_dir: Path, step: int, *, world_size: int = 2) -> Path:
    """A directory without a manifest, as another trainer leaves it."""
    path = run_dir / layout.step_dir_name(step)
    path.mkdir(parents=True)
    (path / "fsdp_config.json").write_text(f'{{"FSDP_version": 2, "world_size": {world_size}}}')
    for rank in range(world_size):
        for file in (layout.model_file, layout.optim_file, layout.extra_file):
            (path / file(world_size, rank)).write_bytes(b"weights")
    return path


def is_whole(path: Path) -> bool:
    """Independent of the code under test: every byte as `content_of` says, and a manifest."""
    try:
        return all(
            (path / name).read_bytes() == data for name, data in expected_files(path.name).items()
        )
    except FileNotFoundError:
        return False


@cache
def expected_files(name: str) -> dict[str, bytes]:
    step = int(name.removeprefix("global_step_"))
    files = content_of(step)
    records = (
        fsio.FileRecord(file, len(data), hashlib.sha256(data).hexdigest())
        for file, data in files.items()
    )
    return files | {MANIFEST: manifest_of(step, tuple(records)).to_json().encode()}
