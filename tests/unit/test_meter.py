"""Rows of metrics: phases that add up, totals that survive restarts, and statistics of the global
batch.
"""

import math
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toy import OneSource, guard_config

from trainer.data.batch_plan import Limits, RankPlan, deal_facts, length_facts
from trainer.data.loader import build_step
from trainer.model.flops import StepFlops
from trainer.runtime.distributed import World
from trainer.tracking import metrics
from trainer.tracking.metrics import METRICS, is_signal
from trainer.tracking.metrics.table import PHASES
from trainer.train import memory
from trainer.train import meter as meter_module
from trainer.train.guard import Guard
from trainer.train.meter import Meter
from trainer.train.packet import Totals
from trainer.train.parts import StepResult

CPU = torch.device("cpu")


class Samples(OneSource):
    lengths = np.array([10, 20, 30, 40, 5, 7])
    num_loss_tokens = np.array([4, 10, 10, 39, 1, 3])

    def sample(self, index):
        length = self.lengths[index]
        mask = np.arange(length) >= length - self.num_loss_tokens[index]
        return np.arange(length, dtype=np.int32), mask


def new_meter(*, cost=None, **settings):
    world = World(CPU, mesh=None, rank=0, size=2, num_shards=2)
    return Meter(world, cost=cost, **({"total_steps": 100} | settings))


@pytest.fixture(autouse=True)
def nothing_left():
    metrics.take_travelling()
    metrics.take_for_row()


def result(step=1, by_rank=None, **sums):
    """A step on two ranks, with `by_rank` and `sums` in place of the usual ones."""
    slots = [metric.source for metric in metrics.combined_metrics()]
    usual = dict.fromkeys(slots, (metrics.ABSENT, metrics.ABSENT))
    usual |= {"train/nonfinite": (0.0, 0.0), "train/loss_max_rank": (1.0, 2.0)}
    usual |= {"memory/cpu/rss_gib": (1.0, 2.0)} | (by_rank or {})
    sums = {"loss_sum": 110.0, "num_hits": 5.0, "grad_norm": 4.0, "is_skipped": 0.0} | sums
    plan = RankPlan(0, 2, Limits(64, None), 0.0)
    batch = build_step(Samples(), np.arange(6), plan, step=step, epoch=0)
    return StepResult(batch, Totals(sums, usual, {}), lr=2e-3)


def row_of(meter, **changes):
    for phase in ("data", "shard", "forward", "backward", "optimizer"):
        meter.clock.mark(phase)
    step = result(**changes)
    step.signals |= meter.signals(step)
    meter.after_step(step)
    return step.row


@pytest.mark.covers("S0.3 S0.4 S0.7 S0.17 S0.19 S0.20 S0.27 S0.34 S3.6")
def test_a_row_describes_the_global_batch_in_metrics_of_the_table(monkeypatch):
    monkeypatch.setattr(meter_module, "peak_tflops", lambda device: 0.5)
    meter = new_meter(cost=StepFlops(0.0, 1e12, 0.0), data_facts={"data/truncated": 3})
    row = row_of(meter, objective_sum=201.0, **{"moe/router_loss": 1.5})
    step_s = row["train/time(s)"]
    expected = {
        "train/loss": 110 / 67,
        "train/loss_max_rank": 2.0,
        "train/objective": 3.0,
        "moe/router_loss": 1.5,
        "train/token_accuracy": 5 / 67,
        "train/lr(1e-3)": 2.0,
        "train/seq_total_len_mean": 112 / 6,
        "train/seq_total_len_max": 40,
        "train/seq_prompt_len_max": 20,
        "train/total_valid_token_count": 67,
        "train/total_token_count": 112,
        "data/valid_token_frac": 67 / 112,
        "data/packing_efficiency": 112 / (2 * 64),
        "data/truncated": 3,
        "memory/cpu/rss_gib": 2.0,
        "throughput/train/valid_tokens_per_s": 67 / step_s,
        "throughput/train/valid_tokens_per_s_update": 67 / row["time/train/update_s"],
        "throughput/train/tokens_per_s_per_gpu": 112 / step_s / 2,
        "throughput/train/tflops_per_gpu": 67 / step_s / 2,
        "throughput/train/mfu": 67 / step_s / 2 / 0.5,
    }
    assert {key: row[key] for key in expected} == pytest.approx(expected)
    assert [key for key in row if metrics.find(key) is None] == []


