"""`trainer_state.json` of transformers and TRL, in the run directory or in its newest checkpoint."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.report.readers.frame import Frame
from trainer.report.readers.parsing import as_step
from trainer.report.run_log import RunLog, UnreadableLogError
from trainer.runtime.json_lines import flat, read_object

FILE_NAME = "trainer_state.json"
NAN_NOTE = (
    "transformers replaces a NaN or infinite loss by the mean of the interval unless logging_nan_inf_filter is off: "
    "a loss of 0 or a grad_norm of NaN are the only traces"
)
MEAN_NOTE = "the loss is the mean over a logging interval, grad_norm and the learning rate are those of its last step"
SUMMARY = "train_runtime"
"""Only the row that sums the run up has it."""
_CHECKPOINT = re.compile(r"checkpoint-(\d{1,15})")
_HISTORY = re.compile(r'"log_history"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")


def state_files(run_dir: Path) -> list[Path]:
    """The state in the run directory, which the end of the training wrote, then those of checkpoints, newest first."""
    checkpoints = [(int(match[1]), path) for path in run_dir.iterdir() if (match := _CHECKPOINT.fullmatch(path.name))]
    directories = [run_dir, *(path for _, path in sorted(checkpoints, reverse=True))]
    return [directory / FILE_NAME for directory in directories if (directory / FILE_NAME).is_file()]


def read_transformers(path: Path) -> RunLog:
    """Of a file that was cut as much of the history as is whole."""
    frame = Frame()
    history, config = _load(path, frame)
    for row in history:
        step = as_step(row.pop("step", None)) if isinstance(row, dict) else None
        if step is None:
            frame.faults.num_unparsed += 1
        elif SUMMARY in row:
            config |= {f"summary.{key}": value for key, value in row.items()}
        else:
            frame.add(step, row)
    is_in_checkpoint = _CHECKPOINT.fullmatch(path.parent.name) is not None
    run_dir = path.parent.parent if is_in_checkpoint else path.parent
    late = (f"read from {path.parent.name}: what came after that checkpoint is not in it",) * is_in_checkpoint
    return replace(
        frame.log(path, "transformers", run_dir),
        config=flat(read_object(run_dir / "args.json")) | config,
        total_steps=as_step(config.get("max_steps")) or None,
        notes=(MEAN_NOTE, NAN_NOTE, *late),
    )


def _load(path: Path, frame: Frame) -> tuple[list[Any], dict[str, Any]]:
    """The history and the other facts."""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        frame.faults.num_unparsed += 1
        return _salvaged(text), {}
    history = tree.pop("log_history", None) if isinstance(tree, dict) else None
    if not isinstance(history, list):
        raise UnreadableLogError(f"{path} has no log_history: give a {FILE_NAME} that transformers wrote")
    return history, {key: value for key, value in tree.items() if not isinstance(value, dict | list)}


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
