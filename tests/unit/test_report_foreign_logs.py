"""Faults and healthy runs as logs of other trainers show them: printed digits, other column names,
small losses, long answers, steps that are logged in intervals.
"""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_curves import changed, grpo_run, sft_run
from report_faults import Change, both, healthy, put, serious, sft, times, told, validated

from trainer.tools.report.analyse import analyse
from trainer.tools.report.learning_rate import raised_rates
from trainer.tools.report.readers import read_run
from trainer.tools.report.readers.parsing import guessed
from trainer.tools.report.run_log import LogEvent, RunLog, Series

STEPS = np.arange(1, 2001)


def normal(sigma: float, num_points: int, seed: int = 3) -> Any:
    """Noise with standard deviation sigma: the same in each call, whichever tests ran before."""
    return np.random.default_rng(seed).normal(0, sigma, num_points)


def grpo(change: Change) -> RunLog:
    return change(healthy("grpo"))


def rates(values: Any) -> RunLog:
    return changed(sft_run(0), **{"train/lr": values})


def test_a_rate_of_zero_is_told_from_its_first_step():
    found = serious(analyse(rates(np.where(STEPS < 1200, 1e-5, 0.0))))["lr_schedule:zero"]
    assert found.steps == (1200, 2000)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(np.zeros(2000), id="printed with three decimals"),
        pytest.param(np.round(1e-6 * (1 + np.cos(np.pi * STEPS / 2000)) / 2, 8), id="with eight"),
        pytest.param(1e-5 * (1 - STEPS / 2000), id="linear to 0"),
    ],
)
def test_a_rate_that_is_zero_in_print_only_is_not_told(values):
    assert "lr_schedule:zero" not in told(analyse(rates(values)))


def test_a_warm_up_that_does_not_end_is_told():
    log = rates(1e-5 * STEPS / 2000)
    assert "lr_schedule:rising" in serious(analyse(log))
    assert "lr_schedule:rising" not in told(analyse(replace(log, total_steps=20_000)))


