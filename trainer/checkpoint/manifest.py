"""The manifest of a checkpoint: what was written, so that a reader can prove that it is all
there and unchanged.
"""

import dataclasses
import hashlib
import json
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, get_args, get_origin

from trainer.checkpoint import fsio
from trainer.checkpoint.fsio import FileRecord
from trainer.progress import Position

FORMAT = 2
DROPPED_SINCE = {1: ("param_names", "finite")}
"""Keys of the older formats, which are read too, that no reader ever needed."""
MANIFEST = "manifest.json"
OWN_DIGEST = "manifest_sha256"


class ManifestError(ValueError):
    """The text is not a manifest this version understands; the message names the key and the
    cause.
    """


@dataclass(frozen=True)
class TensorInfo:
    """Global shape and dtype (`float32`) of one parameter."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Manifest:
    """Whole numbers are never negative. `mesh` maps dimension names to sizes, outermost first.

    `created_utc` is for people: nothing is ever ordered by it. `loss` and `grad_norm` are those of
    `step`. Of a checkpoint of several parts `text_names` are those that its files give the tensors
    of the text part, and `num_passed_through` tensors are exported as they were; the keys are
    absent otherwise.
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
        """Parts that one copy of the parameters is split into: the first so many ranks hold one
        whole copy.
        """
        return self.mesh.get("fsdp", self.world_size)

    def to_json(self) -> str:
        """Raises `ValueError` for NaN or infinity: a state that is not finite is not saved."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        values = {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if value != defaults[name]
        }
        tree = {"format": FORMAT, **values}
        return json.dumps(tree | {OWN_DIGEST: digest_of(tree)}, indent=1, allow_nan=False) + "\n"


def digest_of(tree: dict[str, Any]) -> str:
    """SHA-256 over a manifest's keys and values: the manifest proves the files, this proves the
    manifest.
    """
    canonical = json.dumps(tree, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def parse_manifest(text: str | bytes) -> Manifest:
    """Raises `ManifestError` on anything a whole manifest of this format cannot contain."""
    try:
        tree = json.loads(
            text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"not readable as JSON: {error}") from error
    if not isinstance(tree, dict):
        raise ManifestError(f"must be a JSON object, got {type(tree).__name__}")
    version = _parsed(int, tree.pop("format", None), "format")
    if version != FORMAT and version not in DROPPED_SINCE:
        raise ManifestError(
            f"format {version} is not format {FORMAT}: load it with the version that wrote it"
        )
    if tree.pop(OWN_DIGEST, None) != digest_of({"format": version, **tree}):
        raise ManifestError(f"changed after it was written ({OWN_DIGEST} differs)")
    known = {
        name: value for name, value in tree.items() if name not in DROPPED_SINCE.get(version, ())
    }
    manifest: Manifest = _parsed(Manifest, known, "")
    _require_plain_files(manifest.files)
    if manifest.world_size < 1:
        raise ManifestError("world_size must be at least 1, got 0")
    return manifest


def _parsed(kind: Any, value: Any, where: str) -> Any:
    """What JSON gave as the type `kind`, which is one that a field of `Manifest` has, or holds."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        fields = {field.name: field.type for field in dataclasses.fields(kind)}
        required = {
            field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING
        }
        found = _parsed(dict, value, where)
        places = {name: f"{where}.{name}".removeprefix(".") for name in (*fields, *found)}
        for name, place in places.items():
            if name not in fields or (name in required and name not in found):
                raise ManifestError(f"{'missing' if name in fields else 'unknown'} key '{place}'")
        return kind(
            **{name: _parsed(fields[name], item, places[name]) for name, item in found.items()}
        )
    if kind == float | None:
        return None if value is None else _measure(value, where)
    if get_origin(kind) is tuple:
        items = enumerate(_parsed(list, value, where))
        return tuple(_parsed(get_args(kind)[0], item, f"{where}[{i}]") for i, item in items)
    if get_origin(kind) is dict:
        pairs = _parsed(dict, value, where).items()
        return {name: _parsed(get_args(kind)[1], item, f"{where}.{name}") for name, item in pairs}
    if type(value) is not kind:  # bool is an int to isinstance
        raise ManifestError(f"{where} must be {kind.__name__}, got {value!r:.80}")
    if kind is int and value < 0:
        raise ManifestError(f"{where} must not be negative, got {value}")
    return value


def _measure(value: Any, where: str) -> float:
    with suppress(OverflowError):  # an integer beyond the range of a float
        if type(value) in (int, float) and math.isfinite(value):
            return float(value)
    raise ManifestError(f"{where} must be a finite number or null, got {value!r:.80}")


def _require_plain_files(files: tuple[FileRecord, ...]) -> None:
    if not files or len({record.path for record in files}) < len(files):
        raise ManifestError("files must list each file once" if files else "files is empty")
    for i, (path, _, sha256) in enumerate(map(dataclasses.astuple, files)):
        pure = PurePosixPath(path)
        if (
            not pure.parts
            or pure.is_absolute()
            or ".." in pure.parts
            or str(pure) != path
            or not path.isprintable()
        ):
            raise ManifestError(
                f"files[{i}].path must be a plain relative path inside the checkpoint, got {path!r}"
            )
        if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef"):
            raise ManifestError(
                f"files[{i}].sha256 must be 64 lower-case hex digits, got {sha256!r}"
            )


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        raise ValueError("a key appears twice in one object")
    return tree


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def verify_files(path: Path, manifest: Manifest, *, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Read share `(index, count)` of the files whole and name each that differs from the
    manifest; [] = all proven.
    """
    index, count = share
    return [
        problem
        for record in deal_by_size(manifest.files, count)[index]
        if (problem := _problem(path, record))
    ]


def deal_by_size(files: tuple[FileRecord, ...], count: int) -> list[list[FileRecord]]:
    """Split files into `count` shares of similar bytes, the same way on every rank: largest
    first, to the emptiest.
    """
    shares: list[list[FileRecord]] = [[] for _ in range(count)]
    loads_bytes = [0] * count
    for record in sorted(files, key=lambda record: (-record.size_bytes, record.path)):
        emptiest = loads_bytes.index(min(loads_bytes))
        shares[emptiest].append(record)
        loads_bytes[emptiest] += record.size_bytes
    return shares


def _problem(root: Path, record: FileRecord) -> str | None:
    problem = fsio.size_problem(root, record)
    try:
        if problem is None and fsio.sha256_of(root / record.path) != record.sha256:
            return f"{record.path} changed after it was written (sha256 differs)"
    except OSError as error:
        return f"{record.path}: {error.strerror or error}"
    return problem
