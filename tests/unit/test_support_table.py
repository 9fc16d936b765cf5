"""The table of support: of every family, as its results say, and no mark without a measurement."""

from importlib.metadata import version

import pytest
from families import FAMILIES, LEFT_OUT
from support_table import NAMES, page, read_results
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

RESULTS = read_results()
pytestmark = pytest.mark.skipif(
    RESULTS["versions"]["transformers"] != version("transformers"),
    reason="the results are those of another version of transformers",
)


def test_every_causal_language_model_of_transformers_is_tried_or_left_out_with_a_reason():
    left_out = [name for names in LEFT_OUT.values() for name in names]
    assert sorted([*FAMILIES, *left_out]) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert len(FAMILIES) >= 85
    assert list(RESULTS["families"]) == list(NAMES)


def test_the_page_says_what_the_results_say(repository):
    written = (repository / "docs" / "models.md").read_text(encoding="utf-8")
    assert written == page(RESULTS, written), "run: python tests/support_table.py"
