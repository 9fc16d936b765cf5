"""`trainer_state.json` of transformers and TRL, in the run directory or in its newest checkpoint."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.report.readers.aliases import canonical
from trainer.report.readers.checkpoints import find_checkpoints
from trainer.report.readers.frame import Frame
from trainer.report.readers.parsing import Faults, as_step, flat
from trainer.report.run_log import RunLog, UnreadableLogError
from trainer.runtime.json_lines import read_object

FILE_NAME = "trainer_state.json"
NAN_NOTE = (
    "transformers replaces a NaN or infinite loss by the mean of the interval unless logging_nan_inf_filter is off: "
    "a loss of 0 or a grad_norm of NaN are the only traces"
)
MEAN_NOTE = "the loss is the mean over a logging interval, grad_norm and the learning rate are those of its last step"
_CHECKPOINT = re.compile(r"checkpoint-(\d{1,15})")
_HISTORY = re.compile(r'"log_history"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")


@dataclass
class _State:
    history: list[Any]
    facts: dict[str, Any] = field(default_factory=dict)
    is_torn: bool = False


def state_files(run_dir: Path) -> list[Path]:
    """The state in the run directory, which the end of the training wrote, then those of checkpoints, newest first."""
    checkpoints = [(int(match[1]), path) for path in run_dir.iterdir() if (match := _CHECKPOINT.fullmatch(path.name))]
    directories = [run_dir, *(path for _, path in sorted(checkpoints, reverse=True))]
    return [directory / FILE_NAME for directory in directories if (directory / FILE_NAME).is_file()]


def read_transformers(path: Path) -> RunLog:
    state = _load(path)
    faults, frame = Faults(int(state.is_torn)), Frame()
    config = state.facts
    for row in state.history:
        step = as_step(row.get("step")) if isinstance(row, dict) else None
        if step is None:
            faults.num_unparsed += 1
        elif "train_runtime" in row:  # the sum of the run, at its last step
            config |= {f"summary.{key}": value for key, value in row.items() if key != "step"}
        else:
            frame.add(step, {key: value for key, value in row.items() if key != "step"})
    resolved = frame.resolve(canonical)
    run_dir = path.parent.parent if _CHECKPOINT.fullmatch(path.parent.name) else path.parent
    notes = [MEAN_NOTE, NAN_NOTE]
    if path.parent != run_dir:
        notes.append(f"read from {path.parent.name}: what came after that checkpoint is not in it")
    return RunLog(
        path=path,
        source="transformers",
        series=resolved.series,
        num_rows=frame.num_rows,
        num_unparsed=faults.num_unparsed,
        config=flat(read_object(run_dir / "args.json")) | config,
        checkpoints=find_checkpoints(run_dir),
        total_steps=as_step(config.get("max_steps")) or None,
        num_disordered_rows=resolved.num_disordered_rows,
        notes=tuple(notes),
    )


def _load(path: Path) -> _State:
    """The history and the other facts; of a file that was cut as much of the history as is whole."""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return _State(_salvaged(text), is_torn=True)
    history = tree.pop("log_history", None) if isinstance(tree, dict) else None
    if not isinstance(history, list):
        raise UnreadableLogError(f"{path} has no log_history: give a {FILE_NAME} that transformers wrote")
    return _State(history, {key: value for key, value in tree.items() if not isinstance(value, dict | list)})


def _salvaged(text: str) -> list[Any]:
    rows: list[Any] = []
    match = _HISTORY.search(text)
    place = match.end() if match else len(text)
    decoder = json.JSONDecoder()
    while (between := _BETWEEN.match(text, place)) and text.startswith("{", between.end()):
        try:
            row, place = decoder.raw_decode(text, between.end())
        except (ValueError, RecursionError):
            break
        rows.append(row)
    return rows
