"""The tables of docs/models.md match the results of every family and checkpoint."""

from importlib.metadata import version

import checkpoint_table
import pytest
import support_table
from families import FAMILIES, LEFT_OUT
from result_table import PAGE
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def test_every_causal_language_model_of_transformers_is_tried_or_left_out_with_a_reason():
    if support_table.TABLE.read()["versions"]["transformers"] != version("transformers"):
        pytest.skip("the results are those of another version of transformers")
    left_out = [name for names in LEFT_OUT.values() for name in names]
    assert sorted([*FAMILIES, *left_out]) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize("table", [support_table.TABLE, checkpoint_table.TABLE])
def test_the_page_shows_the_results(table):
    results = table.read()
    page = PAGE.read_text(encoding="utf-8")
    assert list(results[table.key]) == list(table.names)
    assert page == table.page(results, page), f"run: python {table.command}"
