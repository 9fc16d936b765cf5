"""Runs with combined features, compared with plain training in float64, and resumed."""

from itertools import count

import pytest
from meeting_features import Places, drawn
from meeting_trials import tried
from sweeps import short_or_full

ROWS = [drawn(seed) for seed in range(40)]
SHORT = [
    next(row for row in map(drawn, count()) if chosen.items() <= row.items())
    for chosen in (
        {"trained": "all", "states": "float32", "experts": "2"},
        {"trained": "some", "states": "bfloat16 parameters", "length": "steps"},
        {"trained": "lora on nf4", "states": "float32"},
        {"trained": "lora and ends", "states": "bfloat16", "length": "steps"},
        {"trained": "lora on experts", "states": "float32"},
    )
]


@pytest.mark.parametrize("row", short_or_full(SHORT, full=ROWS), ids=lambda row: row["trained"])
def test_a_run_with_any_features_is_exact_and_resumes(tmp_path, row):
    assert tried(row, Places(tmp_path), tmp_path / "run") == [], row
