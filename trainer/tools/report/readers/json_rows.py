"""Reads JSON logs: `metrics.jsonl`, other trainers' JSON lines, transformers' `log_history`."""

import re
from pathlib import Path

from trainer.runtime.files import read_regular
from trainer.runtime.json_lines import JsonLines, parsed, read_object
from trainer.tools.report.readers.parsing import as_step, step_key
from trainer.tools.report.readers.store import Store
from trainer.tracking import metrics_file

NOTES = (
    "the loss is the mean over a logging interval; grad_norm and learning rate belong to its last step",
    "transformers replaces a NaN or infinite loss by the mean of the interval unless "
    "logging_nan_inf_filter is off: a loss of 0 or a grad_norm of NaN is the only trace",
)
"""Notes on logs of transformers and of ms-swift, which uses the transformers trainer."""
SUMMARY_KEYS = {"log_history", "best_model_checkpoint", "train_runtime"}
"""Keys that occur only in rows that sum up a run."""


def read_json_lines(path: Path, store: Store) -> None:
    """Read JSON objects, one per line."""
    lines = JsonLines(path, is_final=True)
    for _, row in lines:
        step = row.get(step_key(row) or "")
        if total := as_step(str(step).partition("/")[2]):  # the total in "2800/6000"
            store.facts |= {"source": "ms-swift", "total_steps": total, "notes": NOTES}
        elif "current_steps" in row:  # of LLaMA-Factory
            store.facts["total_steps"] = as_step(row.get("total_steps")) or None
        start = as_step(step)
        if row.get("kind") in metrics_file.MARKERS and start is not None:
            store.rewind(start, is_restart=row["kind"] == metrics_file.START)
        elif isinstance(row.get("data"), dict):
            store.facts["source"] = "verl"
            store.add(step, row["data"])
        elif SUMMARY_KEYS.isdisjoint(row):
            # {"nonfinite": {"train/loss": "nan"}} holds the values that JSON cannot express
            nonfinite = row.pop("nonfinite", {})
            store.add(step, row | nonfinite if isinstance(nonfinite, dict) else row)
    store.num_unparsed += lines.num_unparsed


def read_log_history(path: Path, store: Store) -> None:
    """Read transformers' `trainer_state.json`. Rows are read even if the file was cut off."""
    state = read_object(path)
    store.num_unparsed += not state
    rows = state.get("log_history")
    if not isinstance(rows, list):
        text = read_regular(path).decode(errors="replace")
        _, _, history = text.partition('"log_history"')
        rows = map(parsed, re.findall(r"\{[^{}]*\}", history))
    for row in rows:
        if isinstance(row, dict) and "step" in row and SUMMARY_KEYS.isdisjoint(row):
            store.add(row["step"], row)
    config = {key: value for key, value in state.items() if not isinstance(value, dict | list)}
    store.facts |= {
        "source": "transformers",
        "config": config,
        "total_steps": as_step(config.get("max_steps")) or None,
        "notes": NOTES,
    }
