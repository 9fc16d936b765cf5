"""What the files of a run hold after resumes and rollbacks, and how events get into theirs."""

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from trainer.runtime import json_lines
from trainer.tracking import Tracking, facade, read_metrics
from trainer.tracking.backend import Backend
from trainer.tracking.events_file import Event, read_events
from trainer.tracking.metrics_file import MetricsRow


def track(run_dir: Path, *backends: str) -> Tracking:
    return Tracking("project", "experiment", backends, {"lr": 0.5}, run_dir=run_dir, total_steps=10)


def log_steps(tracking: Tracking, steps: range) -> None:
    for step in steps:
        tracking.log({"train/loss": tracking.attempt + step / 100}, step)


def losses(run_dir: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["train/loss"]) for row in read_metrics(run_dir / "metrics.jsonl")]


@pytest.mark.covers("S3.29")
def test_rows_beyond_the_resume_step_no_longer_count(tmp_path: Path) -> None:
    log_steps(track(tmp_path), range(1, 7))
    log_steps(track(tmp_path), range(4, 6))
    assert losses(tmp_path) == [(1, 1.01), (2, 1.02), (3, 1.03), (4, 2.04), (5, 2.05)]


def test_rows_beyond_a_rollback_no_longer_count(tmp_path: Path) -> None:
    tracking = track(tmp_path)
    log_steps(tracking, range(1, 7))
    tracking.rewind(3)
    assert [step for step, _ in losses(tmp_path)] == [1, 2, 3]
    tracking.log({"train/loss": 9.0}, 4)
    assert losses(tmp_path)[-1] == (4, 9.0)
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["attempt"] == 1


def test_a_validation_made_up_for_keeps_the_training_row_of_its_step(tmp_path: Path) -> None:
    log_steps(track(tmp_path), range(1, 5))
    second = track(tmp_path)
    second.start(3)
    second.log({"val/loss": 7.0}, 3)
    rows = [(row["step"], row["kind"]) for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert rows == [(1, "train"), (2, "train"), (3, "train"), (3, "val")]


def test_an_attempt_that_made_no_step_counts_as_one_once_it_started(tmp_path: Path) -> None:
    log_steps(track(tmp_path), range(1, 4))
    track(tmp_path).start(2)
    assert track(tmp_path).attempt == 3
    assert [step for step, _ in losses(tmp_path)] == [1, 2]
    with pytest.raises(RuntimeError, match="too late"):
        started = track(tmp_path)
        started.log({}, 3)
        started.start(3)


def test_files_without_markers_still_read(tmp_path: Path) -> None:
    rows = [
        {"step": s, "attempt": a, "kind": "train", "ts": 0, "x": a}
        for s, a in [(1, 1), (2, 1), (3, 1), (2, 2)]
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [(row["step"], row["x"]) for row in read_metrics(path)] == [(1, 1), (2, 2), (3, 1)]


@pytest.mark.covers("S0.5")
def test_a_row_has_the_kind_it_is_given_or_that_of_its_keys(tmp_path: Path) -> None:
    tracking = track(tmp_path)
    tracking.log({"train/loss": 1.0}, 1)
    tracking.log({"eval/loss": 1.0}, 1)
    tracking.log({"system/gpu_util": 50.0}, 1, "system")
    tracking.log({"system/gpu_util": 70.0}, 1, kind="system")
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["kind"] for row in rows] == ["system", "train", "val"]
    assert rows[0]["system/gpu_util"] == 70.0
    with pytest.raises(ValueError, match="kind 'rollback'"):
        tracking.log({}, 1, "rollback")


@pytest.mark.covers("S0.3", "S0.11", "S2.4", "S4.4", "S4.14")
def test_any_key_passes_and_a_reducer_in_it_is_dropped(tmp_path: Path) -> None:
    keys = (
        "train/reward_total_std",
        "rewards/Format/mean",
        "critic/rewards/mean",
        "actor/kl_loss",
        "a@b",
        "m@median",
    )
    tracking = track(tmp_path)
    tracking.log({**dict.fromkeys(keys, 1.0), "tokens@sum": 2, "t@p99": 3.0, "@sum": 4.0}, 1)
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row.keys() == {*keys, "tokens", "t", "@sum", "step", "attempt", "kind", "ts"}
    with pytest.raises(ValueError, match="'x@max' is given twice"):
        tracking.log({"x@mean": 1.0, "x@max": 2.0}, 2)
    with pytest.raises(ValueError, match="'step@max' collides"):
        tracking.log({"step@max": 1.0}, 2)


def test_flush_reaches_the_disk_without_waiting_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, synced = threading.Event(), threading.Semaphore(0)

    def slow_disk(descriptor: int) -> None:
        assert threading.current_thread() is not threading.main_thread(), (
            "training waits for the disk"
        )
        synced.release()
        release.wait(20)

    tracking = track(tmp_path)
    tracking.start(0)  # waits for run.json, once
    monkeypatch.setattr(json_lines.os, "fsync", slow_disk)
    log_steps(tracking, range(1, 3))
    tracking.flush()
    assert synced.acquire(timeout=20), "nothing was synced"
    log_steps(tracking, range(3, 5))  # while the disk is still busy
    assert len(losses(tmp_path)) == 4 and not release.is_set()
    release.set()
    tracking.finish(0)


class Alerts(Backend):
    """Takes rows and notes alerts."""

    def __init__(self) -> None:
        self.alerts: list[Event] = []

    def log(self, row: MetricsRow) -> None:
        return

    def alert(self, event: Event) -> None:
        self.alerts.append(event)

    def close(self, exit_code: int) -> None:
        return


def event_lines(run_dir: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line, parse_constant=pytest.fail)
        for line in (run_dir / "events.jsonl").read_text().splitlines()
    ]


