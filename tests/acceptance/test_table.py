"""The marks by which tests say what they show are found wherever they stand, and name lines that exist."""

import pytest
import table

MARKED = """
import pytest
from pytest import mark

pytestmark = [pytest.mark.covers("S0.1"), pytest.mark.gpu]
CASES = [pytest.param(1, marks=pytest.mark.covers("S0.2"))]


@pytest.mark.covers("S1.1", "S1.2")
@pytest.mark.parametrize("a", [pytest.param(1, id="x", marks=[mark.covers("S1.3")]), 2])
def test_one(a: int) -> None:
    '''A text such as covers("S9.1") is no mark.'''
    uncovers("S9.2")


@pytest.mark.covers("S1.4")
class TestTwo:
    @pytest.mark.covers(
        "S1.5",
    )
    async def test_three(self) -> None: ...
"""


def test_marks_are_found_wherever_they_stand() -> None:
    assert [(cover.line_id, cover.test) for cover in table.covers_in("t.py", MARKED)] == [
        ("S0.1", "t.py"),
        ("S0.2", "t.py"),
        ("S1.1", "t.py::test_one"),
        ("S1.2", "t.py::test_one"),
        ("S1.3", "t.py::test_one"),
        ("S1.5", "t.py::TestTwo::test_three"),
        ("S1.4", "t.py::TestTwo"),
    ]


def test_a_mark_that_is_not_written_out_is_refused() -> None:
    with pytest.raises(ValueError, match=r"t\.py:1: write the lines out"):
        list(table.covers_in("t.py", "@pytest.mark.covers(*LINES)\ndef test_x(): ..."))


def test_the_list_is_read_whole() -> None:
    lines = table.all_lines()
    assert [sum(line.id.startswith(f"S{part}.") for line in lines) for part in range(5)] == [34, 45, 45, 58, 40]
    first = table.Line("S0.1", "C", "producers record values; writers are apart from them and exchangeable")
    assert lines[0] == first


@pytest.mark.parametrize("row", ["S0.1 X a", "S0.1 C", "0.1 C a", "S0.1 C a\nS0.1 R b", "S0.1 C+ a"])
def test_a_malformed_or_doubled_line_is_named(row: str) -> None:
    with pytest.raises(ValueError, match=r"lines\.txt:[12]: "):
        table.read_lines(row)


def test_every_mark_stands_at_a_test_and_names_a_line() -> None:
    covers = table.all_covers()
    table.tests_by_line(table.all_lines(), covers)
    assert len(covers) > 50
    names = {cover.owner.split("::")[-1] for cover in covers}
    assert [name for name in names if name and not name.startswith(("test_", "Test"))] == []


def test_a_mark_for_an_unknown_line_is_caught() -> None:
    with pytest.raises(ValueError, match=r"t\.py::test_x covers 'S0\.99'"):
        table.tests_by_line([table.Line("S0.1", "C", "a")], [table.Cover("S0.99", "t.py", "test_x")])


def test_lines_without_a_test_are_listed_and_counted() -> None:
    lines = [table.Line("S0.1", "C+R", "first"), table.Line("S0.2", "R", "second"), table.Line("S0.3", "F", "third")]
    covers = [table.Cover("S0.1", "a.py", "test_x"), table.Cover("S0.1", "b.py", ""), table.Cover("S0.3", "c.py", "")]
    tests = table.tests_by_line(lines, [*covers, covers[0]])
    counts = [
        "C (the trainer does it): 1 of 1 lines shown",
        "R (the report reads and judges it): 1 of 2 lines shown",
        "F (declared, for RL): 1 of 1 lines shown",
        "all: 2 of 3 lines shown",
    ]
    missing = "S0.2   R    missing  second"
    assert list(table.rows(lines, tests, only_missing=True)) == [missing, *counts]
    assert list(table.rows(lines, tests, only_missing=False)) == [
        "S0.1   C+R  shown    a.py::test_x",
        "                     b.py",
        missing,
        "S0.3   F    shown    c.py",
        *counts,
    ]
