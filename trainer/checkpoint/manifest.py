"""The manifest of a checkpoint: what was written, so that a reader can prove that it is all there and unchanged."""

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from trainer.checkpoint import fsio
from trainer.checkpoint.fsio import FileRecord

FORMAT = 1
MANIFEST = "manifest.json"
OWN_DIGEST = "manifest_sha256"
T = TypeVar("T")


class ManifestError(ValueError):
    """The text is not a manifest this version understands; the message names the key and the cause."""


@dataclass(frozen=True)
class TensorInfo:
    """Global shape and dtype (`float32`) of one parameter."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Manifest:
    """`mesh` maps dimension names to sizes, outermost first. `param_names` is the order of the optimizer's indices.

    `created_utc` is for people: nothing is ever ordered by it. `loss` and `grad_norm` are those of `step`.
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
    param_names: tuple[str, ...]
    fingerprints: dict[str, str]
    finite: bool
    loss: float | None
    grad_norm: float | None

    @property
    def num_shards(self) -> int:
        """Parts that one copy of the parameters is split into: the first so many ranks hold one whole copy."""
        return self.mesh.get("fsdp", self.world_size)

    def to_json(self) -> str:
        """Raises `ValueError` for NaN or infinity: a state that is not finite is not saved."""
        tree = {"format": FORMAT, **dataclasses.asdict(self)}
        return json.dumps(tree | {OWN_DIGEST: digest_of(tree)}, indent=1, allow_nan=False) + "\n"


def digest_of(tree: dict[str, Any]) -> str:
    """SHA-256 over a manifest's keys and values: the manifest proves the files, this proves the manifest."""
    canonical = json.dumps(tree, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def parse_manifest(text: str | bytes) -> Manifest:
    """Raises `ManifestError` on anything a whole manifest of this format cannot contain."""
    try:
        tree = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"not readable as JSON: {error}") from error
    if not isinstance(tree, dict):
        raise ManifestError(f"must be a JSON object, got {type(tree).__name__}")
    version = _typed(tree.pop("format", None), int, "format")
    if version != FORMAT:
        raise ManifestError(f"format {version} is not format {FORMAT}: load it with the version that wrote it")
    if tree.pop(OWN_DIGEST, None) != digest_of({"format": version, **tree}):
        raise ManifestError(f"changed after it was written ({OWN_DIGEST} differs)")
    names = [field.name for field in dataclasses.fields(Manifest)]
    for name in [*names, *tree]:
        if (name in tree) != (name in names):
            raise ManifestError(f"{'missing' if name in names else 'unknown'} key '{name}'")
    manifest = _build(tree)
    if manifest.world_size < 1:
        raise ManifestError("world_size must be at least 1, got 0")
    return manifest


def _build(tree: dict[str, Any]) -> Manifest:
    return Manifest(
        **{name: _count(tree[name], name) for name in ("step", "epoch", "samples_consumed", "world_size")},
        mesh={name: _count(size, f"mesh.{name}") for name, size in _typed(tree["mesh"], dict, "mesh").items()},
        created_utc=_typed(tree["created_utc"], str, "created_utc"),
        nonce=_typed(tree["nonce"], str, "nonce"),
        files=_files(tree["files"]),
        tensors={
            name: _tensor(info, f"tensors.{name}") for name, info in _typed(tree["tensors"], dict, "tensors").items()
        },
        param_names=tuple(
            _typed(name, str, "param_names") for name in _typed(tree["param_names"], list, "param_names")
        ),
        fingerprints={
            name: _typed(value, str, f"fingerprints.{name}")
            for name, value in _typed(tree["fingerprints"], dict, "fingerprints").items()
        },
        finite=_typed(tree["finite"], bool, "finite"),
        loss=_measure(tree["loss"], "loss"),
        grad_norm=_measure(tree["grad_norm"], "grad_norm"),
    )


def _files(value: Any) -> tuple[FileRecord, ...]:
    records = tuple(_file(item, f"files[{i}]") for i, item in enumerate(_typed(value, list, "files")))
    paths = {record.path for record in records}
    if not records or len(paths) < len(records):
        raise ManifestError("files must list each file once" if records else "files is empty")
    return records


def _file(value: Any, where: str) -> FileRecord:
    item = _keys(value, ("path", "size_bytes", "sha256"), where)
    path = _typed(item["path"], str, f"{where}.path")
    pure = PurePosixPath(path)
    if not pure.parts or pure.is_absolute() or ".." in pure.parts or str(pure) != path or not path.isprintable():
        raise ManifestError(f"{where}.path must be a plain relative path inside the checkpoint, got {path!r}")
    sha256 = _typed(item["sha256"], str, f"{where}.sha256")
    if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef"):
        raise ManifestError(f"{where}.sha256 must be 64 lower-case hex digits, got {sha256!r}")
    return FileRecord(path, _count(item["size_bytes"], f"{where}.size_bytes"), sha256)


def _tensor(value: Any, where: str) -> TensorInfo:
    item = _keys(value, ("shape", "dtype"), where)
    shape = tuple(_count(size, f"{where}.shape") for size in _typed(item["shape"], list, f"{where}.shape"))
    return TensorInfo(shape, _typed(item["dtype"], str, f"{where}.dtype"))


def _keys(value: Any, names: tuple[str, ...], where: str) -> dict[str, Any]:
    item = _typed(value, dict, where)
    if set(item) != set(names):
        raise ManifestError(f"{where} must have the keys {', '.join(names)}; got {', '.join(item)}")
    return item


def _typed(value: Any, kind: type[T], where: str) -> T:
    if type(value) is not kind:  # bool is an int to isinstance
        raise ManifestError(f"{where} must be {kind.__name__}, got {value!r:.80}")
    return value


def _count(value: Any, where: str) -> int:
    if _typed(value, int, where) < 0:
        raise ManifestError(f"{where} must not be negative, got {value}")
    return int(value)


def _measure(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not abs(value) < math.inf:
        raise ManifestError(f"{where} must be a finite number or null, got {value!r:.80}")
    try:
        return float(value)
    except OverflowError as error:
        raise ManifestError(f"{where} is beyond the range of a float") from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        raise ValueError("a key appears twice in one object")
    return tree


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def verify_files(path: Path, manifest: Manifest, *, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Read share `(index, count)` of the files whole and name each that differs from the manifest; [] = all proven."""
    index, count = share
    problems = (_problem(path, record) for record in deal_by_size(manifest.files, count)[index])
    return [problem for problem in problems if problem is not None]


def deal_by_size(files: tuple[FileRecord, ...], count: int) -> list[list[FileRecord]]:
    """Split files into `count` shares of similar bytes, the same way on every rank: largest first, to the emptiest."""
    shares: list[list[FileRecord]] = [[] for _ in range(count)]
    loads_bytes = [0] * count
    for record in sorted(files, key=lambda record: (-record.size_bytes, record.path)):
        emptiest = loads_bytes.index(min(loads_bytes))
        shares[emptiest].append(record)
        loads_bytes[emptiest] += record.size_bytes
    return shares


def _problem(root: Path, record: FileRecord) -> str | None:
    try:
        size_bytes = fsio.size_within(root, record.path)
        if size_bytes != record.size_bytes:
            return f"{record.path} has {size_bytes} bytes, {record.size_bytes} were written"
        if fsio.sha256_of(root / record.path) != record.sha256:
            return f"{record.path} changed after it was written (sha256 differs)"
    except OSError as error:
        return f"{record.path} cannot be read: {error.strerror or error}"
    return None
