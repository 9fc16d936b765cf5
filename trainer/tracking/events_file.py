"""`events.jsonl`: what happened to a run beside its metrics.

One JSON object a line: `ts` (Unix seconds), `attempt`, `step`, `kind`, `level` (info, warn, error),
`message`, and what else belongs to that kind. Every attempt begins with an event of kind "start"
and ends with "end", which holds `exit_code`; one that was killed has no end.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.errors import EXIT_CRASH
from trainer.runtime.json_lines import AppendFile, JsonLines, strict

FILE_NAME = "events.jsonl"
LEVELS = ("info", "warn", "error")
COLUMNS = frozenset({"ts", "attempt", "step", "kind", "level", "message"})


@dataclass(frozen=True)
class Event:
    """`fields` may hold lists and mappings of plain values."""

    kind: str
    step: int
    message: str
    level: str = "info"
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(
                f"event '{self.kind}' has level '{self.level}': it must be any of "
                f"{', '.join(LEVELS)}"
            )
        if taken := COLUMNS & self.fields.keys():
            raise ValueError(
                f"event '{self.kind}': '{min(taken)}' is a column of {FILE_NAME}: rename that field"
            )


class EventsFile(AppendFile):
    def __init__(self, path: Path, *, attempt: int, is_guest: bool = False) -> None:
        super().__init__(path, is_guest=is_guest)
        self._attempt = attempt

    def write(self, event: Event) -> None:
        columns = {
            "ts": round(time.time(), 3),
            "attempt": self._attempt,
            "step": event.step,
            "kind": event.kind,
        }
        columns |= {"level": event.level, "message": event.message}
        self.append(columns | strict(event.fields))


def read_events(path: Path) -> list[dict[str, Any]]:
    """In the order written; none without the file. Torn or foreign lines are passed over."""
    return [event for _, event in JsonLines(path) if event.keys() >= COLUMNS]


def last_exit_code(path: Path) -> int | None:
    """Of the last attempt: that of a crash if it was killed or is still under way; None without
    any attempt.
    """
    ends = [event for event in read_events(path) if event["kind"] in ("start", "end")]
    if not ends:
        return None
    return int(ends[-1]["exit_code"]) if ends[-1]["kind"] == "end" else EXIT_CRASH
