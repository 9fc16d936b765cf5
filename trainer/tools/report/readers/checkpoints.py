"""Finds the checkpoints in a run directory. For this trainer's checkpoints, file names and sizes
reveal damage.
"""

import os
import re
from contextlib import suppress
from pathlib import Path

from trainer.checkpoint import fsio, layout
from trainer.runtime.files import tree_bytes
from trainer.tools.report.readers.parsing import MAX_STEP
from trainer.tools.report.run_log import CheckpointState

STATE = "trainer_state.json"
_FOREIGN = re.compile(r"checkpoint-\d+")


def find_checkpoints(run_dir: Path) -> tuple[CheckpointState, ...]:
    """Return every `global_step_N` and `checkpoint-N` directory, sorted by step.

    Directories that disappear in the meantime or cannot be read are left out.
    """
    found = []
    with suppress(OSError):
        for info in layout.checkpoints(run_dir):
            records = info.manifest.files if info.manifest else ()
            problems = [info.reason, *(fsio.size_problem(info.path, record) for record in records)]
            if info.path.is_dir():
                faults = tuple(filter(None, problems))
                size_bytes = tree_bytes(info.path)
                found.append(CheckpointState(info.step, info.path, size_bytes, faults))
    for path in run_dir.glob("checkpoint-*/"):
        with suppress(OSError):
            # A directory with only a trainer state is a copy of the log, not a checkpoint.
            if _FOREIGN.fullmatch(path.name) and os.listdir(path) != [STATE]:
                step = int(path.name.partition("-")[2])
                found.append(CheckpointState(step, path, tree_bytes(path)))
    usable = [state for state in found if state.step < MAX_STEP]
    return tuple(sorted(usable, key=lambda state: state.step))
