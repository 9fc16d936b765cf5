"""Features that meet in one run: every pair of their values meets at least once in the rows of
tiny runs. A sample of the rows is tried, or all of them with `--full`.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from command_ranks import CommandRanks
from covering import all_pairs, covering_rows, pairs_of
from meeting_features import EXCLUDED, FEATURES, Places, ranks_of, refused_rows
from meeting_trials import Found, compare, defined, refused, tried
from plain_training import train
from sweeps import is_full, some

SEED = 1
TRIALS = [(row, "") for row in covering_rows(FEATURES, excluded=EXCLUDED, seed=SEED)]
TRIALS += refused_rows()
"""Rows with the reason for which they are refused; first those that train."""
TRAINED = [number for number, (row, reason) in enumerate(TRIALS) if not reason]
CHEAP = [
    n for n in TRAINED if max(ranks_of(TRIALS[n][0])) == 2 and TRIALS[n][0]["states"] == "float32"
]
TRIED = some(range(len(TRIALS)), len(TRIALS)) if is_full() else [*some(CHEAP, 1), len(TRIALS) - 1]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return Places(tmp_path_factory.mktemp("meetings"))


@pytest.fixture(scope="module")
def ranks() -> Iterator[CommandRanks]:
    with CommandRanks() as ranks:
        yield ranks


@pytest.mark.parametrize("number", TRIED)
def test_a_meeting_is_exact_or_refused(places, ranks, number):
    row, reason = TRIALS[number]
    run_dir = places.root / str(number)
    if reason:
        found = refused(row, reason, places, run_dir, ranks)
    else:
        found = tried(row, places, run_dir, ranks)
    assert found.faults == [], row


def test_what_is_not_as_defined_is_seen(places):
    """The run of the sample beside definitions that differ from it in one thing each."""
    number = next(number for number in TRIED if not TRIALS[number][1])
    row = TRIALS[number][0]
    assert "float32" in row["states"]
    definition, _ = defined(row, places)
    first = definition.steps[0]
    for change in ({"lr": 1.001 * definition.lr}, {"steps": [first[1:], *definition.steps[1:]]}):
        other, found = replace(definition, **change), Found()
        compare(found, row, other, train(other), places.root / str(number), "")
        assert found.faults, change


def test_every_pair_of_values_meets_or_is_refused():
    met = {pair for row, _ in TRIALS for pair in pairs_of(row)}
    assert met >= all_pairs(FEATURES) and len(TRAINED) < 50
    assert not any(pairs_of(TRIALS[number][0]) & EXCLUDED for number in TRAINED)
