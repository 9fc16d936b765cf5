"""The acceptance list, lines.txt, and the marks by which tests say which of its lines they show.

`@pytest.mark.covers("S2.21 S2.25:C")` shows the whole line S2.21, and of S2.25 what its mark C
asks for.
"""

import re
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Line:
    """A line of the list; `marks` such as C or C+R."""

    id: str
    marks: str
    wording: str


def all_lines() -> list[Line]:
    text = (TESTS / "acceptance/lines.txt").read_text(encoding="utf-8")
    rows = [row for row in text.splitlines() if row and not row.startswith("#")]
    return [Line(*row.split(maxsplit=2)) for row in rows]


def all_covers() -> set[str]:
    """Return the statements that the marks of all test files name: `S2.21`, `S2.25:C`."""
    sources = [path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py")]
    marks = [mark for source in sources for mark in re.findall(r"mark\.covers\(([^)]*)\)", source)]
    return {name for mark in marks for name in re.findall(r"S[\d.:A-Z]+", mark)}
