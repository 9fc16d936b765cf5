"""Which tests show which line of the acceptance list, lines.txt.

`python tests/acceptance/table.py` prints line, marks, status and tests, `--missing` only the lines that no test shows.
A test says what it shows by `@pytest.mark.covers("S2.21", ...)`; the marks are found in the sources, nothing is
imported. Exit codes: 0 every line is shown, 1 some is not.
"""

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MARKS = {"C": "the trainer does it", "R": "the report reads and judges it", "F": "declared, for RL"}
_LINE = re.compile(r"(?P<id>S\d\.\d+) +(?P<marks>[CRF](?:\+[CRF])*) +(?P<wording>\S.*)")


@dataclass(frozen=True)
class Line:
    """A line of the list; `marks` such as C or C+R."""

    id: str
    marks: str
    wording: str


@dataclass(frozen=True)
class Cover:
    """One test (or file, for marks outside of functions) that shows one line."""

    line_id: str
    path: str
    owner: str
    """The names of class and function, outermost first, joined by `::`; "" for a whole file."""

    @property
    def test(self) -> str:
        return f"{self.path}::{self.owner}" if self.owner else self.path


def read_lines(text: str) -> list[Line]:
    """The lines in their order. Raises `ValueError` for one that is malformed or doubled."""
    lines: dict[str, Line] = {}
    for number, row in enumerate(text.splitlines(), start=1):
        if not row or row.startswith("#"):
            continue
        found = _LINE.fullmatch(row)
        if found is None or found["id"] in lines:
            raise ValueError(f"lines.txt:{number}: not 'id marks wording', or an id that was there before: {row}")
        lines[found["id"]] = Line(**found.groupdict())
    return list(lines.values())


def covers_in(path: str, source: str) -> Iterator[Cover]:
    """The marks of a test file: on functions, on classes, in the parameters of a test, and `pytestmark`.

    Raises `ValueError` for one whose lines are not written out.
    """
    yield from _covers_below(ast.parse(source), path, "")


def _covers_below(node: ast.AST, path: str, owner: str) -> Iterator[Cover]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _covers_below(child, path, f"{owner}::{child.name}" if owner else child.name)
            continue
        if isinstance(child, ast.Call) and ast.unparse(child.func).endswith("mark.covers"):
            for argument in child.args:
                if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
                    raise ValueError(f"{path}:{child.lineno}: write the lines out: covers('S2.21', 'S2.22')")
                yield Cover(argument.value, path, owner)
        yield from _covers_below(child, path, owner)


def all_lines() -> list[Line]:
    return read_lines((REPOSITORY / "tests/acceptance/lines.txt").read_text(encoding="utf-8"))


def all_covers() -> list[Cover]:
    paths = sorted((REPOSITORY / "tests").rglob("test_*.py"))
    return [
        cover
        for path in paths
        for cover in covers_in(str(path.relative_to(REPOSITORY)), path.read_text(encoding="utf-8"))
    ]


def tests_by_line(lines: list[Line], covers: list[Cover]) -> dict[str, list[str]]:
    """Line -> its tests, for every line of the list. Raises `ValueError` for a mark that names no line."""
    found: dict[str, list[str]] = {line.id: [] for line in lines}
    for cover in covers:
        if cover.line_id not in found:
            raise ValueError(f"{cover.test} covers '{cover.line_id}', which is no line of lines.txt")
        if cover.test not in found[cover.line_id]:
            found[cover.line_id].append(cover.test)
    return found


def rows(lines: list[Line], tests: dict[str, list[str]], *, only_missing: bool) -> Iterator[str]:
    """The table, and below it how many lines of each mark are shown."""
    num_shown: dict[str, int] = defaultdict(int)
    for line in lines:
        shown_by = tests[line.id]
        for mark in line.marks.split("+"):
            num_shown[mark] += bool(shown_by)
        if not shown_by:
            yield f"{line.id:6} {line.marks:4} missing  {line.wording}"
        elif not only_missing:
            yield f"{line.id:6} {line.marks:4} shown    {shown_by[0]}"
            yield from (f"{'':20} {test}" for test in shown_by[1:])
    for mark, meaning in MARKS.items():
        total = sum(mark in line.marks.split("+") for line in lines)
        yield f"{mark} ({meaning}): {num_shown[mark]} of {total} lines shown"
    yield f"all: {sum(map(bool, tests.values()))} of {len(lines)} lines shown"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python tests/acceptance/table.py", allow_abbrev=False)
    parser.add_argument("--missing", action="store_true", help="only the lines that no test shows")
    only_missing = parser.parse_args(argv).missing
    lines = all_lines()
    tests = tests_by_line(lines, all_covers())
    print("\n".join(rows(lines, tests, only_missing=only_missing)))
    return 0 if all(tests.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
