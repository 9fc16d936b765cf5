"""A model killed with SIGKILL in a step and restarted equals an uninterrupted run bit for bit.

This tests one family of each kind with `pytest --full`; `python tests/support_table.py` tests all
families.
"""

import pytest
from family_runs import TOTAL_STEPS, export_faults, interrupted_run, prepare
from sweeps import short_or_full

KINDS = short_or_full(
    ("qwen3_next",),
    full=("gemma3_text", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"),
)


@pytest.mark.parametrize("name", KINDS)
def test_a_killed_run_continues_bit_equal_and_its_export_is_what_was_trained(tmp_path, name):
    prepare(tmp_path, name)
    assert interrupted_run(tmp_path, tmp_path / "model") == []
    assert export_faults(tmp_path / "straight" / f"global_step_{TOTAL_STEPS}") == []
