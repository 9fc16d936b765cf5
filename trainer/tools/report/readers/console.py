"""Reads the metrics that verl, ROLL and torchtune print, from captured console output or files."""

import re
from pathlib import Path

from trainer.runtime.files import open_regular
from trainer.runtime.json_lines import MAX_FILE_BYTES, MAX_LINE_BYTES, parsed
from trainer.tools.report.readers.store import Store

VERL = re.compile(r"(?:^|[\s\r])step:(\d{1,15}) - (\S.*)")
"""`step:1 - train/loss:0.5 - …`"""
ROLL = re.compile(r"metrics_tag: (\{.*)")
"""`metrics_tag: {"step": 1, "metrics": {…}}`"""
TOTAL = re.compile(r"Total training steps: (\d{1,15})")
TORCHTUNE = re.compile(r"Step (\d{1,15}) \| (\S.*)")
"""`Step 1 | loss:0.5 lr:1e-5 …`"""
METRIC = re.compile(r"(\S+):(?:[\w.]+\()?([^\s()]+)")
"""Matches a metric of verl or torchtune. Its value may be printed as `np.float64(0.5)`."""


def read_console(path: Path, store: Store) -> None:
    """Read the lines that hold metrics and skip the others."""
    with open_regular(path, limit_bytes=MAX_FILE_BYTES) as file:
        while line := file.readline(MAX_LINE_BYTES).decode(errors="replace"):
            if match := ROLL.search(line):
                found = parsed(match[1])
                row = found if isinstance(found, dict) else {}
                store.add(row.get("step"), row.get("metrics"))
                store.facts["source"] = "roll"
            elif match := TOTAL.search(line):
                store.facts["total_steps"] = int(match[1])
            elif match := TORCHTUNE.match(line):
                store.add(match[1], dict(METRIC.findall(match[2])))
            elif match := VERL.search(line):
                store.add(match[1], dict(METRIC.findall(match[2])))
                store.facts |= {
                    "source": "verl",
                    "notes": ("the console prints only a few digits",),
                }
