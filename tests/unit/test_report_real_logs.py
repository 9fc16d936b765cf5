"""Real logs of TRL and transformers (tests/real_logs): a raised rate is found, and healthy runs
cause no finding.
"""

from functools import cache
from io import StringIO

import pytest
from report_faults import judged, line, serious, told
from repository import REPOSITORY
from rich.console import Console

from trainer.tools.report.readers import read_run
from trainer.tools.report.terminal import print_report
from trainer.tools.report.words import chain_of

LOGS = REPOSITORY / "tests/real_logs"
RAISED = ("transformers_raised", "trl_raised")
HEALTHY = ("transformers_healthy", "trl_healthy")
FAULT_STEPS = (400, 414)
LOGGED_EVERY = {"transformers_raised": 1, "trl_raised": 5}


@cache
def report_of(name):
    return judged(LOGS / name)


@pytest.mark.covers("S2.10:R S2.21 S2.22 S2.23 S2.39 S3.33")
@pytest.mark.parametrize("name", RAISED)
def test_a_raised_learning_rate_comes_first_and_gives_the_one_interval(name):
    report = report_of(name)
    found = told(report)["lr_schedule:raised"]
    assert report.verdict in ("ATTENTION", "FAIL") and report.top[0] == found
    assert found.steps[0] == FAULT_STEPS[0]
    assert 0 <= FAULT_STEPS[1] - found.steps[1] < LOGGED_EVERY[name]
    assert found.value == pytest.approx(50, rel=0.05), (
        "the schedule itself falls from one point to the next"
    )
    assert "train/loss up to 5." in found.evidence[0]
    (anomaly,) = report.anomalies
    assert 0 < anomaly.steps[0] - FAULT_STEPS[0] <= LOGGED_EVERY[name]
    assert anomaly.steps[1] <= FAULT_STEPS[1] and chain_of(anomaly)[-1] == "loss"
    assert not anomaly.has_recovered, "the loss stays above the 3.1 it had"


@pytest.mark.covers("S2.10:R")
@pytest.mark.parametrize("name", [*RAISED, *HEALTHY])
def test_the_schedule_is_told_without_the_fault(name):
    report = report_of(name)
    rate = report.learning_rate
    assert (rate.schedule, rate.warmup_steps) == ("cosine", 30)
    assert rate.peak == pytest.approx(3e-3) and bool(rate.raised) == (name in RAISED)
    assert line(report, "rate_rises").status == "pass"


@pytest.mark.parametrize("name", HEALTHY)
def test_of_a_healthy_run_only_the_untrained_weights_are_remarked(name):
    report = report_of(name)
    assert not serious(report) and not report.anomalies
    assert told(report)["loss_start_high"].level == "note"


@pytest.mark.parametrize("name", [*RAISED, *HEALTHY])
def test_what_trainer_state_does_not_hold_is_not_said_to_be_unset(name):
    text = StringIO()
    print_report(Console(width=120, file=text), report_of(name), read_run(LOGS / name))
    assert name in text.getvalue() and "is not set" not in text.getvalue()


def test_a_peak_far_too_high_is_answered_with_a_lower_learning_rate():
    report = report_of("transformers_peak")
    assert report.verdict == "ATTENTION"
    assert report.learning_rate.peak == pytest.approx(0.15) and not report.learning_rate.raised
    assert "Lower learning_rate from 0.15 to 0.015" in report.top[0].remedy
