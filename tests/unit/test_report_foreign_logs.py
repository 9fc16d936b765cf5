"""Faults and healthy runs in logs of other trainers: printed digits, other column names, small
losses, long answers, steps logged in intervals.
"""

import time
from dataclasses import replace

import numpy as np
import pytest
from report_curves import changed, checkpoints, controller_run, grpo_run, sft_run, swift_run
from report_faults import (
    both,
    but,
    fill,
    healthy,
    judged,
    line,
    put,
    serious,
    sft,
    times,
    told,
    validated,
)
from small_files import write_lines

from trainer.tools.report.analyse import analyse
from trainer.tools.report.readers import read_run
from trainer.tools.report.readers.parsing import guessed
from trainer.tools.report.run_log import LogEvent, Series

STEPS = np.arange(1, 2001)
ROWS = np.arange(grpo_run(0).num_rows)
GRPO_STEPS = grpo_run(0).series["reward"].steps
LATE = np.where(ROWS < 700, 1.0, 0.4)
GROWTH = np.linspace(1, 1.8, len(ROWS))


def normal(sigma, num_points, seed=3):
    """Noise with standard deviation sigma, equal in each call regardless of earlier tests."""
    return np.random.default_rng(seed).normal(0, sigma, num_points)


def grpo(change):
    return change(healthy("grpo"))


def rates(values):
    return changed(sft_run(0), **{"train/lr": values})


def with_metric(key, values):
    return changed(grpo_run(0), **{key: values})


def without(log, words):
    return replace(log, series={k: one for k, one in log.series.items() if words not in k})


def first_points(log, num_points):
    series = {key: one[:num_points] for key, one in log.series.items()}
    return replace(log, series=series, total_steps=num_points, checkpoints=())


def slow_stretch():
    """With one row per 10 steps, a slow stretch has one slow point per 10 steps."""
    log = without(sft_run(0), "val/")
    every_tenth = log.series["train/time(s)"][9::10]
    factors = np.where((np.arange(200) >= 80) & (np.arange(200) < 110), 4, 1)
    slow = Series(every_tenth.steps, every_tenth.values * factors)
    series = {**log.series, "train/time(s)": slow}
    return replace(log, series=series, checkpoints=(), config={})


def held_out(key):
    """A held-out reward that rises for nine validations and then falls."""
    rows = np.arange(20)
    values = np.where(rows < 9, 0.3 + 0.05 * rows, 0.75 - 0.03 * (rows - 9))
    log = grpo_run(0)
    return replace(log, series={**log.series, key: Series(60 * (rows + 1), values)})


