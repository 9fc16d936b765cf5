"""Runs in which features meet, against plain training in float64; and resumed."""

from itertools import count

import pytest
from meeting_features import Places, drawn
from meeting_trials import tried
from sweeps import short_or_full

ROWS = [drawn(seed) for seed in range(40)]
SHORT = [
    next(row for row in map(drawn, count()) if (row["trained"], row["states"]) == (trained, states))
    for trained, states in (
        ("all", "bfloat16 parameters"),
        ("lora", "bfloat16"),
        ("some", "float32"),
        ("lora on nf4", "float32"),
        ("lora and ends", "float32"),
    )
]


@pytest.mark.parametrize("row", short_or_full(SHORT, full=ROWS), ids=lambda row: row["trained"])
def test_a_run_with_any_features_is_exact_and_resumes(tmp_path, row):
    assert tried(row, Places(tmp_path), tmp_path / "run") == [], row
