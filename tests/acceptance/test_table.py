"""Every line of the acceptance list is shown by a test, and every mark of a test names a line."""

from table import all_covers, all_lines

COVERS = all_covers()


def test_every_line_of_the_list_is_shown_by_a_test():
    missing = [
        f"{line.id}:{mark}"
        for line in all_lines()
        for mark in line.marks.split("+")
        if not {line.id, f"{line.id}:{mark}"} & COVERS
    ]
    assert missing == []


def test_every_mark_of_a_test_names_a_line():
    whole = {line.id for line in all_lines()}
    halves = {f"{line.id}:{mark}" for line in all_lines() for mark in line.marks.split("+")}
    assert COVERS - whole - halves == set()
