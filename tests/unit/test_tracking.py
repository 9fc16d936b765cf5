"""The facade: the files of a run across restarts and rollbacks. No backend can stop or delay a run."""

import json
import math
import os
import socket
import threading
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from repository import REPOSITORY
from small_files import read_json, write_json

from trainer.config import ConfigError
from trainer.runtime import json_lines
from trainer.tracking import Tracking, backend, facade, read_metrics
from trainer.tracking.backend import Backend, ContinuedBackend
from trainer.tracking.metrics_file import MARKERS
from trainer.tracking.row_losses import SampleLosses, read_hard_rows
from trainer.tracking.run_info import RunFile


def track(run_dir, *backends):
    return Tracking("project", "experiment", backends, {"lr": 0.5}, run_dir=run_dir, total_steps=10)


def log_steps(tracking, steps):
    for step in steps:
        tracking.log({"train/loss": tracking.attempt + step / 100}, step)


def losses(run_dir):
    return [(row["step"], row["train/loss"]) for row in read_metrics(run_dir / "metrics.jsonl")]


def raw_lines(run_dir, name="metrics.jsonl"):
    text = (run_dir / name).read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def run_file(run_dir):
    return read_json(run_dir / "run.json")


@pytest.fixture
def sent(monkeypatch):
    """The steps of the rows that the backend `fake` is sent, each with the last step that
    `run.json` has recorded by then.
    """
    rows = []

    class Fake(ContinuedBackend):
        def connect(self, run_id):
            return "1"

        def send(self, row):
            rows.append((row.step, self.info.run_file.tracker(self.name)[1]))

        def disconnect(self, exit_code): ...

    monkeypatch.setitem(facade.BACKENDS, "fake", Fake)
    return rows


def install(monkeypatch, name, **attributes):
    """Add a backend whose methods are those of the mock that is returned."""
    calls = Mock(spec=Backend)
    methods = {call: getattr(calls, call) for call in ("open", "log", "rewind", "alert", "close")}
    made = type("Made", (Backend,), methods | attributes)
    monkeypatch.setitem(facade.BACKENDS, name, made)
    return calls


def test_rows_are_strict_lines_and_read_back_as_logged(tmp_path):
    tracking = track(tmp_path)
    tracking.log({"train/loss": 2.5, "optim/skipped_steps": 0}, step=1)
    tracking.log({"val/loss": 1.5}, step=1)
    values = {"train/loss": math.nan, "train/grad_norm": math.inf, "a": -math.inf, "b": 1.0}
    tracking.log(values, step=2)
    tracking.finish(0)
    train, val, odd = [row for row in raw_lines(tmp_path) if row["kind"] not in MARKERS]
    del train["ts"]
    columns = {"step": 1, "attempt": 1, "kind": "train"}
    assert train == columns | {"train/loss": 2.5, "optim/skipped_steps": 0}
    assert val["kind"] == "val"
    assert odd["nonfinite"] == {"train/loss": "nan", "train/grad_norm": "inf", "a": "-inf"}
    assert odd["train/loss"] is None and odd["b"] == 1.0
    read = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert math.isnan(read["train/loss"]) and read["a"] == -math.inf


