"""The short form of several_machines.py: one of two machines is killed."""

import pytest
from hosts import why_not
from several_machines import TOTAL_STEPS, Campaign, Case, kill_first
from whole_runs import curve

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def test_a_run_on_two_machines_goes_on_with_one_when_the_other_is_killed(tmp_path):
    """The name of each machine resolves to 127.0.1.1: ranks that listened there would never meet."""
    result = Campaign(tmp_path).run(Case("killed", kill_first, num_ranks=1, then=(1, 1)))
    assert result["faults"] == []
    assert result["codes"] == {"host0": "killed", "host1": 75} and result["then"] == {"host0": 0}
    assert sorted(curve(tmp_path / "run0")) == list(range(1, TOTAL_STEPS + 1))
    output = (tmp_path / "run0.host1.log").read_text()
    assert "another machine of this run failed" in output and "Traceback" not in output