COSINE = (1 + np.cos(np.pi * STEPS / 2000)) / 2
RAMP = ((ROWS - 400) / (len(ROWS) - 500)).clip(0, 1)
LOST = (ROWS >= 500) & (ROWS < 700)
RISING = 0.2 + 0.6 * ROWS / len(ROWS) + normal(0.02, len(ROWS))
JUMP = times("train/loss", 1 + 0.2 * np.exp(-(STEPS - 900) / 200) * (STEPS > 900))
FORMS = 0.3 + 0.6 * (ROWS - 600).clip(0) / 600 + normal(0.03, len(ROWS))
FAR_KL = grpo_run(0).series["kl"].values * np.where(ROWS >= 700, 500, 1)
NEAR = changed(without(grpo_run(0), "kl"), **{"actor/approxkl": 1e-3 + 1e-4 * np.sin(ROWS)})
LEAK = validated(0.7 * sft_run(2).series["val/loss"].values)
ONSETS = {
    "a rate of zero": (rates(np.where(STEPS < 1200, 1e-5, 0.0)), "lr_schedule:zero", 1200, 0),
    "an SFT gradient that stays high": (
        sft(times("train/grad_norm", np.where(STEPS <= 1000, 1.0, 300.0))),
        "grad_high:rise", 1001, 10,
    ),
    "a slow stretch in a log of every tenth step": (slow_stretch(), "time_high:while", 810, 0),
    "answers that get worse while the reward rises": (
        with_metric("rewards/accuracy/mean", np.where(ROWS < 720, 0.5, 0.1) + normal(0.02, 1200)),
        "reward_hacking:part:rewards/accuracy/mean", GRPO_STEPS[720], 10,
    ),
    "a reward that collapsed and came back": (
        grpo(fill("reward", np.where(LOST, 0.05, RISING))), "reward_trend:collapse", GRPO_STEPS[500], 10,
    ),
    **{
        f"a held-out reward {key}": (held_out(key), "val_results:reward", 540, 60)
        for key in ("val/reward", "val/aime24/avg@16", "val/math_pass1")
    },
    "lengths that fall slowly": (
        grpo(fill("completions/mean_length", 400 - 360 * RAMP + normal(8, 1200))),
        "length_shift", GRPO_STEPS[400], 300,
    ),
    "a share of clipped answers that rises slowly": (
        grpo(
            fill("completions/clipped_ratio", 0.03 + 0.7 * RAMP + normal(0.005, 1200).clip(-0.02))
        ),
        "clipped_ratio", GRPO_STEPS[400], 300,
    ),
    "a loss that jumps after a resume": (sft(JUMP), "loss_jump", 900, 10),
    "a low rate that warms up again": (
        rates(1e-5 * np.where(STEPS > 1450, np.minimum(1, (STEPS - 1450) / 100), 1) * COSINE),
        "lr_schedule:restarted", 1450, 0,
    ),
    "a KL to the reference": (
        changed(NEAR, **{"actor/kl_loss": FAR_KL}), "kl", GRPO_STEPS[700], 10,
    ),
    "format hacking": (
        changed(
            grpo(fill("rewards/Format/mean", FORMS)),
            **{"rewards/AnswerMatchCosine/mean": 0.4 + normal(0.05, len(ROWS), 4)},
        ),
        "reward_hacking:rewards/Format/mean", GRPO_STEPS[600], 0.02 * GRPO_STEPS[-1],
    ),
    "a rate that jumps late in a short run": (
        first_points(
            rates(1e-5 * np.where(STEPS > 286, 1.8, 1.0) * (1 - STEPS / 301).clip(1e-3)), 300
        ),
        "lr_schedule:raised", 287, 0,
    ),
}  # fmt: skip
"""Log -> the finding in it, the step at which it begins, and the tolerance."""


@pytest.mark.parametrize("name", ONSETS)
def test_a_fault_is_told_from_its_first_step(name):
    log, id_, step, tolerance = ONSETS[name]
    found = serious(analyse(log))[id_]
    assert abs(found.steps[0] - step) <= tolerance


def controller_loss(num_rising):
    epochs = np.arange(30)
    rise = 0.08 * (epochs - 29 + num_rising).clip(0)
    return changed(controller_run(0), **{"train/loss": 0.1 + rise + 0.01 * np.sin(epochs)})


