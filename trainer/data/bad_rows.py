"""Rows that cannot be trained on: counted, listed in a file, and told so that equal faults are told once."""

import json
from collections import Counter
from pathlib import Path

from trainer.data.rows import Row, excerpt, location

NUM_REASONS = 20  # told; the file has all
NUM_PLACES = 3


class BadRows:
    """What was wrong with rows; each is written to `path`, one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self.by_kind: Counter[str] = Counter()
        self._places: dict[str, list[str]] = {}
        self._by_reason: Counter[str] = Counter()
        self._file = path.open("w", encoding="utf-8")

    def __enter__(self) -> "BadRows":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def add(self, row: Row, reason: str) -> None:
        """Count and list a row; places are kept of the first reasons only, however many there are."""
        self.by_kind[reason.split(":", 1)[0]] += 1
        if reason in self._places or len(self._places) < NUM_REASONS:
            self._by_reason[reason] += 1
            places = self._places.setdefault(reason, [])
            if len(places) < NUM_PLACES:
                places.append(location(row.file, row.line))
        entry = {"file": str(row.file), "line": row.line, "reason": reason, "excerpt": excerpt(row.record)}
        self._file.write(json.dumps(entry, ensure_ascii=False) + "\n")

    @property
    def total(self) -> int:
        return self.by_kind.total()

    def lines(self) -> list[str]:
        """The first reasons with their places, and the counts by kind."""
        lines = [self._line(reason, places) for reason, places in self._places.items()]
        if more := self.total - self._by_reason.total():
            lines.append(f"  … and {more} more")
        return [*lines, "by reason: " + ", ".join(f"{kind} {count}" for kind, count in self.by_kind.most_common())]

    def _line(self, reason: str, places: list[str]) -> str:
        count = self._by_reason[reason]
        if count == 1:
            return f"  {places[0]}: {reason}"
        return f"  {reason} ({count} rows: {', '.join(places)}{', …' if count > len(places) else ''})"
