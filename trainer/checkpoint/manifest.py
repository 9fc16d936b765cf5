"""The manifest of a checkpoint: every file with its size and SHA-256.

It lets a reader prove that all files are present and unchanged.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from trainer.checkpoint import fsio
from trainer.checkpoint.fsio import FileRecord, Share
from trainer.runtime.progress import Position

FORMAT = 2
MANIFEST = "manifest.json"
OWN_DIGEST = "manifest_sha256"


class ManifestError(ValueError):
    """The text is not a manifest of this format."""


@dataclass(frozen=True)
class TensorInfo:
    """Global shape and dtype (`float32`) of one parameter."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Manifest:
    """The manifest of the checkpoint of `step`.

    `mesh` maps dimension names to sizes, outermost first. `loss` and `grad_norm` are the values of
    `step`. `created_utc` is for display only: the code never orders anything by it.

    text_names: names of the language model's tensors in the files of a model with several
    components. num_passed_through: number of tensors that are exported unchanged.
    """

    step: int
    epoch: int
    samples_consumed: int
    world_size: int
    mesh: dict[str, int]
    created_utc: str
    nonce: str
    files: tuple[FileRecord, ...]
    tensors: dict[str, TensorInfo]
    fingerprints: dict[str, str]
    loss: float | None
    grad_norm: float | None
    text_names: tuple[str, ...] = ()
    num_passed_through: int = 0

    @property
    def position(self) -> Position:
        return Position(self.step, self.epoch, self.samples_consumed)

    @property
    def size_bytes(self) -> int:
        """Size of all listed files together."""
        return sum(record.size_bytes for record in self.files)

    def shard_files(self, file_of: Callable[[int, int], str]) -> list[str]:
        """Return the names of the files that together hold one full copy of a sharded state.

        `file_of`: the function of `layout` that names the file of each rank.
        """
        num_shards = self.mesh.get("fsdp", self.world_size)
        return [file_of(self.world_size, rank) for rank in range(num_shards)]

    def to_json(self) -> str:
        """Return the manifest as JSON.

        Raises `ValueError` for NaN or infinity, because a state that is not finite is never saved.
        """
        tree = {"format": FORMAT, **dataclasses.asdict(self)}
        tree[OWN_DIGEST] = digest_of(tree)
        return json.dumps(tree, indent=1, allow_nan=False) + "\n"


def digest_of(tree: dict[str, Any]) -> str:
    """Return the digest of a manifest's contents. `tree`: all keys except the digest."""
    canonical = json.dumps(
        tree,
        sort_keys=True,
        separators=(",", ":"),
        allow_nan=False,
    )
    return hashlib.sha256(canonical.encode()).hexdigest()


def parse_manifest(text: str | bytes, *, step: int | None = None) -> Manifest:
    """Parse a manifest.

    Raises `ManifestError` unless the text is a valid manifest of this format, and of `step` if
    `step` is given. The digest detects changes; the other checks detect a forged manifest.
    """
    try:
        tree = json.loads(text)
        if (version := tree.pop("format")) != FORMAT:
            raise ManifestError(
                f"format {version} is not format {FORMAT}, which this version reads"
            )
        if tree.pop(OWN_DIGEST, None) != digest_of({"format": version, **tree}):
            raise ManifestError(f"changed after it was written ({OWN_DIGEST} differs)")
        files = tuple(FileRecord(**record) for record in tree.pop("files"))
        tensors = {
            name: TensorInfo(tuple(info["shape"]), info["dtype"])
            for name, info in tree.pop("tensors").items()
        }
        text_names = tuple(tree.pop("text_names", ()))
        manifest = Manifest(
            **tree,
            files=files,
            tensors=tensors,
            text_names=text_names,
        )
        _require_plain(manifest)
    except ManifestError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ManifestError(f"not readable: {error!r}") from error
    if step not in (None, manifest.step):
        raise ManifestError(f"it belongs to step {manifest.step}")
    return manifest


VALUE_TYPES = {
    "loss": float | int | None,
    "grad_norm": float | int | None,
    "fingerprints": dict,
    "created_utc": str,
}


def _require_plain(manifest: Manifest) -> None:
    """Raise `ManifestError` for paths outside the checkpoint and for values of the wrong type."""
    paths = [record.path for record in manifest.files]
    if not paths or len(set(paths)) < len(paths):
        raise ManifestError("'files' must list each file once")
    for path in paths:
        pure = PurePosixPath(path)
        is_inside = pure.parts and not pure.is_absolute() and ".." not in pure.parts
        if not is_inside or str(pure) != path or not path.isprintable():
            raise ManifestError(f"'files' must list paths inside the checkpoint, got {path!r}")
    counts = [manifest.step, manifest.epoch, manifest.samples_consumed, manifest.world_size - 1]
    counts += [*manifest.mesh.values(), *(record.size_bytes for record in manifest.files)]
    if any(type(count) is not int or count < 0 for count in counts):
        raise ManifestError("steps, counts and sizes must be whole numbers, and not negative")
    for key, kind in VALUE_TYPES.items():
        value = getattr(manifest, key)
        if not isinstance(value, kind):
            raise ManifestError(f"'{key}' has the wrong type: {value!r:.80}")


def verify_files(path: Path, manifest: Manifest, *, share: Share = (0, 1)) -> list[str]:
    """Hash share `(index, count)` of the files, and describe each difference from the manifest."""
    problems = (_problem(path, record) for record in share_of(manifest.files, share))
    return [problem for problem in problems if problem is not None]


def share_of(files: Iterable[FileRecord], share: Share) -> list[FileRecord]:
    """Return share `(index, count)` of the files. All shares have similar sizes."""
    index, count = share
    by_size = sorted(files, key=lambda record: (-record.size_bytes, record.path))
    return by_size[index::count]


def _problem(root: Path, record: FileRecord) -> str | None:
    if problem := fsio.size_problem(root, record):
        return problem
    try:
        if fsio.sha256_of(root / record.path) != record.sha256:
            return f"{record.path} changed after it was written (sha256 differs)"
    except OSError as error:
        return f"{record.path}: {error.strerror or error}"
    return None
