"""How a run stands while it trains: what `watch` reads from half-written files, and what it says."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_fakes import save

from trainer.cli import watch
from trainer.watch.screen import NUM_ROWS, RunStatus

NOW_S = 1_000_000.0
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run after 30 of 60 steps, in its second attempt."""
    monkeypatch.setattr("trainer.cli.watch.time.time", lambda: NOW_S)
    (path := tmp_path / "run").mkdir()
    rows = [train(step) for step in range(1, 31)]
    rows.insert(20, {"step": 20, "attempt": 1, "kind": "start", "ts": NOW_S})
    rows += [{"step": step, "kind": "val", "val/loss": loss} for step, loss in ((10, 1.4), (20, 1.3), (30, 1.5))]
    add(path / "metrics.jsonl", *rows)
    add(
        path / "events.jsonl",
        event("start", 0), event("alert", 5, "warn", "from before the restart"),
        event("start", 20), event("alert", 25, "warn", "loss \x1b[31m2.1 is 2.3 times its usual level"),
        event("save", 28), event("alert", 29, "error", "cannot upload"),
    )  # fmt: skip
    (path / "training_history.csv").write_text("epoch,loss,reward_mean\n1,2.5,\n2,2.0,\n3,2.25,\n")
    save(path, 10, 20)
    return path


def train(step: int, **more: Any) -> dict[str, Any]:
    row = {"step": step, "attempt": 1, "kind": "train", "ts": NOW_S - 60 + step, "train/loss": 3 - step / 20}
    return row | {"train/grad_norm": 1.25, "progress/pct": step / 0.6, "progress/eta_s": 3725.0} | more


def event(kind: str, step: int, level: str = "info", message: str = "", **more: Any) -> dict[str, Any]:
    return {"ts": NOW_S, "attempt": 1, "step": step, "kind": kind, "level": level, "message": message, **more}


def add(path: Path, *rows: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def beat(run_dir: Path, rank: int, age_s: float) -> None:
    (directory := run_dir / "heartbeat").mkdir(exist_ok=True)
    content = {"rank": rank, "step": 29, "phase": "backward", "ts": NOW_S - age_s}
    (directory / f"rank_{rank}.json").write_text(json.dumps(content))


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Exit code, stdout and stderr."""
    return lambda *words: (watch.main([str(word) for word in words]), *capsys.readouterr())


@pytest.mark.covers("S1.30")
def test_watch_says_where_the_run_stands(run_dir: Path, call: Call) -> None:
    code, out, err = call(run_dir, "--once")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert (code, err) == (0, "") and "last row 0:00:30 ago" in lines[0] + lines[1]
    for line in (
        "step 30 of 60 (50.0 %)",
        "loss 1.5",
        "time left 1:02:05",
        "validation 1.5 at step 30; best 1.3 at step 20",
        "loss by epoch 2.5 2 2.25 (mean 2.25, fell 1 of 2 times)",
        "checkpoints 10, 20; a resume takes 20",
    ):
        assert line in lines


def test_alerts_are_those_of_the_newest_attempt_without_control_characters(run_dir: Path, call: Call) -> None:
    out = call(run_dir)[1]
    assert "warn step 25: loss �[31m2.1 is" in out and "error step 29: cannot upload" in out
    assert "before the restart" not in out and "\x1b" not in out


def test_a_rank_is_silent_after_three_missing_signs_of_life(run_dir: Path, call: Call) -> None:
    beat(run_dir, 0, 89.0)
    beat(run_dir, 10, 3700.0)
    beat(run_dir, 2, 91.0)
    (run_dir / "heartbeat" / "rank_3.json").write_text("{")
    lines = [line for line in call(run_dir)[1].splitlines() if "is silent" in line]
    assert lines == [
        "rank 2 is silent for 0:01:31, in backward at step 29",
        "rank 10 is silent for 1:01:40, in backward at step 29",
    ]


def test_a_run_that_ended_says_so_and_has_no_silent_ranks(run_dir: Path, call: Call) -> None:
    beat(run_dir, 0, 5000.0)
    add(run_dir / "events.jsonl", event("end", 30, exit_code=75))
    out = call(run_dir)[1]
    assert "ended with exit code 75" in out and "is silent" not in out and "time left" not in out
    add(run_dir / "events.jsonl", event("start", 30))
    assert "is silent" in call(run_dir)[1]


@pytest.mark.covers("S1.31")
def test_the_last_twenty_rows_and_the_means_of_the_last_ten_epochs_are_shown_on_demand(
    run_dir: Path, call: Call
) -> None:
    epochs = [f"{epoch},{epoch},{epoch - 1},{epoch / 10}" for epoch in range(1, 13)]
    (run_dir / "training_history.csv").write_text("\n".join(["epoch,loss,reward_mean,accuracy_mean", *epochs]) + "\n")
    out = call(run_dir, "--rows")[1]
    table = [line.split() for line in out.splitlines()[-NUM_ROWS - 1 :]]
    assert table[0] == ["step", "train/loss", "train/grad_norm"] and table[1] == ["11", "2.45", "1.25"]
    assert [row[0] for row in table[1:]] == [str(step) for step in range(11, 31)]
    words = " ".join(out.split())
    assert "reward_mean by epoch 2 3 4 5 6 7 8 9 10 11 (mean 6.5" in words and "accuracy_mean by epoch 0.3" in words
    assert "2.45" not in call(run_dir)[1]


def test_a_rollback_takes_back_rows_and_validations(run_dir: Path) -> None:
    status = RunStatus(run_dir)
    status.read()
    add(run_dir / "metrics.jsonl", {"step": 15, "attempt": 1, "kind": "rollback", "ts": NOW_S}, train(16))
    status.read()
    assert [row["step"] for row in status.rows] == [11, 12, 13, 14, 15, 16] and status.validations == {10: 1.4}
    add(run_dir / "metrics.jsonl", train(14))
    status.read()
    assert [row["step"] for row in status.rows] == [11, 12, 13, 14]


def test_values_that_are_not_finite_are_shown_as_such(run_dir: Path, call: Call) -> None:
    add(run_dir / "metrics.jsonl", train(31, **{"train/loss": None, "nonfinite": {"train/loss": "inf"}}))
    assert "loss inf" in " ".join(call(run_dir)[1].split())


def test_a_young_run_has_few_files(tmp_path: Path, call: Call) -> None:
    code, _, err = call(tmp_path)
    assert code == 2 and "is no run directory, or its first step is still to come" in err
    add(tmp_path / "metrics.jsonl", {"step": 1, "kind": "train"})
    assert call(tmp_path)[:2] == (0, f"{tmp_path}  starting\nstep  1\nloss  –\n".replace("–", "–"))
    assert call(tmp_path / "no")[0] == 2


def test_on_a_terminal_it_looks_again_until_interrupted(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[threading.Thread] = []

    def sleep(seconds: float) -> None:
        looks.append(threading.current_thread())
        add(run_dir / "metrics.jsonl", train(30 + len(looks)))
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("trainer.cli.watch.time.sleep", sleep)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_INTERACTIVE", "1")
    assert watch.main([str(run_dir)]) == 0 and len(looks) == 3