@pytest.mark.parametrize("torn", ['{"step":2,"attempt":1,"kind":"tr', "\0" * 70000])
def test_a_torn_tail_is_cut_and_the_restart_is_a_new_attempt(tmp_path, torn):
    track(tmp_path).finish(0)
    first = track(tmp_path)
    log_steps(first, range(1, 2))
    first.finish(0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    log_steps(track(tmp_path), range(2, 3))
    assert losses(tmp_path) == [(1, 1.01), (2, 2.02)], "an opening without rows is no attempt"
    assert raw_lines(tmp_path)


@pytest.mark.covers("S3.29")
def test_rows_beyond_a_resume_or_a_rollback_no_longer_count(tmp_path):
    log_steps(track(tmp_path), range(1, 7))
    second = track(tmp_path)
    log_steps(second, range(4, 6))
    assert losses(tmp_path) == [(1, 1.01), (2, 1.02), (3, 1.03), (4, 2.04), (5, 2.05)]
    second.rewind(3)
    assert [step for step, _ in losses(tmp_path)] == [1, 2, 3]
    second.log({"train/loss": 9.0}, 4)
    assert losses(tmp_path)[-1] == (4, 9.0)
    third = track(tmp_path)
    third.start(3)
    third.log({"val/loss": 7.0}, 3)
    rows = [(row["step"], row["kind"]) for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert rows == [(1, "train"), (2, "train"), (3, "train"), (3, "val")], "made up for"


@pytest.mark.covers("S0.3 S0.5 S0.10 S0.11 S2.4 S4.4 S4.14")
def test_any_key_passes_with_a_number_and_a_reducer_in_it_is_dropped(tmp_path):
    tracking = track(tmp_path)
    keys = ("train/reward_total_std", "rewards/Format/mean", "actor/kl_loss", "a@b")
    tracking.log({**dict.fromkeys(keys, 1.0), "tokens@sum": 2, "t@p99": 3.0, "@sum": 4.0}, 1)
    tracking.log({"eval/loss": 1.0}, 1)
    tracking.log({"system/gpu_util": 70.0}, 1, kind="system")
    system, train, val = read_metrics(tmp_path / "metrics.jsonl")
    assert train.keys() == {*keys, "tokens", "t", "@sum", "step", "attempt", "kind", "ts"}
    assert (system["kind"], val["kind"]) == ("system", "val")
    for value in (torch.tensor(1.0), np.ones(1), None, True):
        with pytest.raises(TypeError, match="'train/loss'"):
            tracking.log({"train/loss": value}, step=2)


def full_disk(descriptor, line):
    raise OSError(28, "No space left on device")


REAL_WRITE = os.write


@pytest.mark.parametrize(
    "failing", [full_disk, lambda descriptor, line: REAL_WRITE(descriptor, line[:20])]
)
def test_rows_wait_for_a_full_disk_and_are_counted_if_it_stays_full(
    tmp_path, monkeypatch, caplog, failing
):
    tracking = track(tmp_path)
    for step in range(1, 10):
        monkeypatch.setattr(json_lines.os, "write", failing if step in (2, 3, 6, 9) else REAL_WRITE)
        log_steps(tracking, range(step, step + 1))
        last_step = {2: 1, 3: 1, 6: 5, 9: 8}.get(step, step)
        assert [step for step, _ in losses(tmp_path)] == [*range(1, last_step + 1)]
    tracking.finish(0)
    assert caplog.text.count(f"cannot write {tmp_path}/metrics.jsonl") == 3, "once for each outage"
    assert "metrics.jsonl lacks 1 rows" in caplog.text


def test_flush_reaches_the_disk_without_waiting_for_it(tmp_path, monkeypatch):
    release = threading.Event()
    synced = threading.Semaphore(0)

    def slow_disk(descriptor):
        assert threading.current_thread() is not threading.main_thread(), "training waits for it"
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


def test_a_step_is_recorded_as_sent_only_one_interval_after_all_its_rows(
    tmp_path, monkeypatch, sent
):
    """A library writes later what it was handed, and a step has several rows."""
    monkeypatch.setattr(backend, "RECORD_INTERVAL_S", 0.0)
    tracking = track(tmp_path, "fake")
    for step in range(1, 9):
        tracking.log({"train/loss": 1.0}, step=step)
        tracking.log({"val/loss": 1.0}, step=step)
    tracking.finish(0)
    assert [step for step, _ in sent] == sorted([*range(1, 9), *range(1, 9)])
    assert all(recorded < step for step, recorded in sent)
    assert sent[-1][1] > 3 and run_file(tmp_path)["last_sent"] == {"fake": 8}


def test_a_row_whose_loss_is_not_finite_is_named_and_spoils_no_average(tmp_path):
    tracking = track(tmp_path)
    ids = range(6)
    for step, spoiled in ((1, 0.0), (2, math.nan), (3, 0.0)):
        sums = np.array([9.0, 5.0, 4.0, 3.0, 2.0, 1.0 + spoiled])
        tracking.log_rows(step, SampleLosses(ids, np.ones(6), sums), lambda row: f"line {row}")
    tracking.finish(0)
    rows, hardest = read_hard_rows(tmp_path / "row_losses.jsonl", limit=2)
    assert [(row.place, row.excess) for row in rows] == [("line 0", 5.0), ("line 1", 1.0)]
    assert [hardest[step][0][0] for step in (1, 2)] == ["line 0", "line 5"]


def test_trackers_that_record_at_the_same_time_keep_each_others_ids(tmp_path):
    file = RunFile(tmp_path / "run.json")
    names = {f"tracker{number}" for number in range(4)}
    threads = [threading.Thread(target=file.set_tracker, args=(name, "id", 1)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert run_file(tmp_path)["run_ids"].keys() == names


def test_a_row_that_a_failed_attempt_did_not_reach_is_sent_by_the_next(tmp_path, sent):
    """The first attempt fails in the validation of step 4, whose training row was sent."""
    first = track(tmp_path, "fake")
    log_steps(first, range(1, 5))
    first.finish(1)
    second = track(tmp_path, "fake")
    log_steps(second, range(3, 5))
    second.log({"val/loss": 1.0}, 4)
    log_steps(second, range(5, 6))
    second.finish(0)
    assert [step for step, _ in sent] == [1, 2, 3, 4, 4, 5]


@pytest.mark.parametrize("call", ["open", "log", "close"])
def test_a_backend_that_raises_is_dropped_with_one_warning(tmp_path, monkeypatch, caplog, call):
    """The warning promises neither rows on disk, which may be full too, nor training after the end
    of a run.
    """
    broken = install(monkeypatch, "broken", is_inline=True)
    getattr(broken, call).side_effect = RuntimeError("boom\nbecause")
    healthy = install(monkeypatch, "healthy")
    tracking = track(tmp_path, "broken", "healthy")
    log_steps(tracking, range(1, 6))
    tracking.finish(0)
    (text,) = caplog.messages
    assert text.startswith(f"tracker 'broken' dropped: {call}() raised RuntimeError: boom because")
    assert "metrics.jsonl does not depend on it" in text
    assert ("training continues" in text) is (call != "close")
    assert getattr(broken, call).call_count == 1
    assert healthy.log.call_count == 5 and healthy.close.call_count == 1
    assert len(losses(tmp_path)) == 5


@pytest.mark.parametrize("call", ["open", "log", "close"])
def test_backends_that_hang_delay_neither_steps_nor_the_end(tmp_path, monkeypatch, caplog, call):
    release = threading.Event()
    names = [f"hung{number}" for number in range(4)]
    for name in names:
        hung = install(monkeypatch, name, close_timeout_s=1.0)
        getattr(hung, call).side_effect = lambda *_: release.wait()
    tracking = track(tmp_path, *names)
    begin = time.monotonic()
    log_steps(tracking, range(1, 101))
    tracking.finish(0)
    assert time.monotonic() - begin < 3, "they are waited for together"
    threads = [one for one in threading.enumerate() if one.name.startswith("tracking-hung")]
    assert len(threads) == 4 and all(thread.daemon for thread in threads), "the process can end"
    release.set()
    assert len(caplog.records) == 4
    assert f"'hung0' dropped: {call}() did not finish within 1 s" in caplog.text
    assert len(losses(tmp_path)) == 100


def test_the_advice_names_the_packages_of_the_extra():
    """An unregistered name on a package index could belong to anyone."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for name in ("tensorboard", "mlflow", "trackio"):
        assert facade.BACKENDS[name].install == " ".join(f"'{text}'" for text in extras[name])
    assert facade.BACKENDS["wandb"].install.strip("'") in project["dependencies"]


def test_an_event_is_a_strict_line_and_an_error_is_an_alert(tmp_path, monkeypatch):
    fake = install(monkeypatch, "fake")
    tracking = track(tmp_path, "fake")
    log_steps(tracking, range(1, 2))
    tracking.event("spike", 1, "loss 9 times its level", level="warn", z=math.nan, ids=[1, 2])
    tracking.event("dead", 1, "no gradient", level="error")
    tracking.finish(76)
    lines = raw_lines(tmp_path, "events.jsonl")
    assert [line["kind"] for line in lines] == ["start", "spike", "dead", "end"]
    known = {"attempt": 1, "step": 1, "level": "warn", "message": "loss 9 times its level"}
    assert lines[1].items() >= (known | {"z": "nan"}).items() and lines[1]["ids"] == [1, 2]
    fake.alert.assert_called_once()
    assert fake.alert.call_args.args[0].message == "no gradient"


@pytest.mark.covers("S3.3 S3.7")
def test_verls_call_works_as_it_stands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = {"data": {"path": Path("a.parquet")}, "optim": SimpleNamespace(lr=1e-5)}
    tracking = Tracking(
        project_name="rlvr", experiment_name="phase1", default_backend=["console"], config=config
    )  # fmt: skip
    tracking.log({"train/loss": 0.5}, step=7)
    tracking.log(data={"val/loss": 0.6}, step=7)
    tracking.finish()
    run_dir = Path("checkpoints/rlvr/phase1")
    assert [row["step"] for row in read_metrics(run_dir / "metrics.jsonl")] == [7, 7]
    assert "step 7 | loss 0.5000" in capsys.readouterr().out
    written = run_file(run_dir)["config"]
    assert written["data"] == {"path": "a.parquet"} and "lr=1e-05" in written["optim"]


def test_a_directory_of_another_run_is_refused(tmp_path):
    log_steps(track(tmp_path / "run"), range(1, 3))
    with pytest.raises(ConfigError, match="holds the run 'experiment' of project 'project', not"):
        Tracking("project", "other", [], {}, run_dir=tmp_path / "run")
    holder = {"pid": os.getppid(), "host": socket.gethostname()}
    write_json(tmp_path / "run/.train.lock", holder)
    with pytest.raises(ConfigError, match=f"pid {os.getppid()} is training in"):
        track(tmp_path / "run")
    write_json(tmp_path / "run/.train.lock", holder | {"pid": os.getpid()})
    assert track(tmp_path / "run").attempt == 2, "the process itself"


def test_results_under_the_names_of_a_finished_run_take_nothing_back(tmp_path):
    tracking = track(tmp_path)
    log_steps(tracking, range(1, 20))
    tracking.log({"val/loss": 1.5}, 10)
    tracking.finish(0)
    later = track(tmp_path)
    later.log({"val/exec_success_rate": 0.61}, step=10)
    later.finish(0)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    (row,) = [row for row in rows if row["kind"] == "val"]
    assert len(rows) == 20 and (row["val/loss"], row["val/exec_success_rate"]) == (1.5, 0.61)
    assert track(tmp_path).past.last_step == 19


def test_the_duration_of_earlier_attempts_does_not_follow_the_wall_clock(tmp_path, monkeypatch):
    tracking = track(tmp_path)
    for step in (1, 2):
        tracking.log({"progress/elapsed_s": 10.0 * step}, step)
        monkeypatch.setattr("trainer.tracking.metrics_file.time.time", lambda: 0.0)  # back to 1970
    assert track(tmp_path).past.duration_s == 20.0
