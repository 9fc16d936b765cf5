"""Reads a run's `evaluations.jsonl`: the scores of its checkpoints.

Each line is one object. An object of kind "sample" holds `name` and `step` of the evaluation, and
`key`, `index`, `prompt` (the text that the model read), `answer`, `completion`, `score`, `reason`.
An object of kind "summary" follows the samples, or records an external result. It holds `name`
(such as `eval/gsm8k`), `step`, `key`, `nonce` and `digest` of the checkpoint, `mean`, `low`, `high`
(95 %), `n`, `scorer`, `engine`, and how the result was made. If a name and step have several
summaries, the last one counts.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.runtime.json_lines import JsonLines

FILE_NAME = "evaluations.jsonl"
SAMPLE = "sample"
SUMMARY = "summary"
PREFIX = "eval/"
SUCCESS_RATE = "exec_success_rate"
EXEC = "exec"
ATTACHED = "attached"
LOWER = re.compile(r"(?<![a-z])(loss|ppl|perplexity|error)(?![a-z])", re.IGNORECASE)


def read_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """Return samples and summaries in the order written, without damaged or unrelated lines; [] if
    there is no file.
    """
    return [
        row
        for _, row in JsonLines(run_dir / FILE_NAME)
        if row.get("kind") in (SAMPLE, SUMMARY) and isinstance(row.get("step"), int)
    ]


def read_summaries(run_dir: Path) -> dict[str, dict[int, Mapping[str, Any]]]:
    """Return the latest summary for each name and step, {name: {step: row}}, in order of steps."""
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in sorted(read_evaluations(run_dir), key=lambda row: row["step"]):
        if row["kind"] == SUMMARY and isinstance(row.get("mean"), int | float):
            found.setdefault(str(row.get("name")), {})[row["step"]] = row
    return found


def deciding(names: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> str | None:
    """Return the name of the evaluation that decides which checkpoint is best: the only one that
    runs programs, else the only evaluation. None if there is no such evaluation.
    """
    programs = [
        name
        for name, rows in names.items()
        if all(row.get("scorer") == EXEC for row in rows.values())
    ]
    found = programs if len(programs) == 1 else list(names)
    return found[0] if len(found) == 1 else None


def sign_of(name: str, rows: Mapping[int, Mapping[str, Any]]) -> int:
    """Return -1 if lower results are better, which the name of an external result may indicate,
    else 1.
    """
    is_attached = all(row.get("scorer") == ATTACHED for row in rows.values())
    return -1 if is_attached and LOWER.search(name) else 1
