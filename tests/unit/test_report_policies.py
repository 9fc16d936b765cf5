"""What logs of ROLL, verl and MLLM-JAX say of a policy: lengths at their limit, rewards in
phase, time and memory.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from log_formats import write_roll
from report_curves import changed, grpo_run, sft_run, swift_run
from report_faults import told

from trainer.tools.report.analyse import analyse
from trainer.tools.report.readers import read_run
from trainer.tools.report.result import Report
from trainer.tools.report.run_log import Series

STEPS = np.arange(1, 401)


@pytest.mark.covers("S2.16", "S2.17")
def test_lengths_at_their_limit_and_a_shortest_answer_that_is_long_are_told():
    run = told(analyse(swift_run(2)))
    hits = run["clipped_ratio:cap"]
    assert (
        hits.level == "note" and "limit of 512 tokens" in hits.title and "2555" in hits.evidence[0]
    ), hits
    shortest = run["length_shift:shortest"]
    assert shortest.level == "note" and shortest.steps == (2825, 2825), shortest
    assert (
        not {"clipped_ratio:cap", "length_shift:shortest"}
        & told(analyse(swift_run(2, has_bursts=False))).keys()
    )


def test_a_limit_that_nobody_told_is_the_length_met_again_and_again():
    log = grpo_run(0)
    lengths = log.series["completions/max_length"].values.copy()
    lengths[600::2] = 500.0
    log = replace(changed(log, **{"completions/max_length": lengths}), config={})
    assert told(analyse(log))["clipped_ratio:cap"].level == "warn"


def test_samples_at_the_length_limit_are_no_answers_that_do_not_stop():
    log = changed(sft_run(0), **{"train/seq_completion_len_max": np.minimum(np.arange(2000), 1024)})
    assert analyse(log).verdict == "OK"


def test_rewards_in_phase_need_not_stand_out_by_themselves():
    """A burst of KL with a reward 5 spreads below its level: too little for an anomaly of its
    own.
    """
    log = grpo_run(1)
    kl, rewards = (log.series[key].values.copy() for key in ("kl", "reward"))
    kl[700:703] = 9.0
    rewards[700:703] -= 5.3 * 0.18
    (anomaly,) = analyse(changed(log, kl=kl, reward=rewards)).anomalies
    assert {"kl", "reward"} <= {mover.metric for mover in anomaly.movers}


def test_a_constant_rate_alone_asks_for_no_attention():
    log = sft_run(0)
    rates = 1e-5 * np.minimum(np.arange(1, 2001) / 200, 1)
    report = analyse(changed(log, **{"train/lr": rates}))
    assert report.verdict == "OK" and told(report)["lr_schedule:decay"].level == "note"


def roll(directory: Path, **columns: Any) -> Report:
    rng = np.random.default_rng(0)
    curves = {
        "train/loss": rng.normal(0, 0.01, 400),
        "critic/score/mean": np.linspace(0.2, 0.7, 400) + rng.normal(0, 0.03, 400),
        "time/rollout": rng.normal(30, 1, 400),
        "time/adv": rng.normal(0.2, 0.01, 400),
        "memory/actor_train/train_step/end/onload/max_reserved_frac/0": np.full(400, 0.7),
        **{key.replace("__", "/"): values for key, values in columns.items()},
    }
    return analyse(
        read_run(
            write_roll(directory, {key: Series(STEPS, values) for key, values in curves.items()})
        )
    )


@pytest.mark.covers("S4.26", "S4.35")
def test_rolls_phases_and_memory_are_judged(tmp_path):
    calm = roll(tmp_path)
    assert calm.verdict == "OK" and calm.throughput is not None, calm.findings
    assert max(calm.throughput.shares, key=lambda phase: calm.throughput.shares[phase]) == "rollout"
    assert math.isclose(sum(calm.throughput.shares.values()), 1) and calm.throughput.step_s > 29
    assert "generation is the bottleneck" in calm.throughput.bottleneck
    full = roll(
        tmp_path,
        memory__actor_train__train_step__end__onload__max_reserved_frac__3=np.full(400, 0.97),
    )
    assert told(full)["memory:headroom"].value == 0.97 and full.verdict == "ATTENTION"