LOW = times("train/loss", 0.05)
SPIKE = put("train/loss", slice(1000, 1004), 5.0)
FEWER = with_metric("throughput/train/tokens_per_s", 1e4 * LATE)
ADVANTAGES = with_metric("critic/advantages/max", np.where(ROWS < 600, 2.4, 0.0))
GUESSES = fill("train/loss", 11.0 - 0.7 * STEPS / 2000 + normal(0.02, 2000))
NOISY = fill("train/loss", 1.2 + normal(0.4, 2000))
FELL_EARLY = 1.25 + 0.8 * np.exp(-STEPS / 100) + 0.05 * (STEPS > 700) + normal(0.01, 2000)
BRIEF = 0.3 + normal(0.02, len(ROWS)) + np.where(abs(ROWS - 600) < 25, 0.1, 0)
COLLAPSED = np.where(ROWS < 840, np.linspace(0.2, 1.4, len(ROWS)).clip(max=0.8), 0.1)
KL_RISE = 0.03 + 4 * ((ROWS - 100) / np.array([[10], [1000]])).clip(0, 1)
SMALL_SPIKE = put("train/loss", slice(600, 601), 2.5)
DPO = "rewards/chosen"
CALM = swift_run(1, has_bursts=False)
SLOW_START = put("train/time(s)", 0, 40.0)
WARMUPS = {"optim.lr_warmup_steps_ratio": 0.5, "optim.lr_warmup_steps": 200}
HEALTHY_RATES = {
    "a rate with a deep dip": np.where((STEPS > 100) & (STEPS < 200), 0.01, 1.0),
    "cosines that restart lower": np.outer(0.7 ** np.arange(4), COSINE[::4] + 1e-5).ravel(),
    "cycles with a warm-up": np.tile(np.minimum(STEPS[:1000] / 100, 1.1 - STEPS[:1000] / 1000), 2),
    "no schedule": np.random.default_rng(5).random(2000),
}
CASES = {
    "rates printed with three decimals": (rates(np.zeros(2000)), "", "lr_schedule:zero"),
    "rates printed with eight decimals": (
        rates(np.round(1e-6 * COSINE, 8)), "", "lr_schedule:zero",
    ),
    "a rate that falls to 0": (rates(1e-5 * (1 - STEPS / 2000)), "", "lr_schedule:zero"),
    "the first step of a warm-up": (first_points(rates(STEPS - 1.0), 1), "", "lr_schedule:zero"),
    "a warm-up that does not end": (rates(1e-5 * STEPS / 2000), "lr_schedule:rising", ""),
    "a warm-up at the start of a long run": (
        replace(rates(1e-5 * STEPS / 2000), total_steps=20_000), "", "lr_schedule:rising",
    ),
    **{
        name: (rates(1e-5 * values), "", "lr_schedule:raised lr_schedule:restarted")
        for name, values in HEALTHY_RATES.items()
    },
    "a low loss with as low a validation loss": (
        sft(both(LOW, validated(np.linspace(0.08, 0.05, 20)))), "", "loss_final",
    ),
    "a spike": (sft(SPIKE), "loss_spike", "loss_jump"),
    "a spike of a low loss": (
        sft(both(times("train/loss", 0.02), put("train/loss", slice(1000, 1004), 0.1))),
        "loss_spike", "",
    ),
    "a small spike alone": (sft(SMALL_SPIKE), "", "loss_spike"),
    "a high first loss of an unknown model": (
        replace(sft(put("train/loss", slice(0, 10), 9.0)), config={}), "", "loss_start_high",
    ),
    "steps that get slower because answers get longer": (
        times("completions/mean_length", GROWTH)(with_metric("train/time(s)", 40 * GROWTH)),
        "", "time_growth time_growth:slowdown",
    ),
    "fewer tokens per second": (FEWER, "time_growth:slowdown", ""),
    "fewer tokens per second because answers get shorter": (
        times("completions/mean_length", LATE)(FEWER), "", "time_growth:slowdown",
    ),
    "memory that doubles in a short run": (
        first_points(sft(times("memory/cpu/rss_gib", 1 + (STEPS / 220).clip(max=1))), 220),
        "memory:leak", "",
    ),
    "a reward that rose briefly": (grpo(fill("reward", BRIEF)), "reward_trend:flat", ""),
    "a reward that collapsed": (
        grpo(fill("reward", COLLAPSED + normal(0.02, len(ROWS)))),
        "reward_trend:collapse", "reward_trend:flat",
    ),
    "equal rewards in a log of verl": (without(ADVANTAGES, "adv_std"), "adv_shape:std", ""),
    "a share of clipped ratios that rises": (
        with_metric("clip_ratio", np.where(ROWS < 600, 0.01, 0.2)), "clip_ratio", "",
    ),
    "a constant share of clipped ratios": (with_metric("clip_ratio", 0.2), "", "clip_ratio"),
    "answers that get longer": (
        with_metric("rewards/brevity/mean", LATE), "", "reward_hacking:part:rewards/brevity/mean",
    ),
    "a held-out result, which is no part of the reward": (
        with_metric("val/rewards/accuracy/mean", LATE), "",
        "reward_hacking:part:val/rewards/accuracy/mean",
    ),
    "preference training, which lowers both rewards": (
        with_metric(DPO, LATE), "", f"reward_hacking:part:{DPO}",
    ),
    "the entropy of SFT": (
        changed(sft_run(0), **{"train/entropy": 2 * np.exp(-STEPS / 500) + 0.02}),
        "", "entropy_collapse",
    ),
    "a loss that swings while it falls": (
        sft(fill("train/loss", np.exp(2 - STEPS / 700 + normal(1.2, 2000)))), "", "loss_oscillating",
    ),
    "a loss at the level of guessing": (
        replace(sft(GUESSES), config={}), "loss_not_falling", "",
    ),
    "a noisy loss beside a validation loss that falls": (
        sft(both(NOISY, validated(np.linspace(1.6, 1.2, 20)))), "", "loss_not_falling",
    ),
    "a noisy loss beside a validation loss that rises": (
        sft(both(NOISY, validated(np.linspace(1.2, 1.6, 20)))), "loss_not_falling", "",
    ),
    "a loss that fell early and rises a little": (
        sft(fill("train/loss", FELL_EARLY)), "", "loss_not_falling",
    ),
    "the loss of a policy, which rises with its KL": (
        with_metric("train/loss", np.linspace(0.001, 0.05, len(ROWS))), "", "loss_diverging",
    ),
    "a small KL that jumps": (grpo(fill("kl", KL_RISE[0])), "kl", ""),
    "a KL that rises slowly": (grpo(fill("kl", KL_RISE[1])), "", "kl"),
    "a save that failed on the network": (
        sft(but(events=(LogEvent(700, "checkpoint_failed", "NCCL timeout", "error"),))),
        "", "oom_nccl",
    ),
    "the loss of a policy near 0": (
        changed(CALM, **{"train/loss": CALM.series["train/loss"].values - 2e-3}),
        "", "loss_zero loss_start_high loss_not_falling loss_diverging loss_oscillating loss_final",
    ),
    "a gradient norm of 30,000 all along": (CALM, "", "grad_high:explosion grad_range"),
    "a KL to the last policy": (NEAR, "", "kl"),
    "a gradient that explodes late": (
        sft(times("train/grad_norm", np.where(STEPS > 1300, 1000.0, 1.0))),
        "grad_high:sustained", "grad_vanish",
    ),
    "a loss that rises for twelve epochs": (controller_loss(12), "loss_diverging:epochs", ""),
    "a loss that rises for six epochs": (controller_loss(6), "", "loss_diverging:epochs"),
    "a warm-up configured in steps": (
        replace(sft_run(0), config={**sft_run(0).config, **WARMUPS}), "", "lr_schedule:warmup",
    ),
    "a slow first step, where all others save": (
        replace(first_points(sft(SLOW_START), 20), checkpoints=checkpoints(range(2, 21, 2))),
        "", "time_high:stalls",
    ),
    "a slow first step of four": (first_points(sft(SLOW_START), 4), "", "time_high:stalls"),
    "a slow first step after a resume": (
        replace(
            first_points(sft(put("train/time(s)", 30, 40.0)), 60),
            events=(LogEvent(30, "start", "attempt 2"),),
        ),
        "", "time_high:stalls",
    ),
    "a validation loss below the training loss of random weights": (
        replace(sft(LEAK), config={"model.partial_pretrain": "quickstart"}), "", "val_leak",
    ),
}  # fmt: skip
"""Log -> ids of findings that it must have, and of findings that it must not have."""


