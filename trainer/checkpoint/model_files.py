"""Files that an export takes over from the model directory, read once at the start.

The directory may be removed or changed while the run trains (a purged scratch disk, another
revision in the Hub's cache): exports still hold what was trained with.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from trainer.config import ConfigError

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
TEMPLATES = ("chat_template.jinja", "chat_template.json")
_COMPANIONS = (
    *TEMPLATES,
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "spiece.model",
    "*.tiktoken",
    "*processor_config.json",
    "*.py",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def companion_files(directory: Path) -> list[Path]:
    """The files that an export copies unchanged: tokenizer, chat template, processor, the
    model's own code.
    """
    return sorted(_found(directory, _COMPANIONS))


def _found(directory: Path, patterns: tuple[str, ...]) -> set[Path]:
    return {path for pattern in patterns for path in directory.glob(pattern) if path.is_file()}


@dataclass(frozen=True)
class ModelFiles:
    """The small files of a model directory.

    contents: name -> bytes of everything but the weights that an export needs; weights: name ->
    size and times of each file with weights.
    """

    directory: Path
    contents: Mapping[str, bytes]
    weights: Mapping[str, tuple[int, int, int]]

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
        """Files that an export copies unchanged."""
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

    def changes(self) -> list[str]:
        """Return how the directory differs from what was read, one entry a file."""
        try:
            now = {**_contents(self.directory), **_weight_states(self.directory)}
        except OSError as error:
            return [f"it cannot be read: {error}"]
        before = {**self.contents, **self.weights}
        kinds = {
            "is gone": before.keys() - now.keys(),
            "changed": {name for name in before.keys() & now.keys() if before[name] != now[name]},
            "is new": now.keys() - before.keys(),
        }
        return [f"{name} {kind}" for kind, names in kinds.items() for name in sorted(names)]


def _contents(directory: Path) -> dict[str, bytes]:
    own = _found(directory, (CONFIG, GENERATION_CONFIG))
    return {path.name: path.read_bytes() for path in (*own, *companion_files(directory))}


def _weight_states(directory: Path) -> dict[str, tuple[int, int, int]]:
    """Return size and times of each file; `ctime` cannot be set back."""
    found = {path.name: path.stat() for path in _found(directory, _WEIGHTS)}
    return {
        name: (state.st_size, state.st_mtime_ns, state.st_ctime_ns) for name, state in found.items()
    }
