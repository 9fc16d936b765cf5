"""Finds the safetensors files of a directory that hold a model's weights."""

import json
from pathlib import Path

from trainer.config import ConfigError

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def weight_files(directory: Path) -> list[Path]:
    """Return the single weight file, or else the files that the index names, in transformers'
    order.

    Return an empty list if there is neither. Raise `ConfigError` if the index is invalid.
    """
    if (directory / SINGLE_FILE).exists():
        return [directory / SINGLE_FILE]
    if (directory / INDEX).exists():
        return [directory / name for name in sorted(set(read_index(directory).values()))]
    return []


def read_index(path: Path) -> dict[str, str]:
    """Return {tensor: file name} for weights in several files. Raise `ConfigError` if the index is
    invalid or a file is missing.
    """
    try:
        weight_map: dict[str, str] = json.loads((path / INDEX).read_bytes())["weight_map"]
        names = set(weight_map.values())
        if outside := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{outside[0]!r} leads to a different directory")
        missing = sorted(name for name in names if not (path / name).exists())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path / INDEX} is not a valid weight index: {error!r}") from error
    if missing:
        raise ConfigError(f"{path / INDEX} names files that do not exist: {', '.join(missing)}")
    return weight_map