@pytest.mark.covers("S1.14 S1.15 S1.24 S1.34 S2.9 S2.44 S4.14")
@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_told_and_a_healthy_run_is_not(name):
    log, faults, none = CASES[name]
    found = serious(analyse(log)).keys()
    assert set(faults.split()) <= found and not set(none.split()) & found


def test_two_spikes_are_told_from_the_small_one_beside_a_large_one():
    large = put("train/loss", slice(1000, 1001), 8.0)
    assert serious(analyse(sft(both(SMALL_SPIKE, large))))["loss_spike"].steps == (601, 1001)


@pytest.mark.parametrize("share", [0.01, 0.25])
def test_a_longest_answer_at_the_cap_warns_only_if_many_are_cut_off(share):
    log = grpo(
        both(fill("completions/max_length", 1024.0), fill("completions/clipped_ratio", share))
    )
    assert told(analyse(log))["clipped_ratio:cap"].level == ("warn" if share > 0.1 else "note")


@pytest.mark.covers("S0.5 S4.10 S4.15 S4.23")
def test_names_of_other_trainers_are_known(tmp_path):
    columns = {
        "sft_train/loss@sum": "train/loss",
        "eval_token_acc": "val/token_accuracy",
        "train/completions/mean_length": "completions/mean_length",
        "token/response_length/mean": "tokens/response_length/mean",
        "my_own/metric": "my_own/metric",
        "mfu(%)": "throughput/train/mfu",
        "perf/step_time": "train/time(s)",
        "train/tokens_per_sec": "throughput/train/tokens_per_s",
        "lr-AdamW": "train/lr",
        "grad_2.0_norm_total": "train/grad_norm",
        "memory/max_allocated (GiB)": "memory/max_allocated_gib",
    }
    rows = ({"_step": step, **dict.fromkeys(columns, float(step))} for step in range(1, 9))
    series = read_run(write_lines(tmp_path / "history.jsonl", rows)).series
    assert set(columns.values()) <= series.keys()
    assert series["throughput/train/mfu"].values[0] == 0.01


