"""Tests of the report on whole runs: controllers by epoch, overfitting, the checklists, time and
memory.
"""

from dataclasses import replace

import numpy as np
import pytest
from report_curves import changed, checkpoints, controller_run, overfitting_example, sft_run
from report_faults import CHANGES, both, but, fill, line, put, sft, times, told, validated
from sweeps import some

from trainer.tools.report.analyse import analyse
from trainer.tools.report.run_log import LogEvent, Series


@pytest.mark.covers("S1.29 S1.36 S1.37 S1.17 S1.18 S1.19 S1.41")
@pytest.mark.parametrize("seed", some(range(60), 6))
def test_a_controller_that_learns_nothing_is_bad(seed):
    reward, violation, latency = np.random.default_rng(seed).normal(0, 1, (3, 30))
    log = changed(
        controller_run(seed),
        reward_mean=-0.8 + 0.05 * reward,
        accuracy_mean=0.0,
        budget_violation_rate=0.7 + 0.03 * violation,
        latency_mean=310 + 4 * latency,
    )
    report = analyse(log)
    assert report.verdict == "FAIL", seed
    expected = {"accuracy:zero", "budget:stuck", "reward_trend:negative", "budget:latency"}
    assert expected <= told(report).keys()
    assert "answers field" in told(report)["accuracy:zero"].remedy


@pytest.mark.covers("S1.17 S1.40 S1.44")
def test_a_negative_reward_that_rises_is_fine():
    log = controller_run(0)
    rewards = Series(np.arange(1, 31), np.linspace(-1.0, -0.05, 30))
    report = analyse(replace(log, series={**log.series, "reward_mean": rewards}))
    assert told(report)["reward_trend:negative"].level == "info" and report.verdict == "OK"


@pytest.mark.covers("S1.21 S1.22 S1.38 S1.39")
def test_normal_jitter_is_explained_and_not_warned_about():
    finding = told(analyse(controller_run(1)))["jitter_normal"]
    assert finding.level == "info" and "groups are sampled" in finding.cause
    assert "to 8 or 10" in finding.remedy and finding.evidence[0].startswith("early ")


@pytest.mark.covers("S3.43 S3.32 S1.31")
def test_the_example_of_overfitting_recommends_checkpoint_1000():
    report = analyse(overfitting_example())
    result = report.generalisation
    assert dict(result.verdicts) == {500: "ok", 1000: "ok", 1500: "note", 2000: "overfit"}
    assert (result.best_step, result.overfit_step, result.recommended_step) == (1000, 2000, 1000)
    assert str(result.recommended_path) == "run/global_step_1000"
    found = told(report)["overfit"]
    assert found.level == "warn" and "checkpoint of step 1000" in found.remedy


@pytest.mark.covers("S3.43")
def test_a_best_checkpoint_that_was_deleted_is_told_and_the_next_best_taken():
    report = analyse(overfitting_example(kept=(1500, 2000)))
    assert report.generalisation.recommended_step == 1500
    found = told(report)["overfit"]
    assert found.level == "fail" and "no longer exists" in found.cause


@pytest.mark.covers("S3.44")
def test_an_external_result_outranks_the_validation_loss():
    means = {500: 0.31, 1500: 0.44, 1700: 0.9}
    evaluations = {"eval/mine": {step: {"mean": mean} for step, mean in means.items()}}
    result = analyse(replace(overfitting_example(), evaluations=evaluations)).generalisation
    assert result.recommended_step == 1500, "1700 has no checkpoint"
    assert "takes precedence" in result.reason


def with_events(log, *messages):
    start = LogEvent(0, "start", "first attempt")
    return replace(
        log, events=(start, *(LogEvent(50, "error", message, "error") for message in messages))
    )


@pytest.mark.covers("S3.45 S3.46 S3.47 S3.48 S3.50 S3.51 S3.55 S3.56 S3.57")
def test_a_healthy_run_passes_all_lines_of_the_checklists():
    report = analyse(with_events(sft_run(2)))
    assert len({item.id for item in report.checklist}) == 12
    assert {item.status for item in report.checklist} == {"pass"}, report.checklist


