"""What stands in a mirror, and which checkpoint of it a run continues from (floor 3, no torch).

A mirror has the layout of a run directory, so that a copy of it is one:

    run.json                            whose mirror it is
    latest_checkpointed_iteration.txt   the step the run is at; a checkpoint after it belongs to a
    past that was undone global_step_N/…                     the files of the checkpoint
    global_step_N/run.tar.gz            logs and identity of the run as they were when it was
    uploaded global_step_N/manifest.json         written last and removed first: its presence
    commits

Exports alone in a repository of the Hub are a model to load: the files of the newest
`huggingface/`, its manifest.json and run.json lie at the URL itself.
"""

from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass

from trainer.checkpoint import layout
from trainer.checkpoint.fsio import FileRecord
from trainer.checkpoint.layout import POINTER
from trainer.checkpoint.manifest import MANIFEST, Manifest, ManifestError, parse_manifest
from trainer.mirror.storage import Storage, StorageError

RUN_FILES = "run.tar.gz"
HF_MODEL = "hf_model"


@dataclass(frozen=True)
class MirrorState:
    """`whole`: committed, every file in its size. `incomplete`: a manifest without that, and why.
    `steps`: all of which there is anything.
    """

    pointer: int | None
    whole: dict[int, Manifest]
    incomplete: dict[int, str]
    steps: Set[int]

    @property
    def candidates(self) -> list[Manifest]:
        """What a run may continue from, the first choice first."""
        newest_first = [self.whole[step] for step in sorted(self.whole, reverse=True)]
        return [
            m for m in newest_first if self.pointer is not None and m.step <= self.pointer
        ] or newest_first


def look(storage: Storage, contents: str) -> MirrorState:
    """Judged by names and sizes. Raises `StorageError`."""
    sizes = storage.sizes()
    places = {
        step: name.split("/")[0]
        for name in sizes
        if (step := layout.parse_step(name.split("/")[0])) is not None
    }
    whole: dict[int, Manifest] = {}
    incomplete: dict[int, str] = {}
    for step, place in places.items():
        text = _read(storage, f"{place}/{MANIFEST}", sizes)
        if text is None:
            continue
        try:
            manifest = parse_manifest(text)
            missing = [
                r.path
                for r in mirrored(manifest, contents)
                if sizes.get(f"{place}/{r.path}") != r.size_bytes
            ]
        except ManifestError as error:
            incomplete[step] = f"{MANIFEST}: {error}"
            continue
        if missing or manifest.step != step:
            incomplete[step] = (
                f"{missing[0]} is missing or cut"
                if missing
                else f"it belongs to step {manifest.step}"
            )
        else:
            whole[step] = manifest
    if (model := look_at_model(storage, sizes)) is not None:
        incomplete[model.step] = "its export alone is there"
    return MirrorState(
        _pointer(storage, sizes) if sizes else None, whole, incomplete, places.keys()
    )


def look_at_model(storage: Storage, sizes: Mapping[str, int]) -> Manifest | None:
    """Whose export lies whole at the URL itself. Raises `StorageError`."""
    text = _read(storage, MANIFEST, sizes) if MANIFEST in sizes else None
    with suppress(ManifestError):
        manifest = None if text is None else parse_manifest(text)
        if manifest and all(
            sizes.get(in_model(r.path)) == r.size_bytes for r in mirrored(manifest, HF_MODEL)
        ):
            return manifest
    return None


def mirrored(manifest: Manifest, contents: str) -> list[FileRecord]:
    """The files of a checkpoint that such a mirror holds."""
    return [
        record for record in manifest.files if contents != HF_MODEL or layout.is_export(record.path)
    ]


def in_model(path: str) -> str:
    """The name of a file of a checkpoint where its export is a model."""
    return path.removeprefix(f"{layout.HUGGINGFACE}/")


def _pointer(storage: Storage, sizes: Mapping[str, int]) -> int | None:
    """A text without its end was cut."""
    text = (_read(storage, POINTER, sizes) or b"").decode(errors="replace")
    return int(text) if text.endswith("\n") and text.strip().isdecimal() else None


def _read(storage: Storage, name: str, sizes: Mapping[str, int]) -> bytes | None:
    """Also of what the listing does not show, which may be late; what comes in another size was
    not read to its end.
    """
    data = storage.read(name)
    if data is not None and len(data) != sizes.get(name, len(data)):
        raise StorageError(
            f"{storage.url}/{name} has {sizes[name]} bytes, {len(data)} of them came"
        )
    return data