@pytest.mark.covers("S0.6 S0.23 S0.24 S0.29 S3.49")
def test_phases_of_all_ranks_are_in_the_row_of_the_step_after():
    """The times of a step arrive with the next packet. Before the first packet, a row shows this
    rank's own times.
    """
    meter = new_meter()
    first = row_of(meter)
    phases = [f"time/train/{phase}_s" for phase in PHASES]
    step_s = first["time/train/step_s"]
    assert sum(first[phase] for phase in phases) == pytest.approx(step_s, rel=1e-9)
    assert step_s == first["train/time(s)"] and "time/train/slowest_rank" not in first
    sent = meter.by_rank()
    assert {key: sent[key] for key in phases} == {key: first[key] for key in phases}
    by_rank = {
        "time/train/data_s": (0.1, 0.4),
        "time/train/step_s": (2.0, 2.2),
        "time/train/slowest_rank": (0.3, 0.5),
        "system/gpu_util": (metrics.ABSENT, 60.0),
        "train/loss_max_rank": (math.nan, 1.0),
    }
    row = row_of(meter, step=50, by_rank=by_rank)
    expected = {
        "time/train/data_s": 0.25,
        "time/train/data_s_max": 0.4,
        "time/train/step_s": 2.1,
        "time/train/slowest_rank": 1,
        "system/gpu_util": 60.0,
    }
    assert {key: row[key] for key in expected} == pytest.approx(expected)
    assert math.isnan(row["train/loss_max_rank"]) and "system/gpu_temp_c" not in row


def test_the_guard_may_see_exactly_what_ranks_agree_on():
    slots = [metric.source for metric in metrics.combined_metrics()]
    times = dict.fromkeys((slot for slot in slots if slot.startswith("time/")), (1.0, 2.0))
    routers = dict.fromkeys((key for key in METRICS if key.startswith("moe/")), 1.0)
    signals = new_meter().signals(result(by_rank=times, objective_sum=7.0, **routers))
    seen = {key for key in METRICS if is_signal(key) and "<" not in key}
    on_cuda = {key for key in seen if key.startswith("memory/") and key != "memory/cpu/rss_gib"}
    assert {key for key in signals if METRICS[key].every == "step"} == seen - on_cuda


def test_ranks_whose_guards_decided_differently_are_found():
    with pytest.raises(RuntimeError, match="made different numbers of decisions"):
        Guard(guard_config()).after_step(result(by_rank={"decisions": (1.0, 2.0)}))


def test_totals_survive_a_restart_and_a_loss_that_is_not_a_number():
    meter = new_meter()
    for step in range(1, 6):
        loss_sum = math.nan if step == 5 else 110.0
        last = row_of(meter, step=step, grad_norm=100.0, loss_sum=loss_sum)
    assert math.isnan(last["train/loss"]) and math.isnan(last["train/ppl"])
    assert last["train/loss_ema"] == pytest.approx(110 / 67)
    resumed = new_meter(past_s=50.0)
    resumed.load_state_dict(meter.state_dict())
    row = row_of(resumed, step=6, grad_norm=0.0)
    assert row["progress/tokens"] == last["progress/tokens"] + 112 == 6 * 112
    assert row["progress/elapsed_s"] > 50


def test_facts_of_a_batch_count_lengths_padding_imbalance_and_samples_without_labels():
    lengths = np.random.default_rng(7).integers(10, 500, 97)
    facts = length_facts(lengths, lengths // 3)
    assert facts["seq_prompt_len_mean"] == pytest.approx(float(np.mean(lengths - lengths // 3)))
    assert facts["seq_total_len_p95"] == sorted(lengths)[int(0.95 * 97)]
    lengths = np.array([10, 20, 30])
    counts = np.array([5, 0, 10])
    facts = deal_facts(lengths, counts, [[[0, 1], []], [[2], []]], Limits(40, None))
    assert facts["data/pad_frac"] == 2 / 62 and facts["data/token_imbalance"] == 1.0
    assert facts["data/empty_label"] == 1 and facts["data/packing_efficiency"] == 60 / 80


def test_the_drivers_program_is_asked_about_the_rank_s_own_gpu(tmp_path, monkeypatch):
    card = lambda device: SimpleNamespace(uuid=f"of {device}")  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", card)
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/words\necho "97, [N/A], 612.34"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = memory.sample(torch.device("cuda", 3))
    assert found == {"system/gpu_util": 97, "system/gpu_power_w": 612.34}
    assert (tmp_path / "words").read_text().startswith("--id=GPU-of cuda:3 ")
