"""The acceptance list, lines.txt, and the marks with which tests declare the lines that they cover.

`@pytest.mark.covers("S2.21 S2.25:C")` covers the whole line S2.21, and the part C of the line
S2.25.
"""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def all_lines():
    """{id of a line: its parts, such as C and R}"""
    text = (TESTS / "acceptance/lines.txt").read_text(encoding="utf-8")
    return {name: marks.split("+") for name, marks in re.findall(r"^(S[\d.]+) +(\S+)", text, re.M)}


def all_covers():
    """Return the statements that the marks of all test files name: `S2.21`, `S2.25:C`."""
    text = "".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    marks = re.findall(r"mark\.covers\(([^)]*)\)", text)
    return set(re.findall(r"S[\d.:A-Z]+", " ".join(marks)))
