"""Rows of metrics: phases that close, totals that survive, statistics that are those of the
global batch.
"""

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from toy import OneSource

from trainer import metrics
from trainer.batch import StepBatch
from trainer.data.batch_plan import Limits, deal_facts, length_facts
from trainer.data.loader import RankPlan, build_step
from trainer.metrics import METRICS, is_signal
from trainer.metrics import find as lookup
from trainer.metrics.table import PHASES
from trainer.monitor import memory
from trainer.monitor.memory import GpuSampler, Memory
from trainer.monitor.meter import Meter, Plan
from trainer.monitor.packet import Totals
from trainer.runtime.distributed import World

CPU = torch.device("cpu")


class Samples(OneSource):
    lengths = np.array([10, 20, 30, 40, 5, 7])
    num_loss_tokens = np.array([4, 10, 10, 39, 1, 3])

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        length = self.lengths[index]
        mask = np.arange(length) >= length - self.num_loss_tokens[index]
        return np.arange(length, dtype=np.int32), mask


def new_meter(*, world_size: int = 2, **plan: Any) -> Meter:
    world = World(CPU, mesh=None, rank=0, size=world_size, num_shards=world_size)  # type: ignore[arg-type]
    settings = {"total_steps": 100, "save_freq": 20, "test_freq": 10, "max_norm": 1.0}
    return Meter(world, plan=Plan(**(settings | plan)), cost=None, memory=Memory(CPU), observe=None)


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    metrics.take()


def totals(by_rank: dict[str, tuple[float, ...]] | None = None, **sums: float) -> Totals:
    """Of a step on two ranks; `by_rank` and `sums` besides or in place of the usual ones."""
    usual = dict.fromkeys(metrics.travelling(), (metrics.ABSENT, metrics.ABSENT)) | {
        "decisions": (0.0, 0.0)
    }
    usual |= {
        "train/loss_max_rank": (1.0, 2.0),
        "train/nonfinite": (0.0, 0.0),
        "memory/cpu/rss_gib": (1.0, 2.0),
    }
    return Totals(
        {"loss_sum": 110.0, "num_hits": 5.0, "grad_norm": 4.0} | sums, usual | (by_rank or {})
    )


def batch(step: int = 1) -> StepBatch:
    plan = RankPlan(0, 2, Limits(64, None), 0.0)
    return build_step(Samples(), np.arange(6), plan, step=step, epoch=0)


def row_of(meter: Meter, *, step: int = 1, **changes: Any) -> dict[str, float]:
    for phase in ("data", "shard", "forward", "backward", "optimizer"):
        meter.clock.mark(phase)
    found, one = totals(**changes), batch(step)
    return meter.row(one, meter.signals(one, found, lr=2e-3), found)


# rows ---------------------------------------------------------------------------------------------
# --------------------


@pytest.mark.covers("S0.4", "S0.7", "S0.17", "S0.19", "S0.20", "S0.27", "S3.6", "S3.7")
def test_a_row_describes_the_global_batch() -> None:
    row = row_of(new_meter())
    assert row["train/loss"] == 110 / 67 and row["train/loss_max_rank"] == 2.0
    assert row["train/token_accuracy"] == 5 / 67
    assert row["train/lr(1e-3)"] == 2.0 and row["optim/clip_coef"] == 0.25
    assert row["train/seq_total_len_mean"] == 112 / 6 and row["train/seq_total_len_max"] == 40
    assert row["train/seq_prompt_len_max"] == 20 and row["train/seq_completion_len_max"] == 39
    assert row["train/total_valid_token_count"] == 67 and row["train/total_token_count"] == 112
    assert row["data/valid_token_frac"] == 67 / 112 and row["data/packing_efficiency"] == 112 / (
        2 * 64
    )
    assert row["throughput/train/valid_tokens_per_s"] == 67 / row["train/time(s)"]
    assert row["throughput/train/valid_tokens_per_s_update"] == 67 / row["time/train/update_s"]
    assert row["throughput/train/tokens_per_s_per_gpu"] == row["throughput/train/tokens_per_s"] / 2
    assert row["progress/samples"] == 6 and row["memory/cpu/rss_gib"] == 2.0


@pytest.mark.covers("S0.3", "S0.34", "S4.40")
def test_every_key_of_a_row_stands_in_the_table() -> None:
    meter = new_meter()
    row = row_of(meter, param_square_sum=9.0)
    assert [key for key in row if lookup(key) is None] == []
    assert all(type(value) in (int, float) for value in row.values())


