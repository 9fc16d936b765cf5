"""The manifest of a checkpoint: every file with its size and SHA-256, so that a reader can prove
that all of it is there and unchanged.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from trainer.checkpoint import fsio
from trainer.checkpoint.fsio import FileRecord
from trainer.runtime.progress import Position

FORMAT = 2
MANIFEST = "manifest.json"
OWN_DIGEST = "manifest_sha256"
OPTIONAL = ("text_names", "num_passed_through")
"""Keys that most checkpoints have no use for."""


class ManifestError(ValueError):
    """The text is not a manifest that this version understands."""


@dataclass(frozen=True)
class TensorInfo:
    """Global shape and dtype (`float32`) of one parameter."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Manifest:
    """Whole numbers are never negative. `mesh` maps dimension names to sizes, outermost first.

    `created_utc` is for people: nothing is ever ordered by it. `loss` and `grad_norm` are those of
    `step`. `text_names` are the names of the text part's tensors in the files of a checkpoint of
    several parts, and `num_passed_through` counts the tensors that are exported unchanged; both
    keys are absent otherwise.
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
    def num_shards(self) -> int:
        """Number of ranks that hold one whole copy of the parameters: the first ones."""
        return self.mesh.get("fsdp", self.world_size)

    def to_json(self) -> str:
        """Raises `ValueError` for NaN or infinity: a state that is not finite is not saved."""
        values = dataclasses.asdict(self).items()
        tree = {"format": FORMAT}
        tree |= {name: value for name, value in values if value or name not in OPTIONAL}
        return json.dumps(tree | {OWN_DIGEST: digest_of(tree)}, indent=1, allow_nan=False) + "\n"


def digest_of(tree: dict[str, Any]) -> str:
    """Hash a manifest: it proves the files, and its digest proves the manifest."""
    canonical = json.dumps(tree, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def parse_manifest(text: str | bytes, *, step: int | None = None) -> Manifest:
    """Raises `ManifestError` for everything but a whole manifest of this format, and of `step`.

    Its digest proves its content; the checks below hold for one that was forged.
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
        manifest = Manifest(**tree, files=files, tensors=tensors, text_names=text_names)
        _require_plain(manifest)
        if step not in (None, manifest.step):
            raise ManifestError(f"it belongs to step {manifest.step}")
    except ManifestError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ManifestError(f"not readable: {error!r}") from error
    return manifest


def _require_plain(manifest: Manifest) -> None:
    """Raise `ManifestError` for paths outside the checkpoint, and for values of another type."""
    paths = [record.path for record in manifest.files]
    if not paths or len(set(paths)) < len(paths):
        raise ManifestError("'files' must list each file once")
    for path in paths:
        pure = PurePosixPath(path)
        is_inside = pure.parts and not pure.is_absolute() and ".." not in pure.parts
        if not is_inside or str(pure) != path or not path.isprintable():
            raise ManifestError(f"'files' must list paths inside the checkpoint, got {path!r}")
    numbers = [getattr(manifest, name) for name in ("step", "epoch", "samples_consumed")]
    numbers += [manifest.world_size, *manifest.mesh.values()]
    numbers += [record.size_bytes for record in manifest.files]
    if any(type(number) is not int or number < 0 for number in numbers) or not manifest.world_size:
        raise ManifestError("steps, counts and sizes must be whole numbers")
    for name in ("loss", "grad_norm"):
        if not isinstance(value := getattr(manifest, name), float | int | None):
            raise ManifestError(f"'{name}' must be a number or null, got {value!r:.80}")
    if not isinstance(manifest.fingerprints, dict) or not isinstance(manifest.created_utc, str):
        raise ManifestError("'fingerprints' must be an object, 'created_utc' a text")


def verify_files(path: Path, manifest: Manifest, *, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Hash share `(index, count)` of the files; return how each differs from the manifest."""
    problems = (_problem(path, record) for record in share_of(manifest.files, share))
    return [problem for problem in problems if problem is not None]


def share_of(files: Iterable[FileRecord], share: tuple[int, int]) -> list[FileRecord]:
    """Return share `(index, count)` of the files: the shares have similar bytes."""
    index, count = share
    by_size = sorted(files, key=lambda record: (-record.size_bytes, record.path))
    return by_size[index::count]


def _problem(root: Path, record: FileRecord) -> str | None:
    problem = fsio.size_problem(root, record)
    try:
        if problem is None and fsio.sha256_of(root / record.path) != record.sha256:
            return f"{record.path} changed after it was written (sha256 differs)"
    except OSError as error:
        return f"{record.path}: {error.strerror or error}"
    return problem
