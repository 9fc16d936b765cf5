"""Reads the metrics that trainers print, from captured console output or files."""

import re
from pathlib import Path

from trainer.runtime.files import open_regular
from trainer.runtime.json_lines import MAX_FILE_BYTES, MAX_LINE_BYTES, parsed
from trainer.tools.report.readers.parsing import as_number
from trainer.tools.report.readers.store import Store

STEP = re.compile(
    r"\b(?:global_step|iteration|step|rollout|perf|eval)\b[ :=]*(\d{1,15})(?: */ *\d+)?[ :|,-]+(.*)",
    re.IGNORECASE,
)
"""A step, and the rest of its line. This matches, among others:

`step:1 - train/loss:0.5 - …` (verl), `Step 1 | loss:0.5 lr:1e-5` (torchtune), `step:  1  loss:  0.5`
(torchtitan), `step 1: {'train/loss': 0.5}` (slime), `iteration 1/9 | lm loss: 5.0E-01 |` (Megatron).
"""
METRIC = re.compile(
    r"\b([a-z][^:|={},]{0,80}?)['\"]? *[:=] *(?:[a-z][\w.]*\()?([^\s(),|}]+)", re.IGNORECASE
)
"""A name and its value, which may be printed as `np.float64(0.5)`."""
MIN_METRICS = 2
"""A line with fewer numbers is not a line of metrics, except in verl's format."""
FAILED_SAVE = re.compile(
    r"(?=.*(save|saving|upload|write))(?=.*(checkpoint|ckpt)).*(failed|failure|error:|errno)",
    re.IGNORECASE,
)
"""Matches a line that reports a failed save."""
FAILED_SAVES = "checkpoint/failed_in_a_row"
VERL = re.compile(r"(?:^|[\s\r])step:\d+ - ")
ROLL = re.compile(r"metrics_tag: (\{.*)")
"""`metrics_tag: {"step": 1, "metrics": {…}}`"""
TOTAL = re.compile(r"Total training steps: (\d{1,15})")
DECORATION = re.compile(r"\x1b\[[\d;]*m|(?<=\d),(?=\d{3}\b)")
"""Matches codes of colors, and the comma in 1,234."""


def read_console(path: Path, store: Store) -> None:
    """Read the lines that hold metrics or report a failed save, and skip the others."""
    last_step: object = 0
    with open_regular(path, limit_bytes=MAX_FILE_BYTES) as file:
        while line := file.readline(MAX_LINE_BYTES).decode(errors="replace"):
            if match := ROLL.search(line):
                found = parsed(match[1])
                row = found if isinstance(found, dict) else {}
                last_step = row.get("step")
                store.add(last_step, row.get("metrics"))
                store.facts["source"] = "roll"
            elif match := TOTAL.search(line):
                store.facts["total_steps"] = int(match[1])
            elif (step_row := _step_row(line)) is not None:
                last_step, metrics = step_row
                store.add(last_step, metrics)
                if VERL.search(line):
                    store.facts |= {
                        "source": "verl",
                        "notes": ("the console prints only a few digits",),
                    }
            elif FAILED_SAVE.match(line):
                store.add(last_step, {FAILED_SAVES: 1})


def _step_row(line: str) -> tuple[str, dict[str, str]] | None:
    """Return the step and the metrics in a line; None if it does not hold metrics."""
    match = STEP.search(DECORATION.sub("", line))
    if match is None:
        return None
    row = dict(METRIC.findall(match[2]))
    step = row.pop("global_step", match[1])  # NeMo restarts the iterations in each epoch
    num_metrics = sum(as_number(value) is not None for value in row.values())
    is_row = num_metrics >= MIN_METRICS or VERL.search(line) is not None
    return (step, row) if is_row else None
