"""What trainings printed: verl's `step:N - key:value - ...` and ROLL's `metrics_tag: {...}`, between other lines."""

import json
import re
from pathlib import Path
from typing import Any

from trainer.report.readers.aliases import canonical
from trainer.report.readers.checkpoints import find_checkpoints, tracker_step
from trainer.report.readers.frame import Frame
from trainer.report.readers.parsing import MAX_LINE_BYTES, Faults, as_step
from trainer.report.run_log import RunLog, UnreadableLogError

ROLL_MARK = "metrics_tag: {"
_VERL_ROW = re.compile(r"(?:^|[\s\r])step:(\d{1,15}) - (\S.*)")
_WRAPPED = re.compile(r"(?:np\.)?[a-z]+\d*\((.*)\)")
"""numpy prints np.float64(0.5)."""


def read_console(path: Path) -> RunLog:
    """Lines of both kinds count; the source is the kind there are more of. Other lines are not counted as unparsed."""
    faults, frame = Faults(), Frame()
    num_roll = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        while line := file.readline(MAX_LINE_BYTES):
            if ROLL_MARK in line:
                num_roll += _add_roll_row(line, frame, faults)
            elif match := _VERL_ROW.search(line):
                frame.add(int(match[1]), _verl_metrics(match[2]))
    if not frame.num_rows:
        raise UnreadableLogError(f"{path} holds no line like 'step:1 - train/loss:0.5' or '{ROLL_MARK}...}}'")
    resolved = frame.resolve(canonical)
    return RunLog(
        path=path,
        source="roll" if 2 * num_roll > frame.num_rows else "verl",
        series=resolved.series,
        num_rows=frame.num_rows,
        num_unparsed=faults.num_unparsed,
        checkpoints=find_checkpoints(path.parent),
        tracker_step=tracker_step(path.parent),
        num_disordered_rows=resolved.num_disordered_rows,
        notes=("the console prints few digits",) if not num_roll else (),
    )


def _verl_metrics(text: str) -> dict[str, str]:
    metrics = {}
    for part in text.split(" - "):
        key, colon, value = part.strip().rpartition(":")
        if colon:
            wrapped = _WRAPPED.fullmatch(value)
            metrics[key] = wrapped[1] if wrapped else value
    return metrics


def _add_roll_row(line: str, frame: Frame, faults: Faults) -> bool:
    try:
        row: Any = json.loads(line[line.index(ROLL_MARK) + len(ROLL_MARK) - 1 :].strip())
    except (ValueError, RecursionError):
        row = {}
    step, metrics = as_step(row.get("step")), row.get("metrics")
    if step is None or not isinstance(metrics, dict):
        faults.num_unparsed += 1
        return False
    frame.add(step, metrics)
    return True
