"""Reads the metrics that trainers print, from captured console output or files."""

import re
from pathlib import Path

from trainer.runtime.files import open_regular
from trainer.runtime.json_lines import MAX_FILE_BYTES, MAX_LINE_BYTES, parsed
from trainer.tools.report.readers.parsing import as_number, as_step
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
    r"\b([a-z][^:|={},]{0,80}?)['\"]? *[:=] *['\"]?(?:[a-z][\w.]*\()?([^\s(),|}'\"]+)",
    re.IGNORECASE,
)
"""A name and its value, which may be printed as `np.float64(0.5)` or `'0.5'`."""
MIN_METRICS = 2
"""A line with fewer numbers is not a line of metrics, unless it has a loss or verl's format."""
MEMORY = re.compile(r"GiB\(([\d.]+)%\)")
"""`memory: 40.00GiB(50.00%)` of torchtitan"""
FAILED_SAVE = re.compile(
    r"(?=.*(save|saving|upload|write))(?=.*(checkpoint|ckpt)).*(failed|failure|error:|errno)",
    re.IGNORECASE,
)
"""Matches a line that reports a failed save."""
FAILED_SAVES = "checkpoint/failed_in_a_row"
VERL = re.compile(r"(?:^|[\s\r])step:\d+ - ")
ROLL = re.compile(r"metrics_tag: (\{.*)")
ROLL_ROW = re.compile(r'\]:? (\{".*)')
ROLL_STEP = re.compile(r"\bpipeline step (\d{1,15}) finished")
"""`metrics_tag: {"step": 1, "metrics": {…}}`, or `…]: {…}` and then `pipeline step 1 finished`"""
PRINTED = re.compile(r"^[^{]*(\{(?!'train_runtime')(?=.*'epoch': ).*\})")
BAR = re.compile(r"\| (\d{1,15})/(\d{1,15}) \[")
"""transformers prints `{'loss': 0.5, 'learning_rate': 1e-05, 'epoch': 0.1}` after a progress bar
that shows the step: `10%|█ | 1/10 [00:01<00:09]`. Validations have such bars, too.
"""
TOTAL = re.compile(r"Total training steps: (\d{1,15})")
DECORATION = re.compile(r"\x1b\[[\d;]*m|(?<=\d),(?=\d{3}\b)")
"""Matches codes of colors, and the comma in 1,234."""


def read_console(path: Path, store: Store) -> None:
    """Read the lines that hold metrics or report a failed save, and skip the others."""
    last_step: object = 0
    unnumbered: object = {}
    bar = ("", "")
    with open_regular(path, limit_bytes=MAX_FILE_BYTES) as file:
        while line := file.readline(MAX_LINE_BYTES).decode(errors="replace"):
            bar = [bar, *BAR.findall(line)][-1]
            if match := PRINTED.search(line):
                if "learning_rate" in line:
                    last_step, total = bar
                    store.facts["total_steps"] = as_step(total)
                store.add(last_step, dict(METRIC.findall(match[1])))
            elif match := ROLL.search(line):
                found = parsed(match[1])
                row = found if isinstance(found, dict) else {}
                last_step = row.get("step")
                store.add(last_step, row.get("metrics"))
                store.facts["source"] = "roll"
            elif match := ROLL_ROW.search(line):
                unnumbered = parsed(match[1])
            elif match := ROLL_STEP.search(line):
                store.add(match[1], unnumbered)
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
    text = MEMORY.sub(r"GiB memory(%): \1", match[2])
    row = {name: value for name, value in METRIC.findall(text) if as_number(value) is not None}
    step = row.pop("global_step", match[1])  # NeMo restarts the iterations in each epoch
    has_loss = any("loss" in name for name in row)
    if not (len(row) >= MIN_METRICS or has_loss or VERL.search(line)):
        return None
    if "validate step:" in line:  # torchtitan
        row = {"val_loss": row.get("loss", "")}
    return step, row
