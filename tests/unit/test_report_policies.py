"""Tests of logs of ROLL, verl and MLLM-JAX about a policy: lengths at their limit, rewards in
phase, time and memory.
"""

import math

import numpy as np
import pytest
from log_formats import write_roll
from report_curves import swift_run
from report_faults import told

from trainer.tools.report.analyse import analyse
from trainer.tools.report.readers import read_run
from trainer.tools.report.run_log import Series

STEPS = np.arange(1, 401)


@pytest.mark.covers("S2.16 S2.17")
def test_lengths_at_their_limit_and_a_shortest_answer_that_is_long_are_told():
    run = told(analyse(swift_run(2)))
    hits = run["clipped_ratio:cap"]
    assert hits.level == "note" and hits.steps == (2555, 3995), hits
    shortest = run["length_shift:shortest"]
    assert shortest.level == "note" and shortest.steps == (2825, 2825), shortest
    assert (
        not {"clipped_ratio:cap", "length_shift:shortest"}
        & told(analyse(swift_run(2, has_bursts=False))).keys()
    )


def roll(directory, **columns):
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


@pytest.mark.covers("S4.26 S4.35")
def test_rolls_phases_and_memory_are_judged(tmp_path):
    calm = roll(tmp_path)
    assert calm.verdict == "OK", calm.findings
    assert max(calm.throughput.shares, key=lambda phase: calm.throughput.shares[phase]) == "rollout"
    assert math.isclose(sum(calm.throughput.shares.values()), 1) and calm.throughput.step_s > 29
    assert "generation is the bottleneck" in calm.throughput.bottleneck
    full = roll(
        tmp_path,
        memory__actor_train__train_step__end__onload__max_reserved_frac__3=np.full(400, 0.97),
    )
    assert told(full)["memory:headroom"].value == 0.97 and full.verdict == "ATTENTION"