@pytest.mark.covers("S0.6", "S0.23", "S0.24", "S0.29")
def test_phases_of_all_ranks_are_in_the_row_of_the_step_after() -> None:
    """Those of a step travel with the next packet; the row before any has come shows this
    rank's own.
    """
    meter = new_meter()
    first = row_of(meter)
    phases = [f"time/train/{phase}_s" for phase in PHASES]
    assert sum(first[phase] for phase in phases) == pytest.approx(
        first["time/train/step_s"], rel=1e-9
    )
    assert (
        first["time/train/step_s"] == first["train/time(s)"]
        and "time/train/slowest_rank" not in first
    )
    sent = meter.measured()
    assert {key: sent[key] for key in phases} == {key: first[key] for key in phases}
    assert sent["time/train/step_s"] == first["train/time(s)"]
    assert sent["system/gpu_util"] == metrics.ABSENT, "not measured here"
    by_rank = {
        "time/train/data_s": (0.1, 0.4),
        "time/train/step_s": (2.0, 2.2),
        "time/train/slowest_rank": (0.3, 0.5),
    }
    row = row_of(meter, step=2, by_rank=by_rank)
    assert (row["time/train/data_s"], row["time/train/data_s_max"], row["time/train/step_s"]) == (
        0.25,
        0.4,
        2.1,
    )
    assert row["time/train/slowest_rank"] == 1 and row["time/train/rank_skew"] == pytest.approx(
        0.5 / 0.4
    )
    assert row["train/time(s)"] < 1.0, "this step's own"


def test_a_rank_that_did_not_measure_is_left_out_and_a_nan_is_shown() -> None:
    by_rank = {"system/gpu_util": (metrics.ABSENT, 60.0), "train/loss_max_rank": (math.nan, 1.0)}
    row = row_of(new_meter(), by_rank=by_rank)
    assert row["system/gpu_util"] == row["system/gpu_util_min"] == 60.0 and math.isnan(
        row["train/loss_max_rank"]
    )
    assert "system/gpu_temp_c" not in row
    later = new_meter()
    row_of(later)
    assert "system/gpu_util" not in row_of(later, step=2, by_rank=by_rank), "logged now and then"


def test_the_guard_may_see_exactly_what_ranks_agree_on() -> None:
    times = dict.fromkeys(
        (slot for slot in metrics.travelling() if slot.startswith("time/")), (1.0, 2.0)
    )
    routers = dict.fromkeys((key for key in METRICS if key.startswith("moe/")), 1.0)
    signals = new_meter().signals(batch(), totals(times, objective_sum=7.0, **routers), lr=1.0)
    seen = {key for key in METRICS if is_signal(key) and "<" not in key}
    on_cuda = {key for key in seen if key.startswith("memory/") and key != "memory/cpu/rss_gib"}
    assert {key for key in signals if METRICS[key].every == "step"} == seen - on_cuda
    assert [key for key in signals if METRICS[key].over_ranks == "main"] == []


def test_ranks_whose_guards_decided_differently_are_found() -> None:
    by_rank = {"decisions": (1.0, 2.0)}
    with pytest.raises(RuntimeError, match="disagree"):
        new_meter().signals(batch(), totals(by_rank=by_rank), lr=1.0)


def test_the_parameter_norm_is_reported_in_rare_rows() -> None:
    meter = new_meter()
    row_of(meter)
    assert "optim/param_norm" not in row_of(meter, step=2)
    row = row_of(meter, step=50, param_square_sum=16.0)
    assert row["optim/param_norm"] == 4.0


def test_a_loss_that_is_not_a_number_is_shown_and_leaves_the_average_alone() -> None:
    meter = new_meter()
    first = row_of(meter)
    row = row_of(meter, step=2, loss_sum=math.nan, grad_norm=math.nan)
    assert math.isnan(row["train/loss"]) and math.isnan(row["train/ppl"])
    assert row["train/loss_ema"] == pytest.approx(first["train/loss"])


def test_totals_survive_a_restart_and_count_what_earlier_attempts_took() -> None:
    meter = new_meter()
    for step in range(1, 6):
        last = row_of(meter, step=step, grad_norm=100.0)
    resumed = new_meter(attempt=2, past_s=50.0, num_lost_steps=3)
    resumed.load_state_dict(meter.state_dict())
    row = row_of(resumed, step=6, grad_norm=0.0)
    assert row["optim/clipped_frac"] == pytest.approx(5 / 6), "of all steps, also those before"
    assert row["progress/tokens"] == last["progress/tokens"] + 112 == 6 * 112
    assert (
        row["progress/attempt"] == 2
        and row["progress/lost_steps"] == 3
        and row["progress/elapsed_s"] > 50
    )
    assert row["progress/goodput"] < 0.1, "almost nothing of fifty seconds was training"


def test_time_left_counts_steps_validations_and_saves() -> None:
    meter = new_meter()
    meter.note_duration("eval", 100.0)
    meter.note_duration("save", 1000.0)
    row = row_of(meter, step=60)
    assert row["progress/eta_s"] == pytest.approx(5 * 100.0 + 3 * 1000.0, abs=1.0)
    assert (
        row_of(meter, step=100)["progress/eta_s"] == 0.0
        and row_of(meter, step=100)["progress/pct"] == 100.0
    )