def test_restarts_of_a_cosine_are_no_jump():
    phases = (np.arange(0, 10_000, 50) % 2_500) / 2_500
    values = 1e-5 * (1 + np.cos(np.pi * phases)) / 2 + 1e-10
    assert not raised_rates(Series(np.arange(200), values * 0.7 ** (np.arange(200) // 50)))


@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_a_gradient_that_stays_high_is_told_from_its_onset(kind):
    log = healthy(kind)
    num_steps = log.num_rows
    factors = np.where(np.arange(num_steps) < num_steps // 2, 1.0, 300.0)
    found = serious(analyse(times("train/grad_norm", factors)(log)))["grad_high:rise"]
    onset = log.series["train/grad_norm"].steps[num_steps // 2]
    assert found.steps is not None and abs(found.steps[0] - onset) <= 10


def test_a_low_loss_is_memorized_only_if_the_validation_loss_is_higher():
    low = times("train/loss", 0.05)
    evals = np.linspace(0.08, 0.05, 20)
    assert "loss_final" in serious(analyse(sft(low)))
    assert "loss_final" not in serious(analyse(sft(both(low, validated(evals)))))


@pytest.mark.parametrize("factor", [0.02, 1.0])
def test_a_spike_is_judged_against_the_level_of_the_loss(factor):
    change = both(times("train/loss", factor), put("train/loss", slice(1000, 1004), 5.0 * factor))
    assert "loss_spike" in serious(analyse(sft(change)))


def test_a_high_first_loss_warns_only_if_the_model_is_known():
    log = sft(put("train/loss", slice(0, 10), 9.0))
    assert told(analyse(log))["loss_start_high"].level == "warn"
    assert told(analyse(replace(log, config={})))["loss_start_high"].level == "note"


@pytest.mark.parametrize("share", [0.01, 0.25])
def test_a_longest_answer_at_the_cap_warns_only_if_many_are_cut_off(share):
    log = grpo(
        both(
            put("completions/max_length", slice(None), 1024.0),
            put("completions/clipped_ratio", slice(None), share),
        )
    )
    assert told(analyse(log))["clipped_ratio:cap"].level == ("warn" if share > 0.1 else "note")


def test_steps_that_take_longer_because_answers_do_are_not_told():
    growth = np.linspace(1, 1.8, grpo_run(0).num_rows)
    slower = changed(grpo_run(0), **{"train/time(s)": 40 * growth})
    assert any(id_.startswith("time_growth") for id_ in serious(analyse(slower)))
    longer = times("completions/mean_length", growth)(slower)
    assert not any(id_.startswith("time_growth") for id_ in serious(analyse(longer)))


def test_fewer_tokens_per_second_because_answers_are_shorter_are_not_told():
    fall = np.where(np.arange(grpo_run(0).num_rows) < 700, 1.0, 0.4)
    log = changed(grpo_run(0), **{"throughput/train/tokens_per_s": 1e4 * fall})
    assert "time_growth:slowdown" in serious(analyse(log))
    shorter = times("completions/mean_length", fall)(log)
    assert "time_growth:slowdown" not in serious(analyse(shorter))


def test_slow_steps_next_to_each_other_are_not_regular_work():
    """Logged every 10 steps: a slow stretch has a slow point every 10 steps."""
    log = sft_run(0)
    times_s = log.series["train/time(s)"]
    kept = times_s[9::10]
    values = kept.values.copy()
    values[80:110] *= 4
    series = {key: one for key, one in log.series.items() if not key.startswith("val/")}
    series["train/time(s)"] = Series(kept.steps, values)
    report = analyse(replace(log, series=series, checkpoints=(), config={}))
    assert serious(report)["time_high:while"].steps == (810, 1100)
    assert "time_periodic" not in told(report)


def test_memory_that_doubles_in_a_short_run_is_told():
    log = sft_run(0)
    short = {key: one[:220] for key, one in log.series.items()}
    log = replace(log, series=short, num_rows=220, total_steps=220, checkpoints=())
    values = short["memory/cpu/rss_gib"].values * np.linspace(
        1, 2, len(short["memory/cpu/rss_gib"])
    )
    assert "memory:leak" in serious(analyse(changed(log, **{"memory/cpu/rss_gib": values})))


def test_a_reward_that_never_lasts_is_flat_and_one_that_collapsed_is_not():
    num_rows = grpo_run(0).num_rows
    noise = normal(0.02, num_rows)
    brief = 0.3 + noise + np.where(abs(np.arange(num_rows) - num_rows // 2) < 25, 0.1, 0)
    assert "reward_trend:flat" in serious(analyse(grpo(put("reward", slice(None), brief))))
    rise = np.minimum(np.linspace(0.2, 1.4, num_rows), 0.8)
    collapsed = np.where(np.arange(num_rows) < 0.7 * num_rows, rise, 0.1) + noise
    found = serious(analyse(grpo(put("reward", slice(None), collapsed))))
    assert "reward_trend:collapse" in found and "reward_trend:flat" not in found


def test_equal_rewards_are_told_by_verls_largest_advantage():
    advantages = np.where(np.arange(grpo_run(0).num_rows) < 600, 2.4, 0.0)
    log = changed(grpo_run(0), **{"critic/advantages/max": advantages})
    log = replace(log, series={k: v for k, v in log.series.items() if "adv_std" not in k})
    assert "adv_shape:std" in serious(analyse(log))


def test_names_of_other_trainers_are_known(tmp_path):
    columns = {
        "perf/step_time": "train/time(s)",
        "perf/data_time": "time/train/data_s",
        "perf/gpu_mem_gb": "memory/allocated_gib",
        "train/tokens_per_sec": "throughput/train/tokens_per_s",
        "entropy/mean": "train/entropy",
        "lr-AdamW": "train/lr",
        "grad_2.0_norm_total": "train/grad_norm",
        "tokens/train_per_sec_per_gpu": "throughput/train/tokens_per_s_per_gpu",
        "memory/max_allocated (GiB)": "memory/max_allocated_gib",
        "memory/device_reserved (GiB)": "memory/max_reserved_gib",
    }
    rows = ({"_step": step, **dict.fromkeys(columns, float(step))} for step in range(1, 9))
    log = tmp_path / "history.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert set(columns.values()) <= read_run(log).series.keys()


LINES = {
    "torchtune": "Step {} | loss:1.5 lr:1e-05 grad_norm:0.5",
    "torchtitan": "- root - INFO - \x1b[31mstep: {}  \x1b[32mloss:  1.5  grad_norm:  0.5  lr: 1e-5  memory: 2GiB(2%)",
    "NeMo": "Training epoch 0, iteration {}/900 | lr: 1e-05 | reduced_train_loss: 1.5 | grad_norm: 0.5",
    "Megatron": "iteration {}/ 900 | learning rate: 1.0E-05 | lm loss: 1.5E+00 | grad norm: 0.5 |",
    "slime": "(M pid=7) model.py:463 - step {}: {{'train/loss': 1.5, 'train/grad_norm': 0.5, 'train/lr-pg_0': 1e-5}}",
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_the_console_lines_of_other_trainers_are_read(tmp_path, line):
    log: Path = tmp_path / "console.log"
    log.write_text("".join(line.format(n) + "\n" for n in range(1, 9)))
    found = {key: series.values[-1] for key, series in read_run(log).series.items()}
    known = {"train/loss": 1.5, "train/lr": 1e-5, "train/grad_norm": 0.5}
    assert found.items() >= known.items()


def test_failed_saves_are_read_from_the_console(tmp_path):
    log: Path = tmp_path / "console.log"
    error = "ERROR: save_checkpoint failed: OSError: [Errno 122] Disk quota exceeded"
    lines = [f"step {n} | loss: {2 - n / 300} | lr: 1e-5" for n in range(1, 200)]
    log.write_text("\n".join([*lines[:120], error, *lines[120:]]))
    assert serious(analyse(read_run(log)))["saves_failed"].steps == (120, 120)


def test_metrics_of_saves_and_of_errors_are_no_failed_save(tmp_path):
    log: Path = tmp_path / "console.log"
    lines = [f"step:{n} - critic/error:0.1 - timing_s/save_checkpoint:30.5" for n in range(1, 9)]
    log.write_text("\n".join(lines))
    assert "checkpoint/failed_in_a_row" not in read_run(log).series


def test_a_long_line_is_read_in_linear_time(tmp_path):
    log: Path = tmp_path / "console.log"
    log.write_text(("step 1 " + "save checkpoint " * 4000 + "\n") * 20 + "step 1: loss: 1, lr: 2\n")
    started = time.monotonic()
    assert read_run(log).series and time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("train/loss_step", "train/loss"),
        ("Loss", "train/loss"),
        ("dev_loss", "val/loss"),
        ("lr-AdamW/pg1", "train/lr"),
        ("seconds_per_step", "train/time(s)"),
        ("cpu_memory_gb", "memory/cpu/rss_gib"),
        ("system.proc.memory.rssMB", "memory/cpu/rss_gib"),
        ("gpu_memory_allocated_gb", "memory/allocated_gib"),
        ("tokens_per_second_per_gpu", "throughput/train/tokens_per_s_per_gpu"),
        ("rollout/raw_reward", "reward"),
        ("rollout/response_len/max", "tokens/response_length/max"),
        ("optim/grad_norm", "train/grad_norm"),
        ("is_truncated/mean", "completions/clipped_ratio"),
        ("loss_metrics/global_avg_loss", "train/loss"),
        ("validation_metrics/loss", "val/loss"),
        ("time_metrics/end_to_end(s)", "train/time(s)"),
        ("time_metrics/data_loading(s)", "time/train/data_s"),
        ("metrics/train/LanguageCrossEntropy", "train/loss"),
        ("train_step_timing in s", "train/time(s)"),
        ("learning-rate", "train/lr"),
        ("ppo_actor/update/grad_norm", "train/grad_norm"),
        ("ppo_actor/no_eos_ratios/avg", "completions/clipped_ratio"),
        ("val/advantages_max", "critic/advantages/max"),
        ("ckpt/failed_saves", "checkpoint/failed_in_a_row"),
        ("val/aime24", "val/accuracy"),
        ("loss_metrics/global_max_loss", None),
        ("time_metrics/data_loading(%)", None),
        ("aux_loss", None),
        ("train/loss_epoch", None),
        ("value_loss", None),
        ("eval_steps_per_second", None),
        ("rewards/margins", None),
    ],
)
def test_names_that_no_table_holds_are_guessed_from_their_words(name, key):
    assert guessed(name) == key


def test_a_guessed_name_does_not_replace_a_known_one(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text("".join(f'{{"step": {n}, "loss": 1, "loss_step": 2}}\n' for n in range(9)))
    series = read_run(log).series
    assert series["train/loss"].values[0] == 1 and series["loss_step"].values[0] == 2


VERL = ["Total training steps: 300", *(f"step:{n} - actor/pg_loss:0.1" for n in range(1, 150))]
LLAMA_FACTORY = [
    json.dumps({"current_steps": step, "total_steps": 300, "loss": 1.5, "lr": 1e-5})
    for step in range(1, 150)
]


@pytest.mark.parametrize(
    ("name", "lines"), [("verl.log", VERL), ("trainer_log.jsonl", LLAMA_FACTORY)]
)
def test_the_planned_steps_of_other_trainers_are_known(tmp_path, name, lines):
    log: Path = tmp_path / name
    log.write_text("\n".join(lines))
    run = read_run(log)
    assert run.total_steps == 300
    assert told(analyse(run))["run_complete:steps"].steps == (149, 149)


def test_steps_of_an_environment_are_no_planned_steps(tmp_path):
    log: Path = tmp_path / "log.jsonl"
    log.write_text(
        "".join(f'{{"step": {n}, "total_steps": {512 * n}, "loss": 1}}\n' for n in STEPS)
    )
    assert read_run(log).total_steps is None


def test_a_raw_reward_counts_beside_a_normalised_one(tmp_path):
    log: Path = tmp_path / "log.jsonl"
    row = '{{"step": {}, "rollout/rewards": 0.0, "rollout/raw_reward": 0.5}}\n'
    log.write_text("".join(map(row.format, range(1, 9))))
    assert read_run(log).series["reward"].values[0] == 0.5


def test_a_foreign_log_that_ends_before_its_last_planned_step_may_still_train():
    log = replace(sft_run(0), source="transformers", total_steps=2010)
    assert told(analyse(log))["run_complete:steps"].level == "note"
    assert told(analyse(replace(log, source="fsdp-sft")))["run_complete:steps"].level == "warn"


def test_regular_pauses_of_two_kinds_are_no_stalls_and_slow_tokens_are():
    def stalls(steps: Any) -> bool:
        slow = np.where(np.isin(STEPS, steps), 9.0, 1.0)
        times = replace(sft_run(0), series={"train/time(s)": Series(STEPS, slow)})
        speeds = {"throughput/train/tokens_per_s": Series(STEPS, 5e4 / slow)}
        found = "time_high:stalls" in serious(analyse(times))
        assert ("time_high:stalls" in serious(analyse(replace(times, series=speeds)))) == found
        return found

    assert not stalls([150, 300, 400, 450, 600, 750, 800])
    assert stalls([151, 302, 407, 450, 611])


def test_a_share_of_clipped_ratios_that_rises_is_told_and_a_constant_one_is_not():
    log = grpo_run(0)
    share = np.where(np.arange(log.num_rows) < 600, 0.01, 0.2)
    assert "clip_ratio" in serious(analyse(changed(log, clip_ratio=share)))
    assert "clip_ratio" not in serious(analyse(changed(log, clip_ratio=0.2)))


def test_a_gradient_that_vanishes_is_told_from_where_it_falls():
    norms = np.where(STEPS < 1500, 2 * np.exp(-STEPS / 300) + 0.3, 1e-6) * (1 + normal(0.1, 2000))
    found = serious(analyse(sft(put("train/grad_norm", slice(None), norms))))["grad_vanish"]
    assert found.steps is not None and abs(found.steps[0] - 1500) <= 10


def test_answers_that_get_worse_while_the_reward_rises_are_told():
    num_rows = grpo_run(0).num_rows
    noise = normal(0.02, num_rows)
    rows = np.arange(num_rows)
    worse = np.where(rows < 0.6 * num_rows, 0.5, 0.1) + noise
    log = changed(grpo_run(0), **{"rewards/accuracy/mean": worse})
    found = serious(analyse(log))["reward_hacking:part:rewards/accuracy/mean"]
    onset = log.series["rewards/accuracy/mean"].steps[int(0.6 * num_rows)]
    assert found.steps is not None and abs(found.steps[0] - onset) <= 10


@pytest.mark.parametrize(
    ("key", "is_told"),
    [("rewards/code_exec/mean", True), ("rewards/brevity/mean", False), ("rewards/chosen", False)],
)
def test_a_part_of_the_reward_that_is_lost_is_told_under_any_name(key, is_told):
    """Answers may get longer, and preference training lowers both rewards."""
    falls = np.where(np.arange(grpo_run(0).num_rows) < 700, 0.5, 0.1)
    ids = serious(analyse(changed(grpo_run(0), **{key: falls}))).keys()
    assert (f"reward_hacking:part:{key}" in ids) == is_told


def test_a_reward_that_collapsed_and_came_back_is_told():
    rows = np.arange(grpo_run(0).num_rows)
    rewards = 0.2 + 0.6 * rows / len(rows) + normal(0.02, len(rows))
    lost = (rows >= 500) & (rows < 700)
    log = grpo(put("reward", slice(None), np.where(lost, 0.05, rewards)))
    found = serious(analyse(log))["reward_trend:collapse"]
    assert found.steps is not None and "came back after step" in found.title
    assert abs(found.steps[0] - log.series["reward"].steps[500]) <= 10


@pytest.mark.parametrize("key", ["val/reward", "val/aime24/avg@16", "val/math_pass1"])
def test_a_held_out_reward_that_rises_and_then_falls_is_told_from_its_peak(key):
    rows = np.arange(20)
    rewards = np.where(rows < 9, 0.3 + 0.05 * rows, 0.75 - 0.03 * (rows - 9))
    steps = 60 * (rows + 1)
    log = grpo_run(0)
    others = {name: one for name, one in log.series.items() if name != "val/reward"}
    log = replace(log, series={**others, key: Series(steps, rewards)})
    found = serious(analyse(log))["val_results:reward"]
    assert found.steps is not None and abs(found.steps[0] - steps[8]) <= 60


@pytest.mark.parametrize("metric", ["completions/mean_length", "completions/clipped_ratio"])
def test_a_slow_ramp_is_told_from_its_first_steps(metric):
    num_rows = grpo_run(0).num_rows
    since = ((np.arange(num_rows) - 400) / (num_rows - 500)).clip(0, 1)
    ramps = {
        "completions/mean_length": 400 * (1 - 0.9 * since) + normal(8, num_rows),
        "completions/clipped_ratio": 0.03 + 0.7 * since + normal(0.005, num_rows).clip(-0.02),
    }
    log = grpo(put(metric, slice(None), ramps[metric]))
    found = [one for one in serious(analyse(log)).values() if one.metric == metric]
    assert found and found[0].steps is not None
    steps = log.series[metric].steps
    assert abs(found[0].steps[0] - steps[400]) <= 0.05 * steps[-1]


def test_the_entropy_of_an_sft_run_may_fall():
    entropies = 2.0 * np.exp(-STEPS / 500) + 0.02
    assert "entropy_collapse" not in told(
        analyse(changed(sft_run(0), **{"train/entropy": entropies}))
    )


def test_a_gradient_that_rises_with_a_jump_of_the_loss_comes_first():
    log = both(
        times("train/loss", 1 + 0.2 * np.exp(-(STEPS - 900) / 200) * (STEPS > 900)),
        times("train/grad_norm", np.where(STEPS > 900, 60.0, 1.0)),
    )(healthy("sft"))
    ids = [one.id for one in analyse(log).findings]
    assert ids.index("grad_high:rise") < ids.index("loss_jump")


@pytest.mark.parametrize("lead", [0, 120])
def test_a_gradient_that_rises_before_the_loss_is_its_cause(lead):
    after = STEPS >= 1200
    log = both(
        times("train/loss", np.where(after, 1.6, 1.0)),
        times("train/grad_norm", np.where(1200 - lead <= STEPS, 60.0, 1.0)),
    )(healthy("sft"))
    first = analyse(log).top[0]
    assert first.id == ("grad_high:rise" if lead else "loss_diverging")
    assert first.level == "fail"


def test_a_validation_loss_that_is_not_a_number_is_told():
    log = sft(validated(np.where(np.arange(20) < 12, 1.2, np.nan)))
    found = serious(analyse(log))["loss_nonfinite"]
    assert found.level == "fail" and found.metric == "val/loss"


def test_steps_that_stay_slow_are_told_before_single_slow_stretches():
    slower = times("train/time(s)", np.where(STEPS >= 1700, 2.4, 1.0))
    assert analyse(sft(slower)).top[0].id == "time_growth:slowdown"


def test_a_loss_that_jumps_after_a_resume_and_comes_back_is_told():
    back = 1 + 0.2 * np.exp(-(STEPS - 900) / 200) * (STEPS > 900)
    first = analyse(sft(times("train/loss", back))).top[0]
    assert first.id == "loss_jump" and first.steps is not None and abs(first.steps[0] - 900) <= 10


def test_a_spike_of_some_points_is_no_wrong_resume():
    spike = np.where((STEPS > 900) & (STEPS <= 905), 2.5, 1.0)
    found = serious(analyse(sft(times("train/loss", spike))))
    assert "loss_spike" in found and "loss_jump" not in found


def test_the_steps_of_a_loss_spike_contain_the_step_that_its_title_names():
    """The gradient leaves its usual range one step after the loss is highest."""
    rise = np.where(STEPS == 1000, 1.4, 1.0)
    burst = put("train/grad_norm", slice(1000, 1002), 30.0)
    found = told(analyse(sft(both(times("train/loss", rise), burst))))
    assert "at step 1000;" in found["loss_spike"].title
    assert found["loss_spike"].steps == (1000, 1002)


@pytest.mark.parametrize("at", [800, 1450])
def test_a_rate_that_warms_up_again_is_told(at):
    cosine = (1 + np.cos(np.pi * STEPS / 2000)) / 2
    again = np.where(at < STEPS, np.minimum(1, (STEPS - at) / 100) * cosine, cosine)
    found = serious(analyse(rates(1e-5 * again)))["lr_schedule:restarted"]
    assert found.steps is not None and found.steps[0] == at


def test_small_spikes_belong_to_a_fault_only_beside_a_large_one():
    small = put("train/loss", slice(600, 601), 2.5)
    assert "loss_spike" not in told(analyse(sft(small)))
    found = serious(analyse(sft(both(small, put("train/loss", slice(1000, 1001), 8.0)))))
    assert found["loss_spike"].steps == (601, 1001)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(np.where(STEPS > 1000, 0.1, 1.0), id="a step"),
        pytest.param(np.where((STEPS > 500) & (STEPS < 600), 0.1, 1.0), id="a dip"),
        pytest.param(np.round(np.minimum(1, STEPS / 1000), 2), id="a warm-up in two digits"),
    ],
)
def test_rates_that_fall_or_rise_as_planned_are_not_told(values):
    found = serious(analyse(rates(1e-5 * values)))
    assert not {"lr_schedule:raised", "lr_schedule:restarted"} & found.keys()


@pytest.mark.parametrize("num_steps", [300, 2000])
def test_a_rate_that_jumps_late_is_told(num_steps):
    linear = 1 - np.arange(num_steps) / num_steps
    late = np.where(np.arange(num_steps) > 0.95 * num_steps, 1.8 * linear, linear)
    steps = np.arange(1, num_steps + 1)
    assert [one.steps[0] for one in raised_rates(Series(steps, late))] == [0.95 * num_steps + 2]


def test_a_loss_that_stays_at_the_level_of_guessing_is_told():
    guesses = put("train/loss", slice(None), 11.0 - 0.2 * STEPS / 2000 + normal(0.02, 2000))
    log = replace(sft(guesses), config={})
    assert "loss_not_falling" in serious(analyse(log))


@pytest.mark.parametrize("seed", range(5))
def test_a_flat_loss_is_not_told_in_the_rest_of_a_run_or_in_noise(seed):
    def is_judged(noise: float, num_points: int, first_step: int = 1) -> bool:
        steps = np.arange(first_step, first_step + num_points)
        level = 1.2 - 0.012 * np.arange(num_points) / num_points
        losses = Series(steps, level + normal(noise, num_points, seed))
        report = analyse(replace(healthy("sft"), series={"train/loss": losses}))
        assert next(line for line in report.checklist if line.id == "loss_falls").status != "pass"
        return "loss_not_falling" in serious(report)

    assert is_judged(0.05, 100)
    assert is_judged(0.05, 2000), "it drifts by 1 %"
    assert not is_judged(0.05, 2000, first_step=5000)
    assert not is_judged(0.3, 100)


def test_the_loss_of_a_policy_may_rise_with_its_kl():
    log = grpo_run(0)
    rising = {"train/loss": np.linspace(0.001, 0.05, log.num_rows)}
    assert "loss_diverging" not in told(analyse(changed(log, **rising)))


def test_a_loss_of_zero_beside_a_gradient_that_is_not_a_number_hides_a_nan():
    """transformers replaces a NaN loss."""
    hidden = both(put("train/loss", slice(900, 920), 0.0), put("train/grad_norm", 900, np.nan))
    assert analyse(sft(hidden)).top[0].id == "loss_nonfinite"


def test_a_flat_loss_beside_a_validation_loss_that_falls_is_not_told():
    noisy = put("train/loss", slice(None), 1.2 + normal(0.4, 2000))
    falls = np.linspace(1.6, 1.2, 20)
    assert "loss_not_falling" not in told(analyse(sft(both(noisy, validated(falls)))))
    assert "loss_not_falling" in told(analyse(sft(both(noisy, validated(falls[::-1])))))


def test_a_loss_that_fell_early_and_rises_a_little_with_its_data_falls():
    losses = 1.25 + 0.8 * np.exp(-STEPS / 100) + 0.05 * (STEPS > 700) + normal(0.01, 2000)
    assert "loss_not_falling" not in told(analyse(sft(put("train/loss", slice(None), losses))))


@pytest.mark.parametrize(("num_points", "is_told"), [(10, True), (1000, False)])
def test_a_small_kl_that_jumps_is_told_before_it_is_large(num_points, is_told):
    """One that rises slowly to the same level is healthy."""
    rise = ((np.arange(grpo_run(0).num_rows) - 100) / num_points).clip(0, 1)
    log = grpo(put("kl", slice(None), 0.03 + 4 * rise))
    assert ("kl" in serious(analyse(log))) == is_told


def test_a_save_that_failed_on_the_network_is_no_failed_rank():
    failed = LogEvent(700, "checkpoint_failed", "saving failed: NCCL timeout", "error")
    assert "oom_nccl" not in told(analyse(replace(healthy("sft"), events=(failed,))))
