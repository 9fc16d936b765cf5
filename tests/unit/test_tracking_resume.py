"""Trackers over kills and rollbacks, read back with their own libraries: no step is lost, a
kill may repeat some.
"""

import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import wandb_files
from killed_run import STEPS, train_row, val_row
from sweeps import short_or_full

from trainer.errors import EXIT_DONE
from trainer.tracking import Tracking, continued
from trainer.tracking.events_file import read_events

Series = dict[str, list[tuple[int, float]]]
"""{metric: its (step, value) in order}"""

REPOSITORY = Path(__file__).resolve().parents[2]
HISTORIES = ("training_history.csv", "validation_history.csv")
KILLS = ((1, 6), (5, 9), (7, 11))
"""First and last step of the attempts that are killed; the last one goes on from step 9."""


@pytest.fixture(autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    # read once, at its import
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path_factory.getbasetemp() / "trackio"))
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path_factory.mktemp(name)))
    for name in ("USE_WANDB", "WANDB_PROJECT", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


def tensorboard(run_dir: Path) -> Series:
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    events = event_accumulator.EventAccumulator(
        str(run_dir / "tensorboard"), size_guidance={"scalars": 0}
    ).Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def mlflow_run(run_dir: Path) -> tuple[Any, Any]:
    client = pytest.importorskip("mlflow.tracking").MlflowClient(
        f"sqlite:///{run_dir}/mlflow/mlflow.db"
    )
    (run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    return client, run


def mlflow(run_dir: Path) -> Series:
    client, run = mlflow_run(run_dir)
    names = {name: run.data.tags.get(f"metric_name/{name}", name) for name in run.data.metrics}
    histories = {
        key: client.get_metric_history(run.info.run_id, name) for name, key in names.items()
    }
    return {
        key: [(metric.step, metric.value) for metric in history]
        for key, history in histories.items()
    }


def wandb(run_dir: Path) -> Series:
    """Checks on the way that all files are of one run, and that its own steps go on from file
    to file.
    """
    (run_id,) = json.loads((run_dir / "run.json").read_text())["run_ids"].values()
    paths = wandb_files.files_of(run_dir)
    assert {path.name for path in paths} == {f"run-{run_id}.wandb"}
    rows = [row for path in paths for row in wandb_files.history(path)]
    own_steps = [row["_step"] for row in rows]
    assert own_steps == sorted(set(own_steps)), (
        "wandb drops a row whose own step is not beyond the last"
    )
    series: Series = {}
    for row in rows:
        for key in row.keys() - {"trainer/step", "_step", "_runtime", "_timestamp"}:
            series.setdefault(key, []).append((row["trainer/step"], row[key]))
    return series


def trackio(run_dir: Path) -> Series:
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    run_id = json.loads((run_dir / "run.json").read_text())["run_ids"]["trackio"]
    series: Series = {}
    for row in storage.get_logs("project", run_id=run_id):
        for key in row.keys() - {"step", "timestamp"}:
            series.setdefault(key, []).append((row["step"], row[key]))
    return series


READERS: dict[str, Callable[[Path], Series]] = {
    "tensorboard": tensorboard,
    "mlflow": mlflow,
    "wandb": wandb,
    "trackio": trackio,
}
not_here = pytest.mark.skipif(
    importlib.util.find_spec("trackio") is None, reason="trackio is not installed"
)
by_tracker = pytest.mark.parametrize(
    "backend", [*list(READERS)[:-1], pytest.param("trackio", marks=not_here)]
)


def truth(steps: int = STEPS) -> Series:
    series: Series = {
        key: [(step, train_row(step)[key]) for step in range(1, steps + 1)] for key in train_row(1)
    }
    return series | {
        "val/loss": [(step, val_row(step)["val/loss"]) for step in range(2, steps + 1, 2)]
    }


def assert_same(found: Series, expected: Series) -> None:
    """Steps exactly, values to the precision of TensorBoard's float32."""
    assert {key: [step for step, _ in points] for key, points in found.items()} == {
        key: [step for step, _ in points] for key, points in expected.items()
    }
    for key, points in expected.items():
        assert [value for _, value in found[key]] == pytest.approx(
            [value for _, value in points], rel=1e-6
        ), key


def run_piece(run_dir: Path, backend: str, first_step: int, kill_step: int) -> int:
    program = Path(__file__).with_name("killed_run.py")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    words = [sys.executable, str(program), str(run_dir), backend, str(first_step), str(kill_step)]
    return subprocess.run(words, env=environment, timeout=120).returncode


def track(run_dir: Path, *backends: str) -> Tracking:
    # wandb names its offline directories by the second
    time.sleep(1.0 if "wandb" in backends else 0.0)
    return Tracking("project", "killed", backends, {}, run_dir=run_dir, total_steps=STEPS)


def log_steps(tracking: Tracking, steps: range, *, shift: float = 0.0) -> None:
    for step in steps:
        tracking.log({key: value + shift for key, value in train_row(step).items()}, step)
        if step % 2 == 0:
            tracking.log({key: value + shift for key, value in val_row(step).items()}, step)


@by_tracker
@pytest.mark.covers("S0.1", "S1.5", "S3.1", "S3.2", "S3.29", "S3.58")
def test_kills_leave_one_continuous_run(tmp_path: Path, backend: str) -> None:
    for first_step, kill_step in short_or_full(KILLS[:2], full=KILLS):
        assert run_piece(tmp_path, backend, first_step, kill_step) == -signal.SIGKILL
        assert_not_finished(tmp_path, backend)
        time.sleep(1.0 if backend == "wandb" else 0.0)
    assert run_piece(tmp_path, backend, 10, -1) == EXIT_DONE
    found = READERS[backend](tmp_path)
    if backend != "tensorboard":
        found = {key: sorted(set(points)) for key, points in found.items()}
    assert_same(found, truth())
    if backend == "mlflow":
        assert mlflow_run(tmp_path)[1].info.status == "FINISHED"
    if backend == "wandb":
        assert exit_codes(tmp_path) == [EXIT_DONE]
    whole = track(tmp_path / "whole")
    log_steps(whole, range(1, STEPS + 1))
    whole.finish(0)
    for name in HISTORIES:
        assert (tmp_path / name).read_text() == (tmp_path / "whole" / name).read_text()


def exit_codes(run_dir: Path) -> list[int]:
    records = [
        record for file in wandb_files.files_of(run_dir) for record in wandb_files.records(file)
    ]
    return [
        record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"
    ]


def assert_not_finished(run_dir: Path, backend: str) -> None:
    assert read_events(run_dir / "events.jsonl")[-1]["kind"] == "start"
    if backend == "mlflow":
        assert mlflow_run(run_dir)[1].info.status == "RUNNING"
    if backend == "wandb":
        assert not exit_codes(run_dir)


@by_tracker
def test_a_tracker_switched_on_later_or_that_failed_gets_what_it_lacks(
    tmp_path: Path, backend: str
) -> None:
    log_steps(track(tmp_path), range(1, 4))
    with_tracker = track(tmp_path, backend)
    log_steps(with_tracker, range(3, 6))
    with_tracker.finish(75)
    log_steps(track(tmp_path), range(4, 9))
    last = track(tmp_path, backend)
    log_steps(last, range(8, STEPS + 1))
    last.finish(0)
    assert_same(READERS[backend](tmp_path), truth())


@by_tracker
def test_after_a_rollback_and_a_kill_no_step_is_lost(tmp_path: Path, backend: str) -> None:
    """Trackers that cannot take back show steps 5 to 8 as they were, then as they became; all
    go on to the end.
    """
    rolled = track(tmp_path, backend)
    log_steps(rolled, range(1, 5))
    log_steps(rolled, range(5, 9), shift=1.0)
    rolled.rewind(4)
    log_steps(rolled, range(5, 7))
    rolled.finish(75)
    last = track(tmp_path, backend)
    log_steps(last, range(6, STEPS + 1))
    last.finish(0)
    found, expected = READERS[backend](tmp_path), truth()
    if backend != "tensorboard":
        spoiled = [(step, value + 1.0) for step, value in expected["train/loss"] if 5 <= step <= 8]
        assert sorted(found["train/loss"]) == sorted(expected["train/loss"] + spoiled)
        found = {"train/loss": [point for point in found["train/loss"] if point not in spoiled]}
        expected = {"train/loss": expected["train/loss"]}
    assert_same(found, expected)


@by_tracker
def test_what_is_recorded_as_sent_is_not_sent_again_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """An attempt without `finish` stands for a killed one: it repeats the two steps that were
    not recorded yet.
    """
    monkeypatch.setattr(continued, "RECORD_INTERVAL_S", 0.0)
    killed = track(tmp_path, backend)
    log_steps(killed, range(1, 9))
    while (
        last_sent := json.loads((tmp_path / "run.json").read_text())
        .get("last_sent", {})
        .get(backend, -1)
    ) < 6:
        time.sleep(0.01)
    killed.finish(75)
    content = json.loads((tmp_path / "run.json").read_text())
    content["last_sent"][backend] = last_sent
    (tmp_path / "run.json").write_text(json.dumps(content))
    last = track(tmp_path, backend)
    log_steps(last, range(5, STEPS + 1))
    last.finish(0)
    steps = [step for step, _ in READERS[backend](tmp_path)["train/loss"]]
    repeated = [] if backend == "tensorboard" else list(range(last_sent + 1, 9))
    assert sorted(steps) == sorted([*range(1, STEPS + 1), *repeated])


@by_tracker
def test_a_run_whose_steps_sent_were_never_recorded_is_not_sent_its_history_again(
    tmp_path: Path, backend: str
) -> None:
    """As after `run.json` was written by an earlier version, or lost and its ids came with a
    checkpoint.
    """
    first = track(tmp_path, backend)
    log_steps(first, range(1, 7))
    first.finish(75)
    content = json.loads((tmp_path / "run.json").read_text())
    del content["last_sent"]
    (tmp_path / "run.json").write_text(json.dumps(content))
    last = track(tmp_path, backend)
    log_steps(last, range(7, STEPS + 1))
    last.finish(0)
    assert_same(READERS[backend](tmp_path), truth())


def test_errors_alert_in_wandb(tmp_path: Path) -> None:
    tracking = track(tmp_path, "wandb")
    log_steps(tracking, range(1, 3))
    tracking.event("dead", 2, "no gradient for 10 steps", level="error")
    tracking.event("spike", 2, "only a warning", level="warn")
    tracking.finish(0)
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    alerts = [
        record.alert
        for record in wandb_files.records(file)
        if record.WhichOneof("record_type") == "alert"
    ]
    assert [(alert.title, alert.text, alert.level) for alert in alerts] == [
        ("dead at step 2", "no gradient for 10 steps", "ERROR")
    ]


@pytest.mark.covers("S1.9", "S3.14")
def test_wandb_is_switched_and_its_project_named_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USE_WANDB", "true")
    monkeypatch.setenv("WANDB_PROJECT", "train and eval")
    tracking = track(tmp_path / "on")
    log_steps(tracking, range(1, 3))
    tracking.finish(0)
    (file,) = (tmp_path / "on" / "wandb").glob("offline-run-*/*.wandb")
    (run,) = [
        record.run
        for record in wandb_files.records(file)
        if record.WhichOneof("record_type") == "run"
    ]
    assert run.project == "train and eval" and run.display_name == "killed"
    monkeypatch.setenv("USE_WANDB", "False")
    tracking = track(tmp_path / "off", "wandb")
    log_steps(tracking, range(1, 3))
    tracking.finish(0)
    assert not (tmp_path / "off" / "wandb").exists()
    monkeypatch.setenv("USE_WANDB", "maybe")
    with pytest.raises(ValueError, match="USE_WANDB in the environment must be true or false"):
        track(tmp_path / "on")


@pytest.mark.covers("S1.5", "S1.45")
def test_the_start_says_once_where_the_logs_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trainer.tracking.facade")
    tracking = track(tmp_path, "tensorboard", "mlflow", "wandb")
    tracking.start(0)
    (text,) = [
        record.getMessage() for record in caplog.records if record.name == "trainer.tracking.facade"
    ]
    assert text.splitlines() == [
        f"logs in {tmp_path}: metrics.jsonl, events.jsonl, training_history.csv, "
        f"validation_history.csv",
        f"  tensorboard  tensorboard --logdir={tmp_path}/tensorboard --port=6006",
        f"  mlflow       mlflow ui --backend-store-uri sqlite:///{tmp_path}/mlflow/mlflow.db",
        f"  wandb        offline, to upload: wandb sync {tmp_path}/wandb/offline-run-*",
    ]
    caplog.clear()
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://user:secret@host/mlflow")
    from trainer.tracking import mlflow_backend, wandb_backend

    assert mlflow_backend.where(tracking._info) == "https://host/mlflow"
    assert wandb_backend.where(tracking._info) == "project project, its address follows"
    console_only = track(tmp_path, "console")
    console_only.log({"train/loss": 1.0}, 1)
    console_only.log({"train/loss": 1.0}, 2)
    (text,) = [
        record.getMessage() for record in caplog.records if record.name == "trainer.tracking.facade"
    ]
    assert len(text.splitlines()) == 1
