"""`finished.json` marks the last checkpoint of a finished run. Imports no torch.

The run adds the file to its last checkpoint after it has written its report and logs, and just
before it releases the lock. The file is not part of the checkpoint: the manifest does not list it.
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

    `config` and `data_files` (size and modification time by path) were recorded when the run
    started. A later start with equal values has nothing to do, and prints `message`.
    """

    ended_early: bool
    message: str
    config: Mapping[str, Any] = field(default_factory=dict)
    data_files: Mapping[str, list[int]] = field(default_factory=dict)


def write(checkpoint: Path, finished: Finished) -> None:
    """Record the end of the run. If the write fails, the next start repeats the end of the run."""
    with suppress(OSError):
        atomic_write(checkpoint / FILE_NAME, json.dumps(asdict(finished)))


def read(checkpoint: Path) -> Finished | None:
    """Return the end of the run as recorded in a checkpoint; None if there is no
    readable record.
    """
    try:
        return Finished(**read_object(checkpoint / FILE_NAME))
    except TypeError:
        return None