FAULTS = CHANGES["sft"]
CHECKLIST_FAULTS = {
    "loss_falls": put("train/loss", slice(0, 100), np.linspace(1.5, 2.4, 100)),
    "rate_rises": put("train/lr", slice(50, 100), 1e-8),
    "gradient_in_range": FAULTS["grad_range"],
    "time_stable": put("train/time(s)", slice(0, 100), np.linspace(2, 4, 100)),
    "device_busy": FAULTS["gpu_util"],
    "no_crash": lambda log: with_events(log, "CUDA out of memory"),
    "checkpoints_whole": FAULTS["ckpt_complete"],
    "val_not_rising": FAULTS["val_rising"],
    "all_steps": FAULTS["run_complete"],
    "final_loss": FAULTS["loss_final"],
    "all_checkpoints": but(checkpoints=checkpoints([1600, *range(1800, 2001, 100)])),
    "finished": but(exit_code=76),
}


@pytest.mark.covers("S3.45 S3.46 S3.47 S3.48 S3.50 S3.51 S3.55 S3.56 S3.57")
@pytest.mark.parametrize("id_", CHECKLIST_FAULTS)
def test_each_line_of_the_checklists_can_fail(id_):
    report = analyse(sft(CHECKLIST_FAULTS[id_]))
    found = line(report, id_)
    # at the start alone: no rule warns of it
    unusual = {"loss_falls", "gradient_in_range", "time_stable"}
    assert found.status == ("note" if id_ in unusual else "fail") and found.detail, found
    assert (report.verdict == "OK") == (id_ in unusual)


def test_a_checkpoint_that_was_saved_and_pruned_is_not_missed():
    """Nor do checkpoints that a run had before it continued from its mirror on another machine."""
    log = replace(sft_run(2), checkpoints=checkpoints([1600, 1800, 1900, 2000]))
    assert line(analyse(log), "all_checkpoints").status == "fail"
    saved = [
        LogEvent(step, "checkpoint", f"saved global_step_{step}") for step in range(100, 1701, 100)
    ]
    report = analyse(replace(log, events=(*log.events, *saved)))
    assert line(report, "all_checkpoints").status == "pass"


@pytest.mark.covers("S3.40 S3.41 S3.56")
def test_the_losses_of_a_model_trained_from_random_weights_have_no_usual_range():
    """The losses are from the end of the quickstart: training 0.14, validation 0.09. For a
    pretrained model, 0.5 to 1.5 is usual.
    """
    steps = np.arange(1, 2001)
    noise = np.random.default_rng(0).normal(0, 0.01, 2000)
    losses = fill("train/loss", 0.14 + 7 * np.exp(-steps / 60) + noise)
    low = sft(both(losses, validated(0.09 + 7 * np.exp(-steps[99::100] / 60))))
    usual = {"loss_start_high", "loss_final", "val_final"}
    assert usual <= told(analyse(low)).keys()
    for key, value in (
        ("model.random_weights", True),
        ("model.partial_pretrain", "quickstart"),
        ("model.partial_pretrain", "/src/trainer/quickstart/model"),
    ):
        report = analyse(replace(low, config={key: value}))
        assert report.verdict == "OK" and not told(report).keys() & usual, report.findings
        assert line(report, "final_loss").status == "unknown"


@pytest.mark.covers("S3.33 S3.46")
def test_warmup_peak_and_decay_are_confirmed():
    rate = analyse(sft_run(0)).learning_rate
    assert (rate.schedule, rate.warmup_steps, rate.peak) == ("cosine", 200, 1e-5)


@pytest.mark.covers("S3.38")
def test_longer_steps_at_saves_are_normal_and_the_same_elsewhere_are_not():
    at_saves = analyse(sft(put("train/time(s)", slice(99, None, 100), 40.0)))
    assert told(at_saves)["time_periodic"].level == "info" and at_saves.verdict == "OK"
    elsewhere = analyse(sft(put("train/time(s)", [333, 777, 1460], 40.0)))
    assert "time_high:stalls" in told(elsewhere) and "time_periodic" not in told(elsewhere)


