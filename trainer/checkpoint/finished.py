"""`finished.json`: the run ended with this checkpoint, and its report and logs are written. No
torch.

The file is added to the last checkpoint after the report is written and just before the lock is
released. It is not part of the checkpoint: the manifest does not list it.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.runtime.files import atomic_write
from trainer.runtime.json_lines import read_object

FILE_NAME = "finished.json"


@dataclass(frozen=True)
class Finished:
    """The end of a run.

    `config` and `data_files` (size and modification time by path) are those of the start. A start
    with the same ones has nothing to do, and prints `message`.
    """

    ended_early: bool
    message: str
    config: Mapping[str, Any] = field(default_factory=dict)
    data_files: Mapping[str, list[int]] = field(default_factory=dict)


def write(checkpoint: Path, finished: Finished) -> None:
    """Record the end of the run. After a failure the next start ends the run again."""
    with suppress(OSError):
        atomic_write(checkpoint / FILE_NAME, json.dumps(asdict(finished)))


def read(checkpoint: Path) -> Finished | None:
    """Return the end recorded in a checkpoint; None without a readable record."""
    try:
        return Finished(**read_object(checkpoint / FILE_NAME))
    except TypeError:
        return None
