"""The facade: what `metrics.jsonl` holds, and that no backend can stop or delay a run."""

import json
import logging
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer.config import ConfigError
from trainer.errors import CannotWriteError
from trainer.progress import Rollback
from trainer.run.end import lost_rows
from trainer.runtime import json_lines
from trainer.tracking import Tracking, continued, facade, read_metrics
from trainer.tracking.backend import Backend, Sink
from trainer.tracking.events_file import Event
from trainer.tracking.metrics_file import MARKERS, MetricsRow


def track(run_dir: Path, *backends: str, **kwargs: Any) -> Tracking:
    return Tracking(
        "project", "experiment", backends, {}, run_dir=run_dir, total_steps=10, **kwargs
    )


def raw_rows(run_dir: Path) -> list[dict[str, Any]]:
    def no_constants(name: str) -> None:
        raise AssertionError(f"{name} is not strict JSON")

    text = (run_dir / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    rows = [json.loads(line, parse_constant=no_constants) for line in text.splitlines()]
    return [row for row in rows if row["kind"] not in MARKERS]


class FakeBackend(Backend):
    """Notes its calls; `faults` maps the name of a call to what happens there."""

    def __init__(self, **faults: Callable[[], None]) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.faults = faults

    def _note(self, name: str, *args: Any) -> None:
        self.calls.append((name, *args))
        self.faults.get(name, lambda: None)()

    def open(self) -> None:
        self._note("open")

    def log(self, row: MetricsRow) -> None:
        self._note("log", dict(row.data), row.step)

    def rewind(self, step: int) -> None:
        self._note("rewind", step)

    def alert(self, event: Event) -> None:
        self._note("alert", event.message)

    def close(self, exit_code: int) -> None:
        self._note("close", exit_code)


def install(monkeypatch: pytest.MonkeyPatch, name: str, backend: FakeBackend, **spec: Any) -> None:
    monkeypatch.setitem(facade.BACKENDS, name, facade.BackendSpec(lambda info: backend, **spec))


def boom() -> None:
    raise RuntimeError("boom")


def test_rows_hold_step_attempt_kind_time_and_metrics(tmp_path: Path) -> None:
    tracking = track(tmp_path)
    tracking.log({"train/loss": 2.5, "optim/skipped_steps": 0}, step=1)
    tracking.log({"val/loss": 1.5, "time/eval/total_s": 0.25}, step=1)
    tracking.finish(0)
    train, val = raw_rows(tmp_path)
    assert abs(train.pop("ts") - time.time()) < 60
    assert train == {
        "step": 1,
        "attempt": 1,
        "kind": "train",
        "train/loss": 2.5,
        "optim/skipped_steps": 0,
    }
    assert val["kind"] == "val"


def test_non_finite_values_are_null_and_marked(tmp_path: Path) -> None:
    values = {
        "train/loss": float("nan"),
        "train/grad_norm": float("inf"),
        "a": float("-inf"),
        "b": 1.0,
    }
    tracking = track(tmp_path)
    tracking.log(values, step=3)
    tracking.finish(0)
    (row,) = raw_rows(tmp_path)
    assert row["nonfinite"] == {"train/loss": "nan", "train/grad_norm": "inf", "a": "-inf"}
    assert row["train/loss"] is None and row["b"] == 1.0
    (read,) = read_metrics(tmp_path / "metrics.jsonl")
    assert read["train/loss"] != read["train/loss"] and read["a"] == float("-inf")


@pytest.mark.parametrize("torn", ['{"step":2,"attempt":1,"kind":"tr', '{"step":2}', "\0" * 70000])
def test_torn_tail_is_cut_and_the_restart_is_a_new_attempt(tmp_path: Path, torn: str) -> None:
    first = track(tmp_path)
    first.log({"train/loss": 1.0}, step=1)
    first.finish(0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    second = track(tmp_path)
    second.log({"train/loss": 2.0}, step=2)
    second.finish(0)
    assert [(row["step"], row["attempt"]) for row in raw_rows(tmp_path)] == [(1, 1), (2, 2)]


def test_an_opening_without_rows_is_no_attempt(tmp_path: Path) -> None:
    track(tmp_path).finish(0)
    assert track(tmp_path).attempt == 1


def test_reader_takes_the_newest_attempt_of_each_kind_and_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [
        (1, 1, "train", 1.0),
        (2, 1, "train", 2.0),
        (2, 1, "val", 3.0),
        (3, 1, "train", 4.0),
        (2, 2, "train", 5.0),
    ]
    lines = [
        json.dumps({"step": s, "attempt": a, "kind": k, "ts": 0, "x": x}) for s, a, k, x in rows
    ]
    lines.insert(2, '{"step": 9, "att')
    lines.insert(3, "[1]")
    path.write_text("\n".join(lines) + "\n" + '{"step": 4, "attempt": 2, "kind": "train"')
    assert [(row["step"], row["kind"], row["x"]) for row in read_metrics(path)] == [
        (1, "train", 1.0),
        (2, "train", 5.0),
        (2, "val", 3.0),
        (3, "train", 4.0),
    ]


@pytest.mark.covers("S0.10")
@pytest.mark.parametrize(
    "value", [torch.tensor(1.0), torch.zeros(2), np.ones(1), np.float32(1), "1", None, True]
)
def test_values_other_than_int_and_float_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match=r"'train/loss' is a \w+, not an int or float"):
        track(tmp_path).log({"train/loss": value}, step=1)
    assert not (tmp_path / "metrics.jsonl").read_text()


def test_a_metric_named_like_a_column_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'step' collides"):
        track(tmp_path).log({"step": 1}, step=1)


@pytest.mark.parametrize("short_write", [False, True])
def test_rows_wait_for_a_full_disk_and_each_outage_warns(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    short_write: bool,
) -> None:
    real_write = json_lines.os.write

    def full_disk(descriptor: int, line: bytes) -> int:
        if not short_write:
            raise OSError(28, "No space left on device")
        return real_write(descriptor, line[:20])

    tracking = track(tmp_path)
    for step in range(1, 9):
        monkeypatch.setattr(json_lines.os, "write", full_disk if step in (2, 3, 6) else real_write)
        tracking.log({"train/loss": 1.0}, step=step)
        assert [row["step"] for row in raw_rows(tmp_path)] == list(
            range(1, {2: 1, 3: 1, 6: 5}.get(step, step) + 1)
        )
    tracking.finish(0)
    assert [record.getMessage().count("metrics.jsonl") for record in caplog.records] == [1, 1]


def test_rows_that_no_disk_took_are_named_at_the_end_and_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full_disk(descriptor: int, line: bytes) -> int:
        raise OSError(28, "No space left on device")

    real_write = json_lines.os.write
    monkeypatch.setattr(json_lines, "MAX_WAITING_BYTES", 1000)
    tracking = track(tmp_path)
    tracking.start(0)
    for step in range(1, 41):
        monkeypatch.setattr(
            json_lines.os, "write", full_disk if 11 <= step <= 30 or step > 38 else real_write
        )
        tracking.log({"train/loss": 1.0}, step=step)
    tracking.finish(0)
    written = [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    lost = sorted(set(range(1, 41)) - set(written))
    assert (
        written == sorted(written)
        and lost[0] == 11
        and 11 < lost[-3] < 30
        and lost[-2:] == [39, 40]
    )
    said = f"steps 11-{lost[-3]}, 39-40, which"
    assert f"metrics.jsonl lacks {len(lost)} rows of {said} could not be written" in caplog.text
    assert lost_rows(tmp_path, 40).endswith(f"{said} are lost")
    rollback = Rollback(
        onset=39,
        found_step=40,
        target_step=38,
        first_skipped=39,
        last_skipped=40,
        reason="",
        discarded=[],
    )
    (tmp_path / "rollbacks.json").write_text(json.dumps({"rollbacks": [asdict(rollback)]}))
    assert lost_rows(tmp_path, 40).endswith(f"steps 11-{lost[-3]}, which are lost"), (
        "passed over, not lost"
    )


def test_a_run_that_continues_another_lacks_none_of_its_steps(tmp_path: Path) -> None:
    tracking = track(tmp_path)
    tracking.start(100)
    for step in (101, 102, 103):
        tracking.log({"train/loss": 1.0}, step=step)
    tracking.rewind(101)
    tracking.log({"train/loss": 1.0}, step=102)
    tracking.finish(0)
    assert lost_rows(tmp_path, 102) == "" and "steps 103, which" in lost_rows(tmp_path, 103)
    assert lost_rows(tmp_path / "elsewhere", 103) == ""


def test_unwritable_directory_is_an_error_at_construction(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWriteError, match=r"metrics\.jsonl"):
        track(tmp_path / "file")


def test_backend_sees_every_row_in_order_and_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FakeBackend()
    install(monkeypatch, "fake", backend)
    tracking = track(tmp_path, "fake")
    for step in range(1, 51):
        tracking.log({"train/loss": float(step)}, step=step)
    tracking.finish(75)
    tracking.finish(0)
    logs = [("log", {"train/loss": float(step)}, step) for step in range(1, 51)]
    assert backend.calls == [("open",), *logs, ("close", 75)]
    late: list[Callable[[], None]] = [
        lambda: tracking.log({}, 51), lambda: tracking.rewind(4), lambda: tracking.event("x", 51, "late"),
    ]  # fmt: skip
    for call in late:
        with pytest.raises(RuntimeError, match="after finish"):
            call()


def test_a_step_is_recorded_as_sent_only_one_interval_after_all_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library writes later what it was handed, and a step has several rows."""
    recorded: list[int] = []

    def note() -> None:
        recorded.append(
            json.loads((tmp_path / "run.json").read_text()).get("last_sent", {}).get("fake", 0)
        )

    backend = FakeBackend(log=note)
    install(monkeypatch, "fake", backend, is_continued=True)
    monkeypatch.setattr(continued, "RECORD_INTERVAL_S", 0.0)
    tracking = track(tmp_path, "fake")
    for step in range(1, 9):
        tracking.log({"train/loss": 1.0}, step=step)
        tracking.log({"val/loss": 1.0}, step=step)
    tracking.finish(0)
    steps = [call[2] for call in backend.calls if call[0] == "log"]
    assert steps == sorted([*range(1, 9), *range(1, 9)])
    assert (
        all(sent < step for sent, step in zip(recorded, steps, strict=True)) and max(recorded) > 3
    )
    assert json.loads((tmp_path / "run.json").read_text())["last_sent"] == {"fake": 8}


def test_results_of_earlier_steps_reach_the_trackers_of_a_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, later = FakeBackend(), FakeBackend()
    install(monkeypatch, "fake", first, is_continued=True)
    tracking = track(tmp_path, "fake")
    for step in range(1, 9):
        tracking.log({"train/loss": 1.0}, step=step)
    tracking.finish(0)
    install(monkeypatch, "fake", later, is_continued=True)
    tracking = track(tmp_path, "fake")
    tracking.log({"val/exec_success_rate": 0.5}, step=4)
    tracking.finish(0)
    assert later.calls == [("open",), ("log", {"val/exec_success_rate": 0.5}, 4), ("close", 0)]


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("call", ["open", "log", "close"])
def test_backend_that_raises_is_dropped_with_one_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
    inline: bool,
) -> None:
    broken, healthy = FakeBackend(**{call: boom}), FakeBackend()
    install(monkeypatch, "broken", broken, inline=inline)
    install(monkeypatch, "healthy", healthy)
    tracking = track(tmp_path, "broken", "healthy")
    for step in range(1, 6):
        tracking.log({"train/loss": 1.0}, step=step)
        time.sleep(0.01)
    tracking.finish(0)
    warnings = [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ]
    assert len(warnings) == 1
    assert "'broken'" in warnings[0] and f"{call}() raised RuntimeError: boom" in warnings[0]
    assert [called[0] for called in broken.calls].count(call) == 1
    assert healthy.calls[-1] == ("close", 0) and len(healthy.calls) == 7
    assert [row["step"] for row in raw_rows(tmp_path)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("call", ["open", "log", "close"])
def test_backend_that_hangs_delays_neither_steps_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    release = threading.Event()
    install(monkeypatch, "hung", FakeBackend(**{call: release.wait}), close_timeout_s=0.3)
    tracking = track(tmp_path, "hung")
    begin = time.monotonic()
    for step in range(1, 101):
        tracking.log({"train/loss": 1.0}, step=step)
    tracking.finish(0)
    assert time.monotonic() - begin < 5
    release.set()
    assert len(caplog.records) == 1
    assert f"'hung' dropped: {call}() did not finish within 0.3 s" in caplog.text
    assert len(raw_rows(tmp_path)) == 100


def test_several_hung_backends_are_waited_for_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    names = [f"hung{i}" for i in range(4)]
    for name in names:
        install(monkeypatch, name, FakeBackend(close=release.wait), close_timeout_s=1.0)
    tracking = track(tmp_path, *names)
    tracking.log({"train/loss": 1.0}, step=1)
    begin = time.monotonic()
    tracking.finish(0)
    assert time.monotonic() - begin < 3
    release.set()


def test_process_ends_while_a_backend_hangs(tmp_path: Path) -> None:
    program = """
import pathlib, sys, threading
from trainer.progress import Rollback
from trainer.run.end import lost_rows
from trainer.runtime import json_lines
from trainer.tracking import Tracking, facade

class Hung:
    def open(self): threading.Event().wait()

facade.BACKENDS["hung"] = facade.BackendSpec(lambda info: Hung(), close_timeout_s=0.1)
tracking = Tracking("p", "e", "hung", {}, run_dir=pathlib.Path(sys.argv[1]), total_steps=1)
tracking.log({"train/loss": 1.0}, step=1)
tracking.finish(0)
sys.exit(7)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=30)
    assert done.returncode == 7


@pytest.mark.parametrize("limits", [{"capacity": 3}, {"stall_timeout_s": 0.1}])
def test_full_queue_or_stalled_call_drops_the_backend(
    caplog: pytest.LogCaptureFixture, limits: dict[str, Any]
) -> None:
    release = threading.Event()
    backend = FakeBackend(log=release.wait)
    sink = Sink(backend, name="hung", close_timeout_s=20.0, **limits)
    sink.open()
    sink.send("log", MetricsRow(0, "train", 0.0, {}))
    while ("log", {}, 0) not in backend.calls:
        time.sleep(0.01)
    for step in range(1, 10):
        sink.send("log", MetricsRow(step, "train", 0.0, {}))
        time.sleep(0.03)
    begin = time.monotonic()
    sink.finish(0)
    sink.wait()
    assert time.monotonic() - begin < 5
    release.set()
    sink._thread.join(5)
    assert len(caplog.records) == 1 and "'hung' dropped: log()" in caplog.text
    assert [call[0] for call in backend.calls] == ["open", "log"]


def test_unknown_backend_and_missing_package_are_configuration_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="swanlab"):
        track(tmp_path / "run", "swanlab")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(
        ConfigError, match=r"pip install 'tensorboard>=2\.18', or remove 'tensorboard'"
    ):
        track(tmp_path / "run", "tensorboard")
    assert not (tmp_path / "run").exists()