def test_an_event_is_a_strict_line_shown_and_alerted_by_its_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Alerts()
    monkeypatch.setitem(facade.BACKENDS, "alerts", facade.BackendSpec(lambda info: backend))
    tracking = track(tmp_path, "alerts")
    tracking.event("early", 0, "before the first row", "error")
    log_steps(tracking, range(1, 2))
    tracking.event("checkpoint", 1, "saved", path=tmp_path, size_bytes=7)
    tracking.event(
        "spike",
        1,
        "loss 9 times its level",
        level="warn",
        z=float("nan"),
        ids=[1, 2],
        m={"x": float("inf")},
    )
    tracking.event("dead", 1, "no gradient", level="error")
    tracking.finish(76)
    lines = event_lines(tmp_path)
    assert [line["kind"] for line in lines] == [
        "early",
        "start",
        "checkpoint",
        "spike",
        "dead",
        "end",
    ]
    spike = lines[3]
    assert spike.pop("ts") > 0
    assert spike == {
        "attempt": 1, "step": 1, "kind": "spike", "level": "warn", "message": "loss 9 times its "
                                                                              "level",
        "z": "nan", "ids": [1, 2], "m": {"x": "inf"},
    }  # fmt: skip
    assert lines[2]["path"] == str(tmp_path)
    assert [alert.kind for alert in backend.alerts] == ["dead"], (
        "before the first row the resume step is not known"
    )
    shown = [
        (record.levelno, record.getMessage())
        for record in caplog.records
        if record.levelno >= logging.WARNING
    ]
    assert (logging.WARNING, "step 1: loss 9 times its level") in shown
    assert (logging.ERROR, "step 1: no gradient") in shown


@pytest.mark.parametrize(
    ("fields", "text"), [({"level": "fatal"}, "'fatal'"), ({"attempt": 3}, "'attempt' is a column")]
)
def test_a_wrong_level_or_field_is_refused(
    tmp_path: Path, fields: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        track(tmp_path).event("x", 1, "message", **fields)


@pytest.mark.covers("S1.10")
def test_every_attempt_starts_and_ends_in_the_events_but_a_killed_one_has_no_end(
    tmp_path: Path,
) -> None:
    first = track(tmp_path)
    log_steps(first, range(1, 5))
    first.finish(75)
    log_steps(track(tmp_path), range(3, 6))  # killed
    third = track(tmp_path)
    third.start(4)
    third.finish(0)
    track(tmp_path).finish(1)  # crashed before its first step
    track(tmp_path).finish(0)  # nothing was left to do
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"ts": 1, "kind": "st')
    events = [(event["kind"], event["attempt"], event["step"], event.get("exit_code")) for event in
              read_events(tmp_path / "events.jsonl")]  # fmt: skip
    assert events == [
        ("start", 1, 0, None), ("end", 1, 4, 75), ("start", 2, 2, None), ("start", 3, 4, None), ("end", 3, 4, 0),
        ("end", 4, 0, 1),
    ]  # fmt: skip
    assert track(tmp_path).attempt == 4
    assert read_events(tmp_path / "none.jsonl") == []


@pytest.mark.covers("S3.3")
def test_the_resolved_configuration_is_kept_with_the_run(tmp_path: Path) -> None:
    track(tmp_path).start(0)
    content = json.loads((tmp_path / "run.json").read_text())
    names = {"project_name": "project", "experiment_name": "experiment"}
    assert content == names | {"group": "experiment", "total_steps": 10, "config": {"lr": 0.5}}


def test_the_group_of_a_run_is_that_of_its_last_start(tmp_path: Path) -> None:
    for group, written in (("together", "together"), (None, "experiment")):
        Tracking("project", "experiment", [], run_dir=tmp_path, group=group).start(0)
        assert json.loads((tmp_path / "run.json").read_text())["group"] == written, (
            "its evaluations go there"
        )
