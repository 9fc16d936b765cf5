"""Finds the checkpoints in a run directory. The names and sizes of files show damage in ours."""

import re
from pathlib import Path

from trainer.checkpoint import fsio, layout
from trainer.runtime.files import tree_bytes
from trainer.tools.report.readers.parsing import MAX_STEP
from trainer.tools.report.run_log import CheckpointState

STATE = "trainer_state.json"
_FOREIGN = re.compile(r"checkpoint-(\d+)")


def find_checkpoints(run_dir: Path) -> tuple[CheckpointState, ...]:
    """Return every `global_step_N` and `checkpoint-N` directory, sorted by step."""
    found = []
    for path in run_dir.glob("*/"):
        foreign = _FOREIGN.fullmatch(path.name)
        step = int(foreign[1]) if foreign else layout.parse_step(path.name)
        if step is None or step >= MAX_STEP:
            continue
        # A directory with only a trainer state is a copy of the log, not a checkpoint.
        if [entry.name for entry in path.iterdir()] != [STATE]:
            faults = () if foreign else _faults(path)
            found.append(CheckpointState(step, path, tree_bytes(path), faults))
    return tuple(sorted(found, key=lambda state: state.step))


def _faults(path: Path) -> tuple[str, ...]:
    info = layout.inspect(path)
    if info.manifest is None:
        return (info.reason,)
    problems = (fsio.size_problem(path, record) for record in info.manifest.files)
    return tuple(problem for problem in problems if problem)
