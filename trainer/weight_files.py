"""Find the files of a directory with a model's weights, in the order in which transformers looks
for them (floor 1).
"""

import json
from pathlib import Path

from trainer.config import ConfigError

SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_OLDER = "pytorch_model.bin", "pytorch_model.bin.index.json"


def weight_files(directory: Path) -> list[Path]:
    """One file, else those of an index, else the same in the older format; none. Raises
    `ConfigError`.
    """
    for single, index in ((SINGLE_FILE, INDEX), _OLDER):
        if (directory / single).exists():
            return [directory / single]
        if (directory / index).exists():
            return [directory / name for name in sorted(set(read_index(directory, index).values()))]
    return []


def read_index(path: Path, index: str = INDEX) -> dict[str, str]:
    """Tensor name -> file name, of weights in several files. Raises `ConfigError` when one of
    them is not there.
    """
    try:
        weight_map: dict[str, str] = json.loads((path / index).read_text(encoding="utf-8"))[
            "weight_map"
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path / index} is no index of weights: {error!r}") from error
    if missing := sorted({file for file in weight_map.values() if not (path / file).exists()}):
        raise ConfigError(f"{path / index} names files that are not there: {', '.join(missing)}")
    return weight_map
