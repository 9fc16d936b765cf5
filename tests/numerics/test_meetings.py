"""Runs in which features meet, against plain training in float64; killed, and resumed."""

import pytest
from command_ranks import CommandRanks
from meeting_features import Places, drawn, ranks_of
from meeting_trials import tried
from sweeps import short_or_full

ROWS = [drawn(seed) for seed in range(40)]
SHORT = [row for row in ROWS if max(ranks_of(row)) == 2 and row["states"] == "float32"]


@pytest.fixture(scope="module")
def ranks():  # type: ignore[no-untyped-def]
    with CommandRanks() as ranks:
        yield ranks


@pytest.mark.parametrize("row", short_or_full(SHORT[:1], full=ROWS), ids=ROWS.index)
def test_a_run_with_any_features_is_exact_and_resumes(tmp_path, ranks, row):
    assert tried(row, Places(tmp_path), tmp_path / "run", ranks).faults == [], row
