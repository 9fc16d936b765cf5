"""Runs in which features meet, against plain training in float64; and resumed."""

import pytest
from meeting_features import Places, drawn
from meeting_trials import tried
from sweeps import short_or_full

ROWS = [drawn(seed) for seed in range(40)]
SHORT = [
    next(row for row in ROWS if row["trained"] == trained and row["states"] == states)
    for trained, states in (
        ("all", "bfloat16 parameters"),
        ("lora", "bfloat16"),
        ("some", "float32"),
    )
]


@pytest.mark.parametrize("row", short_or_full(SHORT, full=ROWS), ids=ROWS.index)
def test_a_run_with_any_features_is_exact_and_resumes(tmp_path, row):
    assert tried(row, Places(tmp_path), tmp_path / "run") == [], row
