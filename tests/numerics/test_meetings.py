"""Features that meet in one run: a sample of the rows of meetings.py, or all of them with `--full`."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import meetings
import pytest
from command_ranks import CommandRanks
from covering import Row, all_pairs, covering_rows, pairs_of
from meeting_features import EXCLUDED, FEATURES, Places, ranks_of
from meeting_trials import Found, compare, defined
from plain_training import train
from sweeps import is_full, some

TRIALS = meetings.trials(meetings.SEED)
TRAINED = [number for number, (row, reason) in enumerate(TRIALS) if not reason]
CHEAP = [n for n in TRAINED if max(ranks_of(TRIALS[n][0])) == 2 and TRIALS[n][0]["states"] == "float32"]
TRIED = some(range(len(TRIALS)), len(TRIALS)) if is_full() else [*some(CHEAP, 1), len(TRIALS) - 1]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return Places(tmp_path_factory.mktemp("meetings"))


@pytest.fixture(scope="module")
def ranks() -> Iterator[CommandRanks]:
    with CommandRanks() as ranks:
        yield ranks


@pytest.mark.parametrize("number", TRIED)
def test_a_meeting_is_exact_or_refused(places: Places, ranks: CommandRanks, number: int) -> None:
    row, reason = TRIALS[number]
    found = meetings.attempt(row, reason, places, places.root / str(number), ranks)
    assert found.faults == [], row


def test_what_is_not_as_defined_is_seen(places: Places) -> None:
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


def test_every_pair_of_values_meets_or_is_refused() -> None:
    met = {pair for row, _ in TRIALS for pair in pairs_of(row)}
    assert met >= all_pairs(FEATURES) and len(TRAINED) < 50
    assert not any(pairs_of(TRIALS[number][0]) & EXCLUDED for number in TRAINED)


def test_a_row_is_drawn_by_its_seed() -> None:
    def rows(seed: int) -> list[Row]:
        return covering_rows(FEATURES, excluded=EXCLUDED, seed=seed)

    assert rows(1) == rows(1) != rows(2)


def test_the_committed_result_is_of_these_rows_and_has_no_faults() -> None:
    result = json.loads(meetings.RESULTS.read_text())
    assert result["seed"] == meetings.SEED and result["faults"] == 0
    rows = {number: line["row"] for number, line in result["rows"].items()}
    drawn = {str(number): meetings.said(row) for number, (row, _) in enumerate(TRIALS)}
    assert rows == drawn


def test_places_are_made_once(tmp_path: Path) -> None:
    places = Places(tmp_path)
    made = places.model("llama") / "model.safetensors"
    before = made.stat().st_mtime_ns
    assert places.model("llama") == made.parent and made.stat().st_mtime_ns == before
