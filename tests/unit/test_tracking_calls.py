"""How others call `Tracking`: as verl does, with results of an evaluation, and into directories
that are not theirs.
"""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.config import ConfigError
from trainer.report.readers import read_run
from trainer.tracking import Tracking, read_metrics
from trainer.tracking.backend import Backend
from trainer.tracking.histories import HistoryBackend
from trainer.tracking.metrics_file import MetricsRow

DOCS = Path(__file__).parents[2] / "docs" / "tracking.md"


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trained(run_dir: Path, num_steps: int = 190, experiment: str = "exp") -> Path:
    """A run with a validation every ten steps that ended."""
    tracking = Tracking("sft", experiment, [], {}, run_dir=run_dir, total_steps=num_steps)
    for step in range(1, num_steps + 1):
        tracking.log({"train/loss": 1.0}, step)
        if step % 10 == 0:
            tracking.log({"val/loss": 1.5}, step)
    tracking.finish(0)
    return run_dir


def content(run_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run_dir.iterdir()}


@pytest.mark.covers("S3.3", "S3.7")
def test_verls_call_works_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    config = {"data": {"path": Path("a.parquet")}, "optim": SimpleNamespace(lr=1e-5)}
    tracking = Tracking(
        project_name="rlvr", experiment_name="phase1", default_backend=["console"], config=config
    )  # fmt: skip
    tracking.log({"train/loss": 0.5}, step=7)
    tracking.log(data={"val/loss": 0.6}, step=7)
    tracking.finish()
    run_dir = Path("checkpoints/rlvr/phase1")
    assert [row["step"] for row in read_metrics(run_dir / "metrics.jsonl")] == [7, 7]
    assert "step 7 | loss 0.5000\n" in capsys.readouterr().out
    description = json.loads((run_dir / "run.json").read_text())
    assert (
        description["config"]["data"] == {"path": "a.parquet"}
        and "lr=1e-05" in description["config"]["optim"]
    )


@pytest.mark.parametrize(
    "config", [{"trainer": {"default_local_dir": "runs/a"}}, {"default_local_dir": "runs/a"}]
)
def test_the_directory_is_that_of_the_configuration(config: dict[str, object]) -> None:
    tracking = Tracking(project_name="p", experiment_name="e", config=config)
    tracking.log({"train/loss": 0.5}, step=1)
    tracking.finish(0)
    assert Path("runs/a/metrics.jsonl").is_file() and not Path("checkpoints").exists()


def test_the_documented_call_keeps_to_a_directory_of_its_own_and_refuses_that_of_a_run() -> None:
    snippet = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)[0]
    exec(compile(snippet, DOCS.name, "exec"), {})
    assert (
        read_metrics(Path("checkpoints/sft/eval_step_500/metrics.jsonl"))[0][
            "val/exec_success_rate"
        ]
        == 0.61
    )
    run_dir = trained(Path("run"))
    before = content(run_dir)
    pointed = snippet.replace("config=", "run_dir='run', config=")
    with pytest.raises(
        ConfigError, match="holds the run 'exp' of project 'sft', not 'eval_step_500'"
    ):
        exec(compile(pointed, DOCS.name, "exec"), {})
    assert content(run_dir) == before


def test_results_under_the_names_of_a_finished_run_take_nothing_back() -> None:
    run_dir = trained(Path("run"))
    before = read_metrics(run_dir / "metrics.jsonl")
    tracking = Tracking("sft", "exp", [], {}, run_dir=run_dir)
    tracking.log({"val/exec_success_rate": 0.61}, step=100)
    tracking.finish(0)
    after = read_metrics(run_dir / "metrics.jsonl")
    assert len(before) == 190 + 19 == len(after)
    (row,) = (row for row in after if (row["step"], row["kind"]) == (100, "val"))
    assert (row["val/loss"], row["val/exec_success_rate"]) == (1.5, 0.61)
    log = read_run(run_dir)
    assert (len(log.series["train/loss"]), len(log.series["val/loss"])) == (190, 19)
    assert (log.num_lost_steps, log.num_disordered_rows, log.total_steps) == (0, 0, 190)
    resumed = Tracking("sft", "exp", [], {}, run_dir=run_dir)
    resumed.start(190)
    assert resumed.past.num_lost_steps == 0, "the result of step 100 was no return to it"
    resumed.finish(0)


def test_values_of_a_step_logged_one_after_the_other_all_count() -> None:
    tracking = Tracking("p", "e", [], {}, run_dir="run")
    tracking.log({"train/loss": 1.0, "train/lr": 0.1}, 1)
    tracking.log({"train/loss": float("inf"), "train/reward_mean": 2.0}, 1)
    tracking.log({"train/loss": 3.0, "train/lr": 0.1}, 2)
    tracking.rewind(1)
    tracking.log({"train/lr": 0.2}, 2)
    tracking.finish(0)
    first, second = read_metrics(Path("run/metrics.jsonl"))
    assert (first["train/loss"], first["train/lr"], first["train/reward_mean"]) == (
        float("inf"),
        0.1,
        2.0,
    )
    assert "train/loss" not in second and second["train/lr"] == 0.2, (
        "nothing of a step that was taken back"
    )
    assert "reward_mean" in Path("run/training_history.csv").read_text().splitlines()[0]


def test_a_tracker_that_is_switched_on_later_gets_what_earlier_attempts_logged_and_nothing_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_dir = trained(Path("run"), 20)
    seen: list[MetricsRow] = []
    opening = HistoryBackend.open

    def read_late(self: Backend) -> None:
        """A tracker that opens once the attempt has logged, as one in a thread may."""
        seen.extend(self._info.earlier_rows())  # type: ignore[attr-defined]
        opening(self)  # type: ignore[arg-type]

    tracking = Tracking("sft", "exp", [], {}, run_dir=run_dir)
    monkeypatch.setattr(HistoryBackend, "open", read_late)
    tracking.log({"val/exec_success_rate": 0.61}, step=10)
    tracking.finish(0)
    (row,) = (row for row in seen if (row.step, row.kind) == (10, "val"))
    assert row.data == {"val/loss": 1.5} and len(seen) == 22


def test_a_directory_in_which_a_run_trains_is_refused() -> None:
    run_dir = trained(Path("run"))
    trainer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    holder = {"pid": trainer.pid, "host": socket.gethostname()}
    try:
        (run_dir / ".train.lock").write_text(json.dumps(holder))
        before = content(run_dir)
        with pytest.raises(
            ConfigError,
            match=f"is being trained in by pid {trainer.pid}: log into a directory of its",
        ):
            Tracking("sft", "exp", [], {}, run_dir=run_dir)
        assert content(run_dir) == before
    finally:
        trainer.communicate()
    Tracking("sft", "exp", [], {}, run_dir=run_dir).finish(0)
    (run_dir / ".train.lock").write_text(json.dumps(holder | {"pid": os.getpid()}))
    Tracking("sft", "exp", [], {}, run_dir=run_dir).finish(0)
