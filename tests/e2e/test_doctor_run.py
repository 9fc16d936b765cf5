"""`doctor --run` on two CPU ranks finds each planted fault, none on a good machine, and leaves no file.

A `sitecustomize` on the path of the ranks plants the faults.
"""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import wait_until
from runs import REPOSITORY, environment, processes_of
from sweeps import is_full
from whole_runs import tiny_model

from trainer.cli import doctor
from trainer.tools.verify import training
from trainer.tools.verify.runs import NUM_STEPS, RunFailedError, Runs, ShortRun

Rows = list[dict[str, Any]]
LINES = ["training", "ranks", "packing", "resume", "peak memory", "speed"]
PLANT = """
import os
words = open("/proc/self/cmdline").read()
if "RANK" in os.environ:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
    real = DefaultReduceScatter.__call__

    def reduce(self, output_tensor, input_tensor, *more, **options):
        {fault}
        return real(self, output_tensor, input_tensor, *more, **options)

    DefaultReduceScatter.__call__ = reduce
"""
LOST_GRADIENT = 'input_tensor.mul_(os.environ["RANK"] != "1")'
RANDOM_SUMS = "input_tensor.mul_(1 + 1e-7 * os.urandom(1)[0])"
WRONG_AFTER_RESUME = 'input_tensor.mul_(1 + 1e-6 * ("/killed" in words))'
CRASH = 'raise RuntimeError("the card fell off the bus")'


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory for temporary files."""
    directory = tmp_path / "tmp"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    monkeypatch.setenv("TMPDIR", str(directory))
    return directory


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPOSITORY}")
    return [*tiny_model(tmp_path), f"trainer.default_local_dir={tmp_path}/mine"]


@pytest.fixture
def runs(recipe: list[str], tmp_path: Path) -> Callable[[str], Runs]:
    """Return a function that makes runs of the recipe with a fault."""

    def planted(fault: str) -> Runs:
        (tmp_path / "sitecustomize.py").write_text(PLANT.format(fault=fault))
        (tmp_path / "work").mkdir()
        return Runs(recipe, 2, tmp_path / "work", is_on_gpu=False, planned_gib=lambda *_: 1.0)

    return planted


def test_a_sound_machine_is_found_sound_and_the_run_is_not_touched(
    recipe, temporary, tmp_path, capfd
):
    assert doctor.main(["2", "--run", *recipe, "--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    found = {one["check"]: one for one in said["checks"]}
    assert {name: found[name]["level"] for name in LINES} == dict.fromkeys(LINES, "ok")
    assert (
        "resumed from step" in found["resume"]["what"]
        and f"{NUM_STEPS} steps" in found["resume"]["what"]
    )
    assert list(temporary.iterdir()) == [] and not (tmp_path / "mine").exists()
    assert processes_of(tmp_path) == []


def test_a_gradient_that_is_lost_on_one_rank_is_found(runs):
    """The self-check compares two computations on the same ranks, and both lack the gradient."""
    broken = runs(LOST_GRADIENT)
    assert training.check_training(broken).level == "ok"
    found = training.check_ranks(broken)
    assert found.level == "fail" and found.fix


SPREAD = (RANDOM_SUMS, "not deterministic", "trainer.deterministic")
RESUMED = (WRONG_AFTER_RESUME, "first at step 1", "")


@pytest.mark.skipif(not is_full(), reason="two minutes of runs: runs with --full")
@pytest.mark.parametrize(("fault", "what", "fix"), [SPREAD, RESUMED])
def test_random_sums_and_a_run_that_continues_differently_are_told_apart(runs, fault, what, fix):
    found = training.check_resume(runs(fault))
    assert found.level == "fail" and what in found.what and fix in found.fix


def test_a_recipe_that_does_not_train_fails_and_the_rest_waits(
    runs,
    recipe,
    temporary,
    capfd,
):
    runs(CRASH)
    assert doctor.main(["2", "--run", *recipe]) == 1
    out = capfd.readouterr().out
    assert "\nfail  training: " in out and out.count("needs training\n") == len(LINES) - 1
    assert "the card fell off the bus" in out and list(temporary.iterdir()) == []


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
    """Runs with made-up rows: `others` by name; a run that is not there lacks memory."""

    def __init__(self, directory: Path, others: dict[str, Rows], *words: str) -> None:
        words = ("trainer.device=cpu", *words)
        super().__init__(words, 2, directory, is_on_gpu=False, planned_gib=lambda *_: 1.0)
        self.made = {"straight": rows(), **others}

    def train(self, name: str, *overrides: str, **_: Any) -> ShortRun:
        if name not in self.made:
            raise RunFailedError(f"{name}: CUDA out of memory")
        run = ShortRun(self.directory / name)
        run.run_dir.mkdir()
        lines = (json.dumps({"kind": "train", "attempt": 1, **row}) for row in self.made[name])
        (run.run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        run.log.write_text("documents are packed\nself-check  loss\n    equal within 1e-06\n")
        return run


def rows(loss: float = 2.0, *, norm: float = 1.0) -> Rows:
    row = {"train/loss": loss, "train/grad_norm": norm}
    return [{**row, "step": step} for step in range(1, NUM_STEPS + 1)]


def in_bfloat16(loss: float) -> tuple[dict[str, Rows], str]:
    """One rank in bfloat16, next to runs whose rounding is 5e-4."""
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
def test_ways_to_compute_a_batch_differ_by_rounding_at_most(tmp_path, check, made, level):
    assert check(MadeRuns(tmp_path, *made)).level == level
