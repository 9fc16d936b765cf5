"""The table of support: of every family, as its results say, and no mark without a measurement."""

from pathlib import Path

import support_table
from families import FAMILIES, LEFT_OUT
from support_table import NAMES, marks, page, read_results
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

RESULTS = read_results()


def test_every_causal_language_model_of_transformers_is_tried_or_left_out_with_a_reason() -> None:
    left_out = [name for names in LEFT_OUT.values() for name in names]
    assert sorted([*FAMILIES, *left_out]) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert len(FAMILIES) >= 85
    assert list(RESULTS["families"]) == list(NAMES)


def test_the_page_says_what_the_results_say(repository: Path) -> None:
    written = (repository / "docs" / "models.md").read_text(encoding="utf-8")
    assert written == page(RESULTS, written), "run: python tests/support_table.py --write"


def test_a_family_that_fails_is_no_family_that_trains() -> None:
    exact = {"loss error": 9e-7, "norm error": 9e-6, "gradient error": 9e-6, "gradients missing": []}
    entry = {
        "how": "packed",
        "reason": "",
        "1 rank": exact,
        "2 ranks": exact,
        "resume faults": [],
        "export faults": [],
    }
    assert all(marks(entry).values()) and support_table.faults(entry) == []
    changes = {
        "first step": {"1 rank": exact | {"loss error": 2e-6}},
        "ranks and micro-batches": {"2 ranks": exact | {"norm error": 2e-5}},
        "resumed": {"resume faults": ["losses"]},
        "export": {"export faults": ["missing_keys: x"]},
    }
    for mark, change in changes.items():
        assert mark in support_table.faults(entry | change)
    assert not any(marks({"failed": "no result in time"}).values())
    assert support_table.faults({"failed": "no result in time"})
