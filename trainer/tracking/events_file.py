"""`events.jsonl`: the starts, ends, warnings and errors of a run.

Each line is a JSON object with `ts` (Unix seconds), `attempt`, `step`, `kind`, `level` (info, warn
or error), `message`, and further fields that depend on the kind. Every attempt begins with an event
of kind "start" and ends with one of kind "end", which holds `exit_code`. A killed attempt has no
end.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.runtime.json_lines import AppendFile, JsonLines, strict

FILE_NAME = "events.jsonl"
COLUMNS = frozenset({"ts", "attempt", "step", "kind", "level", "message"})


@dataclass(frozen=True)
class Event:
    kind: str
    step: int
    message: str
    level: str = "info"
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields: plain values, or lists and mappings of plain values."""


class EventsFile(AppendFile):
    def __init__(
        self,
        path: Path,
        *,
        attempt: int,
        is_guest: bool = False,
    ) -> None:
        super().__init__(path, is_guest=is_guest)
        self._attempt = attempt

    def write(self, event: Event) -> None:
        columns = {
            "ts": round(time.time(), 3),
            "attempt": self._attempt,
            "step": event.step,
            "kind": event.kind,
            "level": event.level,
            "message": event.message,
        }
        self.append(columns | strict(event.fields) | columns)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events in the order in which they were written, without damaged or unrelated
    lines.

    Returns an empty list if there is no file.
    """
    return [event for _, event in JsonLines(path) if event.keys() >= COLUMNS]
