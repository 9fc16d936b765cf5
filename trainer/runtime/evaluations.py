"""`evaluations.jsonl` of a run: what was scored of which checkpoint.

One object a line. Kind "sample": `name` and `step` of the evaluation, its `key`, `index`, `prompt`,
`answer`, `completion`, `score`, `reason`. Kind "summary", once all its samples are there or for a
result from elsewhere: `name` (as `eval/gsm8k`), `step`, `key`, `nonce` and `digest` of the
checkpoint, `mean`, `low`, `high` (95 %), `n`, `scorer`, `engine`, and how it was made. Of each name
and step the last summary counts.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.runtime.json_lines import JsonLines

FILE_NAME = "evaluations.jsonl"
SAMPLE, SUMMARY = "sample", "summary"
PREFIX = "eval/"
SUCCESS_RATE = "exec_success_rate"
EXEC = "exec"


def read_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """Samples and summaries in the order written, torn and foreign lines passed over; none
    without the file.
    """
    return [
        row
        for _, row in JsonLines(run_dir / FILE_NAME)
        if row.get("kind") in (SAMPLE, SUMMARY) and isinstance(row.get("step"), int)
    ]


def read_summaries(run_dir: Path) -> dict[str, dict[int, Mapping[str, Any]]]:
    """Return the summaries that count: {name: {step: row}}, by rising step."""
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    summaries = [row for row in read_evaluations(run_dir) if row["kind"] == SUMMARY]
    for row in sorted(summaries, key=lambda row: row["step"]):
        if isinstance(row.get("mean"), int | float):
            found.setdefault(str(row.get("name")), {})[row["step"]] = row
    return found


def deciding(names: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> str | None:
    """Return the name of the evaluation that decides which checkpoint is best: the only one, or the
    only one of programs.
    """
    programs = [
        name
        for name, rows in names.items()
        if all(row.get("scorer") == EXEC for row in rows.values())
    ]
    found = programs if len(programs) == 1 else list(names)
    return found[0] if len(found) == 1 else None