LINES = {
    "torchtune": "Step {} | loss:1.5 lr:1e-05 grad_norm:0.5",
    "torchtitan": "- root - INFO - \x1b[31mstep: {}  \x1b[32mloss:  1.5  grad_norm:  0.5  lr: 1e-5  memory: 2GiB(2%)",
    "NeMo": "Training epoch 0, iteration {}/900 | lr: 1e-05 | reduced_train_loss: 1.5 | grad_norm: 0.5",
    "Megatron": "iteration {}/ 900 | learning rate: 1.0E-05 | lm loss: 1.5E+00 | grad norm: 0.5 |",
    "transformers": "\r| {0}/900 [00:01<]\r{{'loss': '1.5', 'grad_norm': 0.5, 'learning_rate': 1e-05, 'epoch': 0.1}}\n"
    "| 1/50 [00:01<]\n{{'eval_loss': 1.6, 'epoch': 0.1}}",
    "ROLL": '[INFO]: {{"train/loss": 1.5, "actor/lr": 1e-5, "grad_norm": 0.5}}\n[INFO]: pipeline step {} finished',
    "slime": "(M pid=7) model.py:463 - step {}: {{'train/loss': 1.5, 'train/grad_norm': 0.5, 'train/lr-pg_0': 1e-5}}",
}


@pytest.mark.parametrize("text", LINES.values(), ids=LINES)
def test_the_console_lines_of_other_trainers_are_read(tmp_path, text):
    log = write_lines(tmp_path / "console.log", [text.format(n) for n in range(1, 9)])
    found = {key: series.values[-1] for key, series in read_run(log).series.items()}
    known = {"train/loss": 1.5, "train/lr": 1e-5, "train/grad_norm": 0.5}
    assert found.items() >= known.items()
    assert read_run(log).series["train/loss"].ends == (1, 8)


def test_validations_and_shares_of_memory_are_read_from_the_console(tmp_path):
    log = tmp_path / "console.log"
    log.write_text(
        "Step 1 | val_loss:1.5\nstep: 2  loss: 2.5  memory: 78.00GiB(97.50%)\n"
        "\x1b[33mvalidate step: 2  \x1b[32mloss: 1.5  memory: 9.00GiB(5.00%)"
    )
    series = read_run(log).series
    assert series["train/loss"].by_step() == {2: 2.5}
    assert series["val/loss"].by_step() == {1: 1.5, 2: 1.5}
    assert series["memory/max_reserved_frac"].by_step() == {2: 0.975}


def test_failed_saves_are_read_from_the_console_and_metrics_of_saves_are_none(tmp_path):
    log = tmp_path / "console.log"
    error = "ERROR: save_checkpoint failed: OSError: [Errno 122] Disk quota exceeded"
    lines = [f"step {n} | loss: {2 - n / 300} | lr: 1e-5" for n in range(1, 200)]
    write_lines(log, [*lines[:120], error, *lines[120:]])
    assert serious(judged(log))["saves_failed"].steps == (120, 120)
    lines = [f"step:{n} - critic/error:0.1 - timing_s/save_checkpoint:30.5" for n in range(1, 9)]
    write_lines(log, lines)
    assert "checkpoint/failed_in_a_row" not in read_run(log).series


