"""The run of analysis 002: seven intervals, the metrics that moved, their order, the causes, and
the remedies.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from report_curves import BURSTS, PERCENTS, SWIFT_CONFIG, sft_run, swift_run
from report_faults import of_rule

from trainer.tools.report.analyse import analyse
from trainer.tools.report.run_log import Series
from trainer.tools.report.words import chain_of

SEEDS = range(2)
STORY = ("kl", "length", "reward")


@cache
def report_of(seed):
    return analyse(swift_run(seed))


def story_of(anomaly):
    return tuple(name for name in chain_of(anomaly) if name in STORY)


@pytest.mark.covers("S2.8 S2.21 S2.22")
@pytest.mark.parametrize("seed", SEEDS)
def test_the_seven_intervals_are_found_and_no_eighth(seed):
    anomalies = report_of(seed).anomalies
    assert len(anomalies) == 7, f"seed {seed}: {[a.steps for a in anomalies]}"
    for anomaly, (first, last), percent in zip(anomalies, BURSTS, PERCENTS, strict=True):
        assert first - 10 <= anomaly.steps[0] <= first, f"seed {seed}: {anomaly.steps}"
        assert last <= anomaly.steps[1] <= last + 5, f"seed {seed}: {anomaly.steps}"
        assert abs(anomaly.percent - percent) < 1
        assert anomaly.has_recovered


@pytest.mark.covers("S2.22")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_calm_run_of_6000_steps_has_no_interval(seed):
    report = analyse(swift_run(seed, has_bursts=False))
    assert report.anomalies == (), f"seed {seed}: {[(a.steps, a.metric) for a in report.anomalies]}"


@pytest.mark.covers("S2.21 S2.23")
@pytest.mark.parametrize("seed", SEEDS)
def test_format_and_reward_are_named_as_moving_in_phase(seed):
    for anomaly in report_of(seed).anomalies:
        moved = {mover.metric: mover for mover in anomaly.movers}
        for key in ("rewards/Format/mean", "reward"):
            assert moved[key].sign == -1, f"seed {seed}"
            assert abs(moved[key].peak_step - anomaly.steps[1]) <= 10, f"seed {seed}"
        assert moved["completions/clipped_ratio"].sign == 1
    dropped = of_rule(report_of(seed), "reward_drop")
    assert "in phase: kl up to" in dropped.evidence[0]
    assert "rewards/Format/mean down to" in dropped.evidence[0]


@pytest.mark.covers("S2.45")
@pytest.mark.parametrize("seed", SEEDS)
def test_kl_leads_length_and_length_leads_reward_again_and_again(seed):
    report = report_of(seed)
    chains = [story_of(anomaly) for anomaly in report.anomalies]
    assert chains.count(STORY) >= 6, f"seed {seed}: {chains}"
    assert "kl → length → reward recurs" in of_rule(report, "kl").evidence[0]
    assert "unlikely to be a coincidence" in report.closing


@pytest.mark.covers("S2.24 S2.25 S2.26 S2.27 S2.28 S2.29")
def test_the_four_causes_why_it_passed_and_how_common_it_is():
    report = report_of(0)
    assert "moved far from its reference" in of_rule(report, "kl").cause
    assert "Without clipping" in of_rule(report, "grad_high").cause
    assert "become longer" in of_rule(report, "clipped_ratio").cause
    assert "unstable signal" in of_rule(report, "reward_drop").cause
    told = of_rule(report, "kl").cause
    for words in ("passed without", "KL penalty", "rate falls late", "PPO, GRPO, DPO"):
        assert words in told
    assert "gradient clipping" not in told, "no max_grad_norm was set: it cannot have helped"


@pytest.mark.covers("S2.30 S2.31 S2.32 S2.33 S2.34 S2.35 S2.36 S2.37 S2.39 S2.40 S2.41")
@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("kl", "Raise beta from 0.04 to 0.1 to 0.2 and adapt it"),
        ("kl", "epsilon and epsilon_high at 0.1"),
        ("kl", "at kl > 10 or a clipped ratio > 0.3, save a snapshot and return to a checkpoint"),
        ("kl", "eval_steps=100 and save_steps=100"),
        ("grad_high", "Set max_grad_norm to 1.0, or to 0.5"),
        ("grad_high", "skip the optimizer step"),
        ("lr_too_high", "learning_rate from 5e-5 to 5e-6 and set warmup_ratio to 0.1"),
        ("lr_too_high", "lr_scheduler_type=cosine or linear"),
        (
            "loss_spike",
            "per_device_train_batch_size from 1 to 4, or gradient_accumulation_steps to 8",
        ),
        ("clipped_ratio", "max_completion_length from 512 to 256"),
        (
            "clipped_ratio",
            "truncated answers reward 0, and set stop words or the end-of-text token",
        ),
    ],
)
def test_each_remedy_names_the_option_and_the_value(rule, words):
    assert words in of_rule(report_of(0), rule).remedy


@pytest.mark.covers("S2.42")
def test_the_configuration_is_quoted_as_evidence():
    assert "max_grad_norm is not set" in of_rule(report_of(0), "grad_high").evidence
    clipped = replace(swift_run(0), config={**SWIFT_CONFIG, "max_grad_norm": 1e6})
    assert "max_grad_norm is not set" not in of_rule(analyse(clipped), "grad_high").evidence


@pytest.mark.covers("S2.10")
def test_the_schedule_is_recognised_and_the_rate_called_too_high():
    report = report_of(0)
    rate = report.learning_rate
    assert (rate.schedule, rate.peak, rate.warmup_steps) == ("cosine", 5e-5, 300)
    assert rate.anomalies_at_high_share == 1.0
    assert rate.high_share > 0.9, "it stays near its peak nearly to the end"
    assert "too high" in of_rule(report, "lr_too_high").title


@pytest.mark.covers("S2.43")
def test_it_closes_with_a_summary_and_next_steps():
    report = report_of(0)
    assert report.verdict == "FAIL" and len(report.top) == 3
    assert [f.rule for f in report.top] == ["kl", "clipped_ratio", "loss_spike"]
    assert "1) Raise beta" in report.closing and "3) Set max_grad_norm" in report.closing


@pytest.mark.covers("S2.2 S2.7 S2.12 S2.13 S2.14 S2.15 S2.20")
def test_all_31_metrics_are_listed_in_their_groups_with_what_this_run_shows():
    metrics = {metric.key: metric for metric in report_of(0).metrics}
    assert len(metrics) == 31 and all(metric.meaning for metric in metrics.values())
    groups = {key: metric.group for key, metric in metrics.items()}
    assert groups["kl"] == groups["train/lr"] == "optimisation" and groups["reward_std"] == "reward"
    assert groups["completions/clipped_ratio"] == "length"
    assert metrics["completions/clipped_ratio"].direction == "down"
    assert metrics["reward"].direction == metrics["rewards/PlaneMatchString/mean"].direction == "up"
    shortest = metrics["completions/min_length"]
    assert (shortest.maximum, shortest.maximum_step) == (379, 2825)


@pytest.mark.parametrize(("factor", "num_found"), [(2.0, 0), (5.0, 1)])
def test_one_hard_batch_with_a_quiet_gradient_is_no_interval(factor, num_found):
    log = sft_run(4)
    loss = log.series["train/loss"]
    values = np.where(loss.steps == 1000, factor * loss.values, loss.values)
    series = {**log.series, "train/loss": Series(loss.steps, values)}
    assert len(analyse(replace(log, series=series)).anomalies) == num_found
