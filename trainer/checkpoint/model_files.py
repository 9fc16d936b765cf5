"""The files of the model directory that an export needs, read once at the start.

The directory may be removed or changed while the run trains (a purged scratch disk, a new revision
in the Hub's cache). Exports still contain the files that the run started with.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from trainer.config import ConfigError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TEMPLATES = ("chat_template.jinja", "chat_template.json")
MORE_TEMPLATES = "additional_chat_templates"
"""The directory of a tokenizer's additional chat templates, such as one for rows with tools."""
_COMPANIONS = (
    *TEMPLATES,
    f"{MORE_TEMPLATES}/*.jinja",
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
    """Return the files that an export copies unchanged.

    These are the tokenizer, the chat template, the processor, and the model's own code.
    """
    return sorted(_found(directory, _COMPANIONS))


def _found(directory: Path, patterns: tuple[str, ...]) -> set[Path]:
    return {path for pattern in patterns for path in directory.glob(pattern) if path.is_file()}


@dataclass(frozen=True)
class ModelFiles:
    """The small files of a model directory.

    contents: relative path -> bytes of every file that an export needs, except weights;
    weights: name -> size in bytes, `mtime` and `ctime` in ns of each weight file. A `ctime` cannot
    be set back.
    """

    directory: Path
    contents: Mapping[str, bytes]
    weights: Mapping[str, tuple[int, int, int]]

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read the files in `directory`. Raises `ConfigError` for a file that cannot be read."""
        small = _found(directory, (CONFIG, GENERATION_CONFIG, *_COMPANIONS))
        try:
            contents = {
                path.relative_to(directory).as_posix(): path.read_bytes() for path in sorted(small)
            }
            states = {path.name: path.stat() for path in _found(directory, _WEIGHTS)}
        except OSError as error:
            raise ConfigError(
                f"model.partial_pretrain={directory}: cannot read a file: {error}.\n"
                f"Fix: make it readable, or choose a different model directory"
            ) from error
        weights = {
            name: (state.st_size, state.st_mtime_ns, state.st_ctime_ns)
            for name, state in states.items()
        }
        return cls(directory, contents, weights)

    @property
    def digest(self) -> str:
        """SHA-256 over the names and bytes of `contents`."""
        sha256 = hashlib.sha256()
        for name, data in sorted(self.contents.items()):
            sha256.update(f"{name} {len(data)}\n".encode())
            sha256.update(data)
        return sha256.hexdigest()

    def changes(self) -> list[str]:
        """Return the names of the files that have changed since they were read."""
        try:
            read_again = ModelFiles.read(self.directory)
        except ConfigError as error:
            return [str(error)]
        now = {**read_again.contents, **read_again.weights}
        before = {**self.contents, **self.weights}
        return sorted({name for name, _ in now.items() ^ before.items()})
