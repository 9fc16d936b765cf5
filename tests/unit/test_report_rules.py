"""Each check fires on a log made for it and stays silent on a healthy one."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from report_curves import changed, controller_run, sft_run, swift_run
from report_faults import CHANGES, SEED, healthy, of_rule, told
from sweeps import some

from trainer.tools.report.analyse import analyse
from trainer.tools.report.analysed_run import recognise_profile
from trainer.tools.report.judge import CHECKS

FAILS = ("loss_nonfinite", "loss_zero", "loss_diverging", "oom_nccl", "ckpt_complete", "overfit")
FAILS += ("adv_shape", "kl", "clipped_ratio", "not_learning", "serving", "accuracy", "budget")
NOTES = ("grad_range",)
INFOS = ("jitter_normal", "time_periodic", "insufficient")
LEVEL_OF = {**dict.fromkeys(FAILS, "fail"), **dict.fromkeys(NOTES, "note")}
LEVEL_OF |= dict.fromkeys(INFOS, "info")


@cache
def healthy_report(kind):
    return analyse(healthy(kind))


def rules_of(report):
    return {finding.rule for finding in report.findings}


def test_there_is_a_fault_for_every_check():
    checks = {check.name.partition(":")[0] for check in CHECKS} - {"val_final", "course"}
    assert checks == {rule for changes in CHANGES.values() for rule in changes}


@pytest.mark.covers(
    "S0.14 S0.16 S0.18 S0.21 S0.26 S1.12 S1.13 S1.14 S1.20 S1.23 S1.35 S1.36 S1.37 S2.11 S2.17 "
    "S2.18 S2.19 S2.26 S2.27 S2.41 S3.32 S3.34 S3.35 S3.36 S3.39 S3.40 S3.41 S3.42 S4.19"
)
@pytest.mark.parametrize(
    ("kind", "rule"), [(kind, rule) for kind, changes in CHANGES.items() for rule in changes]
)
def test_a_rule_fires_on_its_fault_with_cause_and_remedy_and_not_on_a_healthy_run(kind, rule):
    report = analyse(CHANGES[kind][rule](healthy(kind)))
    assert rule in rules_of(report), f"{rule} is silent on its fault (seed {SEED})"
    worst = of_rule(report, rule)
    assert worst.level == LEVEL_OF.get(rule, "warn"), worst
    # a healthy controller jitters and still misses some budgets: told, not complained about
    silent = {"jitter_normal", "budget"} if kind == "controller" else set()
    assert rule in silent or rule not in rules_of(healthy_report(kind)), (
        f"{rule} fires on a healthy {kind} run (seed {SEED})"
    )
    ids = [finding.id for finding in report.findings]
    assert len(ids) == len(set(ids)), "ids tell findings apart"
    for finding in report.findings:
        assert finding.title.endswith("."), finding
        assert finding.level in ("info", "note") or (finding.cause and finding.remedy), finding
        assert "nan" not in finding.title.replace("finance", "").lower().split(), finding
    failed = [item for item in report.checklist if item.status == "fail"]
    assert not failed or report.verdict in ("ATTENTION", "FAIL"), failed


@pytest.mark.parametrize("seed", some(range(200), 5))
def test_a_healthy_fine_tuning_is_ok_without_any_warning(seed):
    report = analyse(sft_run(seed))
    assert (report.profile, report.verdict) == ("sft", "OK"), report.findings
    assert not [f for f in report.findings if f.level in ("warn", "fail")], f"seed {seed}"
    assert not report.anomalies and not report.top
    assert report.headline.startswith("Normal")


def test_the_profile_is_recognised_by_what_is_logged():
    kinds = {"sft": sft_run(0), "grpo": swift_run(0), "controller": controller_run(0)}
    assert {kind: recognise_profile(log) for kind, log in kinds.items()} == {
        kind: kind for kind in kinds
    }
    preferences = changed(sft_run(0), **{"rewards/margins": 0.3})
    assert recognise_profile(preferences) == "generic", "its loss falls from 0.69, its rewards too"
    assert recognise_profile(replace(sft_run(0), series={})) == "generic"


@pytest.mark.covers("S1.43")
def test_nothing_is_called_healthy_before_enough_was_seen():
    report = analyse(replace(controller_run(3, num_epochs=12), config={}))
    assert report.verdict == "INSUFFICIENT" and "12 epochs" in report.headline
    assert "insufficient" in rules_of(report)


def test_a_rule_that_lacks_its_metric_says_so():
    reasons = dict(analyse(sft_run(0)).insufficient)
    assert reasons["kl"] == "the log has no kl"
    assert reasons["reward_trend:flat"] == "applies to grpo and controller runs"


@pytest.mark.covers("S4.19")
@pytest.mark.parametrize(
    ("kind", "key", "value", "id_"),
    [
        ("grpo", "train/adv_mean", 0.42, "adv_shape:mean"),
        ("grpo", "train/adv_std", 0.001, "adv_shape:std"),
        ("sft", "system/gpu_util", 20.0, "gpu_util"),
        ("sft", "memory/max_reserved_frac", 0.98, "memory:headroom"),
    ],
)
@pytest.mark.parametrize("begins", [0.6, 0.85])
def test_what_begins_late_is_found_with_the_step_at_which_it_begins(kind, key, value, id_, begins):
    log = healthy(kind)
    steps = log.series["train/loss"].steps
    values = log.series[key].values.copy() if key in log.series else np.full(len(steps), 0.01)
    at = int(begins * len(values))
    values[at:] = value
    report = analyse(changed(log, **{key: values}))
    found = told(report)[id_]
    index = int(np.searchsorted(steps, found.steps[0])) if found.steps else -1
    assert abs(index - at) <= 1, (found.title, int(steps[at]))