def test_a_long_line_is_read_in_linear_time(tmp_path):
    log = tmp_path / "console.log"
    log.write_text(("step 1 " + "save checkpoint " * 4000 + "\n") * 20 + "step 1: loss: 1, lr: 2\n")
    started_s = time.process_time()
    assert read_run(log).series and time.process_time() - started_s < 5


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("Loss", "train/loss"),
        ("dev_loss", "val/loss"),
        ("lr-AdamW/pg1", "train/lr"),
        ("seconds_per_step", "train/time(s)"),
        ("system.proc.memory.rssMB", "memory/cpu/rss_gib"),
        ("tokens_per_second_per_gpu", "throughput/train/tokens_per_s_per_gpu"),
        ("rollout/raw_reward", "reward"),
        ("is_truncated/mean", "completions/clipped_ratio"),
        ("metrics/train/LanguageCrossEntropy", "train/loss"),
        ("time_metrics/end_to_end(s)", "train/time(s)"),
        ("learning-rate", "train/lr"),
        ("val/advantages_max", "critic/advantages/max"),
        ("ckpt/failed_saves", "checkpoint/failed_in_a_row"),
        ("val/aime24", "val/accuracy"),
        ("loss_metrics/global_max_loss", None),
        ("time_metrics/data_loading(%)", None),
        ("train/loss_epoch", None),
        ("value_loss", None),
    ],
)
def test_names_that_no_table_holds_are_guessed_from_their_words(name, key):
    assert guessed(name) == key


ODD_NAMES = """
dev_nll val/loss lm_loss_value val/loss learn_rate train/lr wps throughput/train/tokens_per_s
fetch_s time/train/data_s avg_return reward heldout_return val/reward return_stdev reward_std
kl_to_ref kl critic/kl kl pi_entropy train/entropy gen_len tokens/response_length/mean
hit_limit_frac completions/clipped_ratio
"""


def test_names_in_other_words_are_guessed():
    names, keys = ODD_NAMES.split()[::2], ODD_NAMES.split()[1::2]
    assert [*map(guessed, names)] == keys


@pytest.mark.parametrize("name", ["update", "num_updates"])
def test_a_column_of_updates_is_the_step(tmp_path, name):
    log = tmp_path / "history.jsonl"
    log.write_text("".join(f'{{"{name}": {n}, "epoch": 0, "loss": 1.5}}\n' for n in range(1, 9)))
    assert read_run(log).series["train/loss"].ends == (1, 8)


VERL = ["Total training steps: 300", *(f"step:{n} - actor/pg_loss:0.1" for n in range(1, 150))]
LLAMA_FACTORY = [
    {"current_steps": step, "total_steps": 300, "loss": 1.5, "lr": 1e-5} for step in range(1, 150)
]


@pytest.mark.parametrize(
    ("name", "lines"), [("verl.log", VERL), ("trainer_log.jsonl", LLAMA_FACTORY)]
)
def test_the_planned_steps_of_other_trainers_are_known(tmp_path, name, lines):
    run = read_run(write_lines(tmp_path / name, lines))
    assert run.total_steps == 300
    assert told(analyse(run))["run_complete:steps"].steps == (149, 149)


def test_guessed_names_and_steps_of_an_environment_do_not_replace_known_ones(tmp_path):
    log = tmp_path / "log.jsonl"
    row = (
        '{{"step": {0}, "total_steps": {0}000, "loss": 1, "loss_step": 2, '
        '"rollout/rewards": 0.0, "rollout/raw_reward": 0.5}}\n'
    )
    log.write_text("".join(map(row.format, range(1, 9))))
    run = read_run(log)
    first = {key: one.values[0] for key, one in run.series.items()}
    assert (first["train/loss"], first["loss_step"], first["reward"]) == (1, 2, 0.5)
    assert run.total_steps is None, "they count samples"


def test_a_foreign_log_that_ends_before_its_last_planned_step_may_still_train():
    log = replace(sft_run(0), source="transformers", total_steps=2010)
    assert told(analyse(log))["run_complete:steps"].level == "note"
    assert told(analyse(replace(log, source="fsdp-sft")))["run_complete:steps"].level == "warn"


