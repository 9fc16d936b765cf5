"""Finds the checkpoints in a run directory. The names and sizes of files show damage in ours."""

import re
from pathlib import Path

from trainer.checkpoint import fsio, layout
from trainer.runtime.files import tree_bytes
from trainer.tools.report.run_log import CheckpointState

STATE = "trainer_state.json"
_STEP_DIR = re.compile(r"(global_step_|checkpoint-)(\d{1,15})")


def find_checkpoints(run_dir: Path) -> tuple[CheckpointState, ...]:
    """Return every `global_step_N` and `checkpoint-N` directory, sorted by step."""
    found = []
    for path in run_dir.glob("*/"):
        match = _STEP_DIR.fullmatch(path.name)
        # A directory with only a trainer state is a copy of the log, not a checkpoint.
        if match and [entry.name for entry in path.iterdir()] != [STATE]:
            faults = _faults(path) if match[1] == "global_step_" else ()
            found.append(CheckpointState(int(match[2]), path, tree_bytes(path), faults))
    return tuple(sorted(found, key=lambda state: state.step))


def _faults(path: Path) -> tuple[str, ...]:
    info = layout.inspect(path)
    if info.manifest is None:
        return (info.reason,)
    problems = (fsio.size_problem(path, record) for record in info.manifest.files)
    return tuple(problem for problem in problems if problem)
