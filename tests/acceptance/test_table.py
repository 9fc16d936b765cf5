"""Every line of the acceptance list is covered by a test, and every mark of a test names a line."""

from table import all_covers, all_lines

LINES = all_lines()
COVERS = all_covers()
HALVES = {f"{name}:{mark}": name for name, marks in LINES.items() for mark in marks}


def test_every_line_of_the_list_is_shown_by_a_test():
    assert [half for half, name in HALVES.items() if not {name, half} & COVERS] == []


def test_every_mark_of_a_test_names_a_line():
    assert COVERS - LINES.keys() - HALVES.keys() == set()
