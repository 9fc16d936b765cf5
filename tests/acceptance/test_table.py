"""The marks by which tests say what they show are found wherever they stand, and name lines that exist."""

import pytest
import table

MARKED = """
import pytest
from pytest import mark

pytestmark = [pytest.mark.covers("S0.1"), pytest.mark.gpu]
CASES = [pytest.param(1, marks=pytest.mark.covers("S0.2"))]


@pytest.mark.covers("S1.1", "S1.2:C")
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
    assert [(cover.line_id, cover.mark, cover.test) for cover in table.covers_in("t.py", MARKED)] == [
        ("S0.1", "", "t.py"),
        ("S0.2", "", "t.py"),
        ("S1.1", "", "t.py::test_one"),
        ("S1.2", "C", "t.py::test_one"),
        ("S1.3", "", "t.py::test_one"),
        ("S1.5", "", "t.py::TestTwo::test_three"),
        ("S1.4", "", "t.py::TestTwo"),
    ]


def test_a_mark_that_is_not_written_out_is_refused() -> None:
    with pytest.raises(ValueError, match=r"t\.py:1: write the lines out"):
        list(table.covers_in("t.py", "@pytest.mark.covers(*LINES)\ndef test_x(): ..."))


def test_the_list_is_read_whole() -> None:
    lines = table.all_lines()
    first = table.Line("S0.1", "C", "producers record values; writers are apart from them and exchangeable")
    assert lines[0] == first


@pytest.mark.parametrize("row", ["S0.1 X a", "S0.1 C", "0.1 C a", "S0.1 C a\nS0.1 R b", "S0.1 C+ a"])
def test_a_malformed_or_doubled_line_is_named(row: str) -> None:
    with pytest.raises(ValueError, match=r"lines\.txt:[12]: "):
        table.read_lines(row)


def test_every_mark_stands_at_a_test_and_names_a_line() -> None:
    covers = table.all_covers()
    table.covers_by_line(table.all_lines(), covers)
    assert len(covers) > 50
    names = {cover.owner.split("::")[-1] for cover in covers}
    assert [name for name in names if name and not name.startswith(("test_", "Test"))] == []


def cover(line_id: str, mark: str = "", *, path: str = "t.py", owner: str = "test_x") -> table.Cover:
    return table.Cover(line_id, mark, path, owner)


LINES = [
    table.Line("S0.1", "C+R", "first"),
    table.Line("S0.2", "R", "second"),
    table.Line("S0.3", "C+R", "third"),
    table.Line("S0.4", "F", "fourth"),
]


@pytest.mark.parametrize(("line_id", "mark"), [("S0.99", ""), ("S0.1", "F"), ("S0.1", "X"), ("S0.10", "C")])
def test_a_mark_for_an_unknown_line_is_caught(line_id: str, mark: str) -> None:
    with pytest.raises(ValueError, match=rf"t\.py::test_x covers '{line_id}:{mark}', which is not"):
        table.covers_by_line(LINES, [cover(line_id, mark)])


def test_what_is_missing_is_listed_and_counted() -> None:
    shown = [cover("S0.1"), cover("S0.1", path="b.py", owner=""), cover("S0.1"), cover("S0.3", "C"), cover("S0.4", "F")]
    covers = table.covers_by_line(LINES, shown)
    counts = [
        "C (the trainer does it): 2 of 2 lines shown",
        "R (the report reads and judges it): 1 of 3 lines shown",
        "F (declared, for RL): 1 of 1 lines shown",
        "all: 2 of 4 lines shown",
    ]
    assert list(table.rows(LINES, covers, only_missing=True)) == [
        "S0.2   R    missing R    second",
        "S0.3   C+R  missing R    third",
        *counts,
    ]
    assert list(table.rows(LINES, covers, only_missing=False)) == [
        "S0.1   C+R  shown        t.py::test_x",
        "                         b.py",
        "S0.2   R    missing R    second",
        "S0.3   C+R  missing R    t.py::test_x",
        "S0.4   F    shown        t.py::test_x",
        *counts,
    ]


def test_both_halves_show_a_line_and_the_exit_code_says_if_some_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = [cover("S0.1", "C"), cover("S0.1", "R"), cover("S0.2"), cover("S0.3"), cover("S0.4")]
    monkeypatch.setattr(table, "all_lines", lambda: LINES)
    monkeypatch.setattr(table, "all_covers", lambda: halves)
    assert table.main([]) == 0
    for left_out in range(len(halves)):
        monkeypatch.setattr(table, "all_covers", lambda n=left_out: halves[:n] + halves[n + 1 :])
        assert table.main(["--missing"]) == 1, halves[left_out]


def test_every_line_of_the_list_is_shown_by_a_test() -> None:
    assert table.main(["--missing"]) == 0, "python tests/acceptance/table.py --missing lists them"