def test_the_advice_names_the_packages_of_the_extra(repository: Path) -> None:
    """A name on an index that nobody registered could be anyone's."""
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for name in ("tensorboard", "mlflow", "trackio"):
        assert facade.BACKENDS[name].install == " ".join(f"'{text}'" for text in extras[name])
    assert facade.BACKENDS["wandb"].install.strip("'") in project["dependencies"]


def test_a_missing_package_is_found_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    facade.require_installed(["console", "tensorboard", "mlflow", "wandb"])
    monkeypatch.setitem(sys.modules, "alembic", None)
    with pytest.raises(
        ConfigError,
        match=r"'mlflow'.*no module 'alembic'.*pip install 'mlflow-skinny>=3\.17' 'sqlalc",
    ):
        facade.require_installed(["mlflow"])
    monkeypatch.setenv("USE_WANDB", "true")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"'wandb'"):
        facade.require_installed(["console"])


def test_run_ids_come_from_run_json_then_from_the_checkpoint_of_the_same_run(
    tmp_path: Path,
) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"git": "abc", "run_ids": {"wandb": "here"}}))
    tracking = track(tmp_path)
    state = {
        "project_name": "project",
        "experiment_name": "experiment",
        "run_ids": {"wandb": "there", "mlflow": "m"},
    }
    tracking.load_state_dict(state | {"experiment_name": "other"})
    assert tracking.state_dict()["run_ids"] == {"wandb": "here"}
    tracking.load_state_dict(state)
    assert tracking.state_dict()["run_ids"] == {"wandb": "here", "mlflow": "m"}
    content = json.loads((tmp_path / "run.json").read_text())
    assert content == {"git": "abc", "run_ids": {"wandb": "here", "mlflow": "m"}}
    tracking.log({}, step=1)
    tracking.load_state_dict(state | {"run_ids": {"tensorboard": "t"}})
    assert tracking.state_dict()["run_ids"] == {"wandb": "here", "mlflow": "m"}, (
        "a rollback goes on in open trackers"
    )


def test_broken_run_json_is_said_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run.json").write_text("{")
    tracking = track(tmp_path)
    assert "run.json" in caplog.text and tracking.state_dict()["run_ids"] == {}
