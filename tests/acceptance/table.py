"""Which tests show which line of the acceptance list, lines.txt.

`python tests/acceptance/table.py` prints line, marks, status and tests, `--missing` only the lines of which something
is missing. A test says what it shows by `@pytest.mark.covers("S2.21", "S2.25:C")`: the whole line S2.21, and of S2.25
what its mark C asks for. The sources are parsed, nothing is imported. Exit codes: 0 every line is shown, 1 some is not.
"""

import argparse
import ast
import re
import sys
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
    """One test (or file, for marks outside of functions) that shows one line, or what one mark of it asks for."""

    line_id: str
    mark: str
    """C, R or F; "" for the whole line."""
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
                    raise ValueError(f"{path}:{child.lineno}: write the lines out: covers('S2.21', 'S2.25:C')")
                line_id, _, mark = argument.value.partition(":")
                yield Cover(line_id, mark, path, owner)
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


def covers_by_line(lines: list[Line], covers: list[Cover]) -> dict[str, list[Cover]]:
    """Line -> what shows it, for every line of the list. Raises `ValueError` for a mark that names nothing in it."""
    known = {line.id: ["", *line.marks.split("+")] for line in lines}
    found: dict[str, list[Cover]] = {line.id: [] for line in lines}
    for cover in covers:
        if cover.mark not in known.get(cover.line_id, []):
            raise ValueError(f"{cover.test} covers '{cover.line_id}:{cover.mark}', which is not in lines.txt")
        found[cover.line_id].append(cover)
    return found


def missing_marks(line: Line, covers: list[Cover]) -> list[str]:
    """The marks of a line that none of its covers shows."""
    shown = {cover.mark for cover in covers}
    return [] if "" in shown else [mark for mark in line.marks.split("+") if mark not in shown]


def rows(lines: list[Line], covers: dict[str, list[Cover]], *, only_missing: bool) -> Iterator[str]:
    """The table, and below it how many lines are shown, in all and of each mark."""
    missing = {line.id: missing_marks(line, covers[line.id]) for line in lines}
    for line in lines:
        if only_missing and not missing[line.id]:
            continue
        status = f"missing {'+'.join(missing[line.id])}" if missing[line.id] else "shown"
        tests = list(dict.fromkeys(cover.test for cover in covers[line.id]))
        first, *others = [line.wording] if only_missing or not tests else tests
        yield f"{line.id:6} {line.marks:4} {status:12} {first}"
        yield from (f"{'':24} {test}" for test in others)
    for mark, meaning in MARKS.items():
        of_mark = [line for line in lines if mark in line.marks]
        num_shown = sum(mark not in missing[line.id] for line in of_mark)
        yield f"{mark} ({meaning}): {num_shown} of {len(of_mark)} lines shown"
    yield f"all: {sum(not marks for marks in missing.values())} of {len(lines)} lines shown"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python tests/acceptance/table.py", allow_abbrev=False)
    parser.add_argument("--missing", action="store_true", help="only the lines of which something is missing")
    only_missing = parser.parse_args(argv).missing
    lines = all_lines()
    covers = covers_by_line(lines, all_covers())
    print("\n".join(rows(lines, covers, only_missing=only_missing)))
    return 1 if any(missing_marks(line, covers[line.id]) for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
