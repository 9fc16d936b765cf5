"""`doctor --run` on two CPU ranks finds an injected fault, reports none on a good machine, and
leaves no file.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import whole_runs
from processes import wait_until
from repository import REPOSITORY
from runs import environment, processes_of

from trainer.cli import doctor
from trainer.tools.verify import checks, training
from trainer.tools.verify import runs as verify_runs
from trainer.tools.verify.runs import FORCED, NUM_STEPS, RunFailedError, Runs, ShortRun

Rows = list[dict[str, Any]]
LINES = ["training", "ranks", "packing", "resume", "peak memory", "speed"]


class ForkedRuns(Runs):
    """Runs on forked ranks, which saves importing torch. The launcher starts only runs that will be
    killed.
    """

    before: Callable[[], None] | None = None

    def train(self, name, *overrides, num_ranks=None, until=0):
        run = ShortRun(self.directory / name)
        words = (*self.all_overrides, *overrides, *FORCED)
        whole_runs.train(run.run_dir, num_ranks or self.num_ranks, *words, before=self.before)
        return run


def lose_gradient():
    """In this process, omit the gradient of rank 1."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    real = DefaultReduceScatter.__call__

    def reduce(self, output_tensor, input_tensor, *more, **options):
        input_tensor.mul_(os.environ["RANK"] != "1")
        return real(self, output_tensor, input_tensor, *more, **options)

    DefaultReduceScatter.__call__ = reduce


@pytest.fixture(scope="module", autouse=True)
def rank_server():
    """Start the server of forked ranks here, so that it does not belong to a test."""
    forkserver.ensure_running()


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Return the directory for temporary files."""
    directory = tmp_path / "tmp"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    monkeypatch.setenv("TMPDIR", str(directory))
    return directory


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # forked and launched ranks compute bit-equally
    return [*whole_runs.tiny_model(tmp_path), f"trainer.default_local_dir={tmp_path}/mine"]


def test_a_sound_machine_is_found_sound_and_the_run_is_not_touched(
    recipe, temporary, tmp_path, capfd, monkeypatch
):
    monkeypatch.setattr(verify_runs, "Runs", ForkedRuns)
    assert doctor.main(["2", "--run", *recipe, "--json"]) == 0
    found = {one["check"]: one for one in json.loads(capfd.readouterr().out)["checks"]}
    assert {name: found[name]["level"] for name in LINES} == dict.fromkeys(LINES, "ok")
    resumed = found["resume"]["what"]
    assert "resumed from step" in resumed and f"{NUM_STEPS} steps" in resumed
    assert list(temporary.iterdir()) == [] and not (tmp_path / "mine").exists()
    assert processes_of(tmp_path) == []


def test_a_gradient_that_is_lost_on_one_rank_is_found(recipe, tmp_path):
    """The self-check compares two computations on the same ranks, and both lack the gradient."""
    broken = ForkedRuns(recipe, 2, tmp_path, is_on_gpu=False, planned_gib=lambda *_: 1.0)
    broken.before = lose_gradient
    assert training.check_training(broken).level == "ok"
    found = training.check_ranks(broken)
    assert found.level == "fail" and found.fix


def test_a_recipe_that_does_not_train_fails_with_the_end_of_its_log_and_the_rest_waits(
    recipe, tmp_path
):
    words = [*recipe, "data.train_files=nowhere.jsonl"]
    broken = Runs(words, 2, tmp_path, is_on_gpu=False, planned_gib=lambda *_: 1.0)
    found = list(checks.examine(training.RUN_CHECKS, broken, training.NEEDS, set()))
    (_, failed), *rest = found
    assert failed.level == "fail" and "nowhere.jsonl" in failed.what
    assert [(checked.level, checked.what) for _, checked in rest] == [
        ("skip", "needs training")
    ] * (len(LINES) - 1)


def test_a_signal_ends_the_runs_and_removes_them(recipe, temporary, tmp_path):
    command = [sys.executable, "-m", "trainer.cli", "doctor", "2", "--run", *recipe]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(PYTHONPATH=str(REPOSITORY), TMPDIR=str(temporary))
    )
    try:
        begun = "*/straight/metrics.jsonl"
        assert wait_until(lambda: bool(list(temporary.glob(begun))), timeout_s=240)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
    finally:
        process.kill()
    assert processes_of(tmp_path) == [] and list(temporary.iterdir()) == []


class MadeRuns(Runs):
    """Runs with made-up rows: `others` by name. A missing run lacks memory."""

    def __init__(self, others, *words):
        words = ("trainer.device=cpu", *words)
        super().__init__(words, 2, Path(), is_on_gpu=False, planned_gib=lambda *_: 1.0)
        self.made = {"straight": rows(), **others}

    def train(self, name, *overrides, **_):
        if name not in self.made:
            raise RunFailedError(f"{name}: CUDA out of memory")
        return SimpleNamespace(
            run_dir=Path(name),
            rows=lambda: self.made[name],
            said=lambda: "documents are packed",
        )


def rows(loss=2.0, *, norm=1.0):
    row = {"train/loss": loss, "train/grad_norm": norm}
    return [{**row, "step": step} for step in range(1, NUM_STEPS + 1)]


def in_bfloat16(loss):
    """One rank in bfloat16, next to runs whose rounding error is 5e-4."""
    others = {"one_rank": rows(loss), "float32_beside_one_rank": rows(2.001)}
    return others, "model.fsdp_config.param_dtype=bfloat16"


@pytest.mark.parametrize(
    ("check", "made", "level"),
    [
        (training.check_packing, ({"alone": rows(2.0 * (1 + 5e-7))},), "ok"),
        (training.check_packing, ({"alone": rows(2.0 * (1 + 5e-6))},), "fail"),
        (training.check_packing, ({"alone": rows(norm=1 + 5e-5)},), "fail"),
        (training.check_packing, ({"alone": rows(float("nan"))},), "fail"),
        (training.check_ranks, in_bfloat16(2.003), "ok"),
        (training.check_ranks, in_bfloat16(2.005), "fail"),
        (training.check_ranks, ({},), "skip"),
    ],
)
def test_ways_to_compute_a_batch_differ_by_rounding_at_most(check, made, level):
    assert check(MadeRuns(*made)).level == level