@pytest.mark.covers("S0.26")
def test_the_bottleneck_is_named_and_compilation_left_out():
    log = sft(put("train/time(s)", slice(0, 2), 90.0))
    report = analyse(log)
    assert report.throughput.step_s == pytest.approx(2.5, abs=0.05) and report.verdict == "OK"
    assert report.throughput.bottleneck.startswith("backward takes 59.9% of a step: computing")
    waiting = analyse(sft(fill("time/train/data_s", 1.9)))
    assert "the loader is the bottleneck" in waiting.throughput.bottleneck
    assert told(waiting)["data_bound"].level == "fail"


@pytest.mark.covers("S1.11 S1.28 S1.32")
def test_a_controller_that_stays_flat_is_told_what_to_change():
    low = 0.05 + 0.01 * np.sin(np.arange(30))
    report = analyse(changed(controller_run(0), accuracy_mean=low, reward_mean=low))
    assert told(report)["course:accuracy"].level == "note"
    assert "change learning_rate" in told(report)["accuracy:flat"].remedy
    assert "num_generations to 8 or 10" in told(report)["reward_trend:flat"].remedy


@pytest.mark.covers("S3.25 S3.37")
def test_slow_steps_are_put_into_proportion_and_the_disk_space_is_told():
    slow = analyse(sft(times("train/time(s)", 20.0)))
    assert "2 to 5 s is usual for 7B on 8 A100" in told(slow)["time_high"].cause
    assert slow.facts["checkpoints"] == "5, 210 GiB in all"


def test_every_metric_in_its_usual_range_is_not_said_beside_a_note():
    usual = "every metric stayed in its usual range"
    quiet = analyse(sft(times("train/loss", 1.0)))
    assert quiet.verdict == "OK" and usual in quiet.headline
    low = analyse(sft(times("train/loss", 0.2)))
    assert told(low)["loss_final"].level == "note" and low.verdict == "OK"
    assert usual not in low.headline and "no check found a fault" in low.headline


def test_the_guard_is_told_to_have_rolled_back_so_many_times():
    """A step with two warnings counts as one step."""

    def title(kind, *steps):
        events = tuple(LogEvent(step, kind, "rule", "warn") for step in steps)
        return told(analyse(sft(but(events=events))))["restarts:" + id_of[kind]].title

    id_of = {"rollback": "rollback", "guard/severe": "severe"}
    assert "rolled the run back 1 time, the last at step 49." in title("rollback", 49)
    assert "rolled the run back 3 times, the last at step 48." in title("rollback", 30, 48, 48)
    assert "warned about 2 steps, the last at step 48." in title("guard/severe", 30, 48, 48)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("phase", ["data", "forward", None])
@pytest.mark.parametrize(("rule", "num_slow"), [("stalls", 1), ("while", 60)])
def test_the_data_loader_is_blamed_for_slow_steps_only_where_loading_took_longer(
    rule, num_slow, phase, lag
):
    """The row of a step may hold the phases of the previous step."""
    slow = slice(1210, 1210 + num_slow)
    log = put("train/time(s)", slow, 22.5)(sft_run(0))
    if phase:
        later = slice(slow.start + lag, slow.stop + lag)
        log = put(f"time/train/{phase}_s", later, 20.0)(log)
    found = told(analyse(log))[f"time_high:{rule}"]
    assert ("data.num_workers" in found.remedy) == (phase == "data")
    assert any((phase or "the rest") in one for one in found.evidence) == (phase != "data")


def test_the_data_loader_is_not_blamed_for_a_large_model_or_without_its_times():
    log = changed(sft_run(0), **{"train/time(s)": 50.0, "time/train/backward_s": 40.0})
    assert "num_workers" not in told(analyse(log))["time_high"].remedy
    keys = [key for key in log.series if not key.startswith("time/")]
    unknown = replace(log, series={key: log.series[key] for key in keys})
    assert "num_workers" in told(analyse(unknown))["time_high"].remedy
