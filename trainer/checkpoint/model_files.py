"""What an export takes over from the model directory, read once at the start.

The directory may be removed or changed while the run trains (a purged scratch disk, another
revision in the Hub's cache): exports still hold what was trained with, and the change is reported.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor
from transformers.modeling_utils import str_to_torch_dtype

from trainer.checkpoint import fsio
from trainer.config import ConfigError
from trainer.weights import StoredTensor, bytes_of

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
TEMPLATES = ("chat_template.jinja", "chat_template.json")
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "spiece.model",
    "*.tiktoken",
    "*processor_config.json",
    "*.py",
)
_VOCABULARIES = ("vocab.json", "vocab.txt", "merges.txt")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def companion_files(directory: Path) -> list[Path]:
    """The files that an export copies unchanged: tokenizer, chat template, processor, the
    model's own code.
    """
    patterns = (*_TOKENIZER_FILES, *_VOCABULARIES, *TEMPLATES)
    return sorted(
        {path for pattern in patterns for path in directory.glob(pattern) if path.is_file()}
    )


class FileState(NamedTuple):
    """Size in bytes and times in ns. Writing sets both times; `ctime` cannot be set back, but a
    new link sets it.
    """

    size: int
    mtime: int
    ctime: int


@dataclass(frozen=True)
class ModelFiles:
    """The small files of a model directory.

    contents: name -> bytes of everything but the weights that an export needs; weights: name ->
    state of each file with weights.
    """

    directory: Path
    contents: Mapping[str, bytes]
    weights: Mapping[str, FileState]

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Raises `ConfigError` for a file that cannot be read."""
        try:
            return cls(directory, _contents(directory), _weight_states(directory))
        except OSError as error:
            raise ConfigError(
                f"model.partial_pretrain={directory}: a file cannot be read: {error}"
            ) from error

    @property
    def companions(self) -> dict[str, bytes]:
        """What an export copies unchanged."""
        return {
            name: data
            for name, data in self.contents.items()
            if name not in (CONFIG, GENERATION_CONFIG)
        }

    @property
    def digest(self) -> str:
        """SHA-256 over the names and bytes of `contents`."""
        sha256 = hashlib.sha256()
        for name, data in sorted(self.contents.items()):
            sha256.update(f"{name} {len(data)}\n".encode())
            sha256.update(data)
        return sha256.hexdigest()

    def changes(self, *, is_strict: bool = False) -> list[str]:
        """How the directory differs from what was read, one entry a file; a single one if it is
        gone altogether.

        `is_strict` also counts files with weights whose `ctime` alone differs: they may have
        changed and been put back.
        """
        try:
            contents, weights = _contents(self.directory), _weight_states(self.directory)
        except OSError as error:
            return [f"it cannot be read: {error}"]
        if not contents and not weights:
            return ["it is gone"]
        before: dict[str, object] = {**self.contents, **self.weights}
        now: dict[str, object] = {**contents, **weights}
        gone = [f"{name} is gone" for name in sorted(before.keys() - now.keys())]
        both = sorted(before.keys() & now.keys())
        changed = [
            f"{name} changed"
            for name in both
            if _differs(before[name], now[name], is_strict=is_strict)
        ]
        return [*gone, *changed, *(f"{name} is new" for name in sorted(now.keys() - before.keys()))]


def _differs(before: object, now: object, *, is_strict: bool) -> bool:
    if isinstance(before, FileState) and isinstance(now, FileState) and not is_strict:
        return before[:2] != now[:2]
    return before != now


def _contents(directory: Path) -> dict[str, bytes]:
    own = (path for name in (CONFIG, GENERATION_CONFIG) if (path := directory / name).is_file())
    return {path.name: path.read_bytes() for path in (*own, *companion_files(directory))}


def _weight_states(directory: Path) -> dict[str, FileState]:
    files = sorted(
        path for pattern in _WEIGHTS for path in directory.glob(pattern) if path.is_file()
    )
    found = {path.name: path.stat() for path in files}
    return {
        name: FileState(state.st_size, state.st_mtime_ns, state.st_ctime_ns)
        for name, state in found.items()
    }


def copied(tensors: Mapping[str, StoredTensor], directory: Path) -> dict[str, StoredTensor]:
    """The same tensors, read from a copy that is made now, in a file without a name in `directory`.

    An open file survives its deletion, but not being overwritten or truncated; nobody else can
    reach the copy. It is gone when the process ends. Raises `OSError`.
    """
    file = fsio.UnnamedFile(directory)
    copies: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        data = bytes_of(tensor.whole())
        place = file.append(data), data.nbytes
        copies[name] = _in_copy(tensor, file, place)
    return copies


def _in_copy(tensor: StoredTensor, file: fsio.UnnamedFile, place: tuple[int, int]) -> StoredTensor:
    def read(where: tuple[slice, ...]) -> Tensor:
        data = file.read(*place)
        values = (
            torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        )
        return values.view(str_to_torch_dtype[tensor.dtype]).reshape(tensor.shape)[where]

    return StoredTensor(tensor.file, tensor.shape, tensor.dtype, read)