# parts --------------------------------------------------------------------------------------------
# --------------------


def test_length_facts_equal_those_of_numpy() -> None:
    rng = np.random.default_rng(7)
    lengths = rng.integers(10, 500, 97)
    counts = (lengths * rng.random(97)).astype(int)
    facts = length_facts(lengths, counts)
    assert facts["seq_prompt_len_mean"] == pytest.approx(float(np.mean(lengths - counts)))
    assert (facts["seq_total_len_min"], facts["seq_completion_len_min"]) == (
        min(lengths),
        min(counts),
    )
    assert facts["seq_total_len_p95"] == sorted(lengths)[int(0.95 * 97)]
    assert length_facts(lengths[:1], counts[:1])["seq_total_len_p95"] == lengths[0]


def test_deal_facts_count_padding_imbalance_and_samples_without_labels() -> None:
    lengths, counts = np.array([10, 20, 30]), np.array([5, 0, 10])
    facts = deal_facts(lengths, counts, [[[0, 1], []], [[2], []]], Limits(40, None))
    assert facts["data/pad_frac"] == 2 / 62 and facts["data/token_imbalance"] == 1.0
    assert facts["data/empty_label"] == 1 and facts["data/packing_efficiency"] == 60 / 80
    assert (
        deal_facts(lengths, counts, [[[0]], [[1, 2]]], Limits(None, None))["data/token_imbalance"]
        == 50 * 2 / 60
    )


class FakeCuda:
    """The allocator's statistics; peaks are reset as torch resets them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.peak = 1, 1
        monkeypatch.setattr(torch.cuda, "memory_stats", self.stats)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device: type("P", (), {"total_memory": 80 * 2**30}),
        )

    def use(self, gib: int) -> None:
        self.now, self.peak = gib, max(self.peak, gib)

    def stats(self, device: Any) -> dict[str, int]:
        found = {}
        for kind in ("allocated", "reserved"):
            found[f"{kind}_bytes.all.current"] = self.now * 2**30
            found[f"{kind}_bytes.all.peak"] = self.peak * 2**30
        return found | {"num_alloc_retries": 2, "num_ooms": 0}

    def reset(self, device: Any) -> None:
        self.peak = self.now


@pytest.mark.covers("S3.49")
def test_gpu_samples_are_summed_up_over_ranks_and_absent_without_a_gpu() -> None:
    assert GpuSampler(CPU).last() == {}
    by_rank = {
        "system/gpu_util": (100.0, 60.0),
        "system/gpu_mem_util": (50.0, 30.0),
        "system/gpu_temp_c": (60.0, 80.0),
        "system/gpu_power_w": (1.0, 2.0),
    }
    row = row_of(new_meter(), by_rank=by_rank)
    assert row["system/gpu_util"] == 80.0 and row["system/gpu_util_min"] == 60.0
    assert (row["system/gpu_temp_c"], row["system/gpu_mem_util"], row["system/gpu_power_w"]) == (
        80.0,
        40.0,
        2.0,
    )


def test_without_the_package_a_gpu_is_asked_by_the_drivers_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this rank's own card; what torch needs for NVML is not installed with the trainer."""

    def missing(device: torch.device) -> float:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "utilization", missing)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"of {device}")
    )
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/words\necho "97, 41, 63, 612.34"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = memory.sample(torch.device("cuda", 3))
    assert found == {
        "system/gpu_util": 97.0,
        "system/gpu_mem_util": 41.0,
        "system/gpu_temp_c": 63.0,
        "system/gpu_power_w": 612.34,
    }
    assert (
        (tmp_path / "words")
        .read_text()
        .startswith("-i GPU-of cuda:3 --query-gpu=utilization.gpu,utilization.memory,")
    )


def test_what_a_validation_took_is_told_by_the_next_row_once() -> None:
    new_meter().note_duration("eval", 3.0)
    assert metrics.take_numbers() == {"time/train/eval_s": 3.0}
    assert metrics.take_numbers() == {}


def test_facts_of_the_data_and_of_the_trackers_are_told_now_and_then() -> None:
    meter = new_meter(
        data_facts={"data/truncated": 3}, tracker_health=lambda: {"obs/queue_depth": 2}
    )
    first, second, fiftieth = row_of(meter), row_of(meter, step=2), row_of(meter, step=50)
    assert (
        first["data/truncated"] == fiftieth["data/truncated"] == 3
        and "data/truncated" not in second
    )
    assert fiftieth["obs/queue_depth"] == 2 and fiftieth["data/epoch_repeat"] == 1
    assert fiftieth["system/disk_free_gib"] > 0
