"""Checkpoints beside a log, and whether they are whole as far as names and sizes tell."""

import re
from pathlib import Path

from trainer.checkpoint import fsio, layout
from trainer.runtime.files import tree_bytes
from trainer.tools.report.run_log import CheckpointState

STATE = "trainer_state.json"
_STEP_DIR = re.compile(r"(?:global_step_|checkpoint-)(\d{1,15})")


def find_checkpoints(run_dir: Path) -> tuple[CheckpointState, ...]:
    """Return every `global_step_N` and `checkpoint-N`, by rising step."""
    found = []
    for path in run_dir.iterdir() if run_dir.is_dir() else ():
        match = _STEP_DIR.fullmatch(path.name)
        # A `trainer_state.json` that was copied with its directory is no checkpoint.
        if match and path.is_dir() and [entry.name for entry in path.glob("*")] != [STATE]:
            is_own = path.name.startswith("global_step_")
            faults = _own_faults(path) if is_own else _transformers_faults(path)
            found.append(CheckpointState(int(match[1]), path, tree_bytes(path), tuple(faults)))
    return tuple(sorted(found, key=lambda state: state.step))


def _own_faults(path: Path) -> list[str]:
    info = layout.inspect(path)
    if info.manifest is None:
        return [info.reason]
    problems = (fsio.size_problem(path, record) for record in info.manifest.files)
    return [problem for problem in problems if problem]


def _transformers_faults(path: Path) -> list[str]:
    names = {entry.name for entry in path.iterdir()} - {"training_args.bin"}
    weights = [path / name for name in names if name.endswith((".safetensors", ".bin"))]
    is_sharded = any(name.startswith(("global_step", "pytorch_model_fsdp")) for name in names)
    faults = [f"{file.name} is empty" for file in weights if file.stat().st_size == 0]
    return faults if weights or is_sharded else ["no weights"]