def test_regular_pauses_of_two_kinds_are_no_stalls_and_slow_tokens_are():
    def stalls(steps):
        slow = np.where(np.isin(STEPS, steps), 9.0, 1.0)
        times = replace(sft_run(0), series={"train/time(s)": Series(STEPS, slow)})
        speeds = {"throughput/train/tokens_per_s": Series(STEPS, 5e4 / slow)}
        found = "time_high:stalls" in serious(analyse(times))
        assert ("time_high:stalls" in serious(analyse(replace(times, series=speeds)))) == found
        return found

    assert not stalls([150, 300, 400, 450, 600, 750, 800])
    assert stalls([151, 302, 407, 450, 611])


AFTER = STEPS >= 1200
GRAD_RISES = times("train/grad_norm", np.where(AFTER, 60.0, 1.0))
ORDERS = {
    "a gradient that rises with a jump of the loss": (
        both(JUMP, times("train/grad_norm", np.where(STEPS > 900, 60.0, 1.0))),
        "grad_high:rise", "warn",
    ),
    "a gradient that rises with the loss": (
        both(times("train/loss", np.where(AFTER, 1.6, 1.0)), GRAD_RISES),
        "loss_diverging", "fail",
    ),
    "a gradient that rises before the loss": (
        both(times("train/loss", np.where(STEPS >= 1320, 1.6, 1.0)), GRAD_RISES),
        "grad_high:rise", "fail",
    ),
    "steps that stay slow, with slow stretches": (
        times("train/time(s)", np.where(STEPS >= 1700, 2.4, 1.0)), "time_growth:slowdown", "warn",
    ),
    "a raised rate, after which the loss rises": (
        both(
            times("train/lr", np.where(STEPS > 1000, 8.0, 1.0)),
            times("train/loss", np.where(STEPS > 1200, 3.0, 1.0)),
        ),
        "lr_schedule:raised", "fail",
    ),
    "a wrong resume": (JUMP, "loss_jump", "warn"),
    "a loss of 0 by which transformers hides a NaN": (
        both(put("train/loss", slice(900, 920), 0.0), put("train/grad_norm", 900, np.nan)),
        "loss_nonfinite", "fail",
    ),
    "a validation loss that is not a number": (
        validated(np.where(np.arange(20) < 12, 1.2, np.nan)), "loss_nonfinite", "fail",
    ),
}  # fmt: skip
"""Change -> the finding that comes first, and its level."""


@pytest.mark.parametrize("name", ORDERS)
def test_the_cause_comes_first_and_is_as_bad_as_its_effect(name):
    change, id_, level = ORDERS[name]
    first = analyse(sft(change)).top[0]
    assert (first.id, first.level) == (id_, level)


def test_answers_that_miss_the_budget_are_the_cause_of_a_reward_that_falls():
    late = np.arange(30) > 20
    change = {"reward_mean": 0.02 * np.arange(30) * ~late, "budget_violation_rate": 0.6 * late}
    assert analyse(changed(controller_run(0), **change)).top[0].id == "budget:rising"


def test_the_steps_of_a_loss_spike_contain_the_step_that_its_title_names():
    """The gradient leaves its usual range one step after the loss peaks."""
    rise = np.where(STEPS == 1000, 1.4, 1.0)
    burst = put("train/grad_norm", slice(1000, 1002), 30.0)
    found = told(analyse(sft(both(times("train/loss", rise), burst))))
    assert "at step 1000;" in found["loss_spike"].title
    assert found["loss_spike"].steps == (1000, 1002)


@pytest.mark.parametrize("seed", range(5))
def test_a_flat_loss_is_not_told_in_the_rest_of_a_run_or_in_noise(seed):
    def is_judged(noise, num_points, first_step=1):
        steps = np.arange(first_step, first_step + num_points)
        level = 1.2 - 0.012 * np.arange(num_points) / num_points
        losses = Series(steps, level + normal(noise, num_points, seed))
        report = analyse(replace(healthy("sft"), series={"train/loss": losses}))
        assert line(report, "loss_falls").status != "pass"
        return "loss_not_falling" in serious(report)

    assert is_judged(0.05, 100)
    assert is_judged(0.05, 2000), "it drifts by 1 %"
    assert not is_judged(0.05, 2000, first_step=5000)
    assert not is_judged(0.3, 100)
