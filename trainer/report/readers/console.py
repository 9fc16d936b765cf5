"""What trainings printed: verl's `step:N - key:value - ...` and ROLL's `metrics_tag: {...}`, between other lines."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.report.readers.frame import Frame
from trainer.report.readers.parsing import MAX_LINE_BYTES, as_step
from trainer.report.run_log import RunLog, UnreadableLogError

ROLL_MARK = "metrics_tag: {"
_VERL_ROW = re.compile(r"(?:^|[\s\r])step:(\d{1,15}) - (\S.*)")
_METRIC = re.compile(r"\s*(.*):(?:(?:np\.)?[a-z]+\d*\((.*)\)|(.*?))\s*")
"""numpy prints np.float64(0.5)."""


def read_console(path: Path) -> RunLog:
    """Lines of both kinds count; the source is the kind there are more of. Other lines are not counted as unparsed."""
    frame, num_roll = Frame(), 0
    with path.open(encoding="utf-8", errors="replace") as file:
        while line := file.readline(MAX_LINE_BYTES):
            if ROLL_MARK in line:
                step, metrics = _roll_row(line[line.index(ROLL_MARK) + len(ROLL_MARK) - 1 :])
                num_roll += step is not None
            elif match := _VERL_ROW.search(line):
                pairs = filter(None, map(_METRIC.fullmatch, match[2].split(" - ")))
                step, metrics = int(match[1]), {pair[1]: pair[2] or pair[3] for pair in pairs}
            else:
                continue
            if step is None:
                frame.faults.num_unparsed += 1
            else:
                frame.add(step, metrics)
    if not frame.num_rows:
        raise UnreadableLogError(f"{path} holds no line like 'step:1 - train/loss:0.5' or '{ROLL_MARK}...}}'")
    log = frame.log(path, "roll" if 2 * num_roll > frame.num_rows else "verl", path.parent)
    return replace(log, notes=() if num_roll else ("the console prints few digits",))


def _roll_row(text: str) -> tuple[int | None, dict[str, Any]]:
    """No step for a torn one."""
    try:
        row: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None, {}
    metrics = row.get("metrics")
    return (as_step(row.get("step")), metrics) if isinstance(metrics, dict) else (None, {})
