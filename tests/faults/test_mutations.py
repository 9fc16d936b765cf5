"""The list of safeguards stays in step with the code; running them all is a command (see
mutations.py).
"""

import ast

import mutations
import pytest
from mutations import MUTATIONS, REPOSITORY


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_safeguard_is_still_where_the_list_says(mutation):
    text = (REPOSITORY / "trainer" / mutation.file).read_text()
    changed = mutations.apply(mutation, text)
    assert changed != text
    ast.parse(changed)
    for test in mutation.tests:
        file, _, name = test.partition("::")
        assert f"def {name}" in (REPOSITORY / "tests" / file).read_text(), test


def test_a_removed_safeguard_makes_its_test_fail():
    """Run the cheapest one to check that the command works."""
    mutation = next(m for m in MUTATIONS if m.name == "a damaged checkpoint means step 0")
    assert mutations.caught_by(mutation) == mutation.tests[0]


def test_names_are_unique():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
