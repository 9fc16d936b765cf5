"""Trackers over kills and rollbacks, read back with their own libraries: no step is lost, a kill
may repeat some.
"""

import importlib.util
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from queue import Queue
from types import ModuleType

import pytest
import wandb_files
from killed_run import STEPS, log_steps, train_row, val_row
from processes import run_python
from repository import REPOSITORY
from small_files import read_json
from sweeps import short_or_full
from tensorboard.summary.writer import event_file_writer

from trainer.errors import EXIT_DONE
from trainer.tracking import Tracking, read_metrics
from trainer.tracking.backend import Sink

"""{metric: its (step, value) in order}"""

KILLS = ((1, 6), (5, 9), (7, 11))
"""First and last step of the killed attempts. The last attempt continues from step 6."""
CONFIG = {"optim": {"lr": 1e-4}, "trainer": {"logger": ["wandb"]}}


@pytest.fixture(autouse=True)
def offline(tmp_path_factory, monkeypatch):
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()  # its settings are read once per process
    monkeypatch.setenv("WANDB_MODE", "offline")
    # files of one second are read in the order of their names, and ".10" comes before ".9"
    numbers = event_file_writer.AtomicCounter(0)
    monkeypatch.setattr(event_file_writer, "_global_uid", numbers)
    # read once, at its import
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path_factory.getbasetemp() / "trackio"))
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path_factory.mktemp(name)))
    for name in ("USE_WANDB", "WANDB_PROJECT", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


def run_file(run_dir):
    return read_json(run_dir / "run.json")


def add(series, step, row, *columns):
    for key in row.keys() - set(columns):
        series.setdefault(key, []).append((step, row[key]))


def tensorboard(run_dir):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    everything = {"scalars": 0}
    events = reader.EventAccumulator(str(run_dir / "tensorboard"), size_guidance=everything)
    tags = events.Reload().Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def mlflow_run(run_dir):
    library = pytest.importorskip("mlflow.tracking")
    client = library.MlflowClient(f"sqlite:///{run_dir}/mlflow/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    return client, run


def mlflow(run_dir):
    client, run = mlflow_run(run_dir)
    series = {}
    for name in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, name)
        key = {"train/lr_1e-3": "train/lr(1e-3)"}.get(name, name)
        series[key] = [(metric.step, metric.value) for metric in history]
    return series


def wandb(run_dir):
    """Checks that all files are of one run, and that its own steps rise from file to file."""
    names = {path.name for path in wandb_files.files_of(run_dir)}
    assert names == {f"run-{run_file(run_dir)['run_ids']['wandb']}.wandb"}
    rows = wandb_files.history(run_dir)
    own_steps = [row["_step"] for row in rows]
    assert own_steps == sorted(set(own_steps)), "wandb drops a row whose own step is not higher"
    series = {}
    for row in rows:
        add(series, row["trainer/step"], row, "trainer/step", "_step", "_runtime", "_timestamp")
    return series


def trackio(run_dir):
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    series = {}
    for row in storage.get_logs("project", run_id=run_file(run_dir)["run_ids"]["trackio"]):
        add(series, row["step"], row, "step", "timestamp")
    return series


def forget_trackio_runs():
    """Remove the project's runs from the database, as on a new machine."""
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    for run in storage.get_run_records("project"):
        storage.delete_run("project", run["name"], run["id"])


READERS = {
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


def truth():
    series = {}
    for step in range(1, STEPS + 1):
        add(series, step, train_row(step) | (val_row(step) if step % 2 == 0 else {}))
    return series


def assert_same(found, expected):
    """Steps exactly, values to the precision of TensorBoard's float32."""
    assert found.keys() == expected.keys()
    for key, points in expected.items():
        assert [step for step, _ in found[key]] == [step for step, _ in points], key
        values = [value for _, value in points]
        assert [value for _, value in found[key]] == pytest.approx(values, rel=1e-6), key


def run_piece(run_dir, backend, first_step, kill_step):
    program = Path(__file__).with_name("killed_run.py")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    words = [sys.executable, str(program), str(run_dir), backend, str(first_step), str(kill_step)]
    # without pipes, which what the killed run has started would keep open
    return subprocess.run(words, env=environment, timeout=120).returncode


def track(run_dir, *backends):
    if (run_dir / "wandb").exists():
        time.sleep(1.0)  # wandb names its offline directories by the second
    return Tracking("project", "killed", backends, CONFIG, run_dir=run_dir, total_steps=STEPS)


def attempt(run_dir, backend, steps, code=0):
    tracking = track(run_dir, backend)
    log_steps(tracking, steps)
    tracking.finish(code)


@by_tracker
@pytest.mark.covers("S0.1 S1.5 S3.1 S3.2 S3.29 S3.58")
def test_kills_leave_one_continuous_run(tmp_path, backend):
    for first_step, kill_step in short_or_full(((1, 9),), full=KILLS):
        assert run_piece(tmp_path, backend, first_step, kill_step) == -signal.SIGKILL
        if backend == "mlflow":
            assert mlflow_run(tmp_path)[1].info.status == "RUNNING"
        if backend == "wandb":
            assert not wandb_files.records(tmp_path, "exit")
            time.sleep(1.0)
    assert run_piece(tmp_path, backend, 7, -1) == EXIT_DONE
    found = READERS[backend](tmp_path)
    if backend != "tensorboard":
        found = {key: sorted(set(points)) for key, points in found.items()}
    assert_same(found, truth())
    if backend == "mlflow":
        assert mlflow_run(tmp_path)[1].info.status == "FINISHED"
    if backend == "wandb":
        assert [record.exit_code for record in wandb_files.records(tmp_path, "exit")] == [EXIT_DONE]


@by_tracker
def test_after_a_rollback_and_a_kill_no_step_is_lost(tmp_path, backend):
    """Trackers that cannot remove points show both versions of steps 5 to 8. All trackers continue
    to the end.
    """
    rolled = track(tmp_path, backend)
    log_steps(rolled, range(1, 5))
    log_steps(rolled, range(5, 9), shift=1.0)
    rolled.rewind(4)
    log_steps(rolled, range(5, 7))
    rolled.finish(75)
    attempt(tmp_path, backend, range(6, STEPS + 1))
    found = READERS[backend](tmp_path)
    expected = truth()
    if backend != "tensorboard":
        spoiled = [(step, value + 1.0) for step, value in expected["train/loss"] if 5 <= step <= 8]
        assert sorted(found["train/loss"]) == sorted(expected["train/loss"] + spoiled)
        found = {"train/loss": [point for point in found["train/loss"] if point not in spoiled]}
        expected = {"train/loss": expected["train/loss"]}
    assert_same(found, expected)


@by_tracker
def test_a_run_restored_without_a_trackers_files_sends_every_step_again(tmp_path, backend, caplog):
    """A mirror restores `run.json` and `metrics.jsonl`, but no file of a tracker."""
    attempt(tmp_path / "run", backend, range(1, 7), code=75)
    run_dir = tmp_path / "restored"
    run_dir.mkdir()
    for name in ("run.json", "metrics.jsonl"):
        shutil.copy(tmp_path / "run" / name, run_dir)
    if backend == "trackio":
        forget_trackio_runs()
    attempt(run_dir, backend, range(5, STEPS + 1))
    assert_same(READERS[backend](run_dir), truth())
    if backend in ("wandb", "trackio"):
        ids = [run_file(path)["run_ids"][backend] for path in (tmp_path / "run", run_dir)]
        assert ids[0] == ids[1]
        assert "this attempt resends every earlier step" in caplog.text


@pytest.mark.covers("S1.9 S3.14")
def test_wandb_takes_its_names_from_the_environment_and_shows_errors(tmp_path, monkeypatch):
    names = {"PROJECT": "train and eval", "NAME": "shown", "RUN_GROUP": "together"}
    for name, value in names.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("USE_WANDB", "true")
    tracking = track(tmp_path / "on")
    log_steps(tracking, range(1, 3))
    tracking.event("dead", 2, "no gradient for 10 steps", level="error")
    tracking.finish(0)
    (run,) = wandb_files.records(tmp_path / "on", "run")
    assert (run.project, run.display_name, run.run_group) == tuple(names.values())
    (alert,) = wandb_files.records(tmp_path / "on", "alert")
    assert alert.text == "no gradient for 10 steps"
    monkeypatch.setenv("USE_WANDB", "False")
    track(tmp_path / "off", "wandb").start(0)
    assert not (tmp_path / "off" / "wandb").exists()


def test_wandb_without_key_is_dropped_and_never_asks(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    attempt(tmp_path, "wandb", range(1, 3))
    sys.modules["wandb"].teardown()
    assert "'wandb' dropped" in caplog.text and "WANDB_MODE=offline" in caplog.text
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3


def test_a_disabled_wandb_is_not_reported_as_empty_at_a_resume(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    caplog.set_level(logging.INFO, "trainer.tracking")
    for steps in (range(1, 3), range(3, 5)):
        attempt(tmp_path, "wandb", steps, code=75)
    assert [found for found in caplog.records if found.levelno > logging.INFO] == []
    assert "wandb disabled" in caplog.text and "None" not in caplog.text


@pytest.mark.covers("S1.5 S1.45")
def test_the_start_names_the_places_of_the_logs_once(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "trainer.tracking.facade")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@host.invalid/mlflow")
    monkeypatch.setattr(Sink, "open", lambda sink: None)
    track(tmp_path, "tensorboard", "mlflow", "wandb").start(0)
    (text,) = [message for message in caplog.messages if message.startswith("logs ")]
    places = (f"{tmp_path}: metrics.jsonl", f"--logdir={tmp_path}/tensorboard", "wandb sync")
    assert all(place in text for place in places)
    assert "http://host.invalid/mlflow" in text and "secret" not in text


def test_the_console_shows_few_steps_every_skipped_one_and_every_validation(tmp_path, capsys):
    tracking = Tracking(
        "own", "few", "console", CONFIG, run_dir=tmp_path, total_steps=12, log_every=5
    )
    for step in range(2, 13):
        tracking.log({"train/loss": 2.0, "optim/skipped_steps": float(step >= 7)}, step)
    tracking.log({"val/loss": 1.0}, step=11)
    tracking.finish(0)
    lines = [line.split(" ")[2] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["2/12", "5/12", "7/12", "10/12", "12/12", "11/12"]


MLFLOW_RUN = """
import sys
from trainer.tracking import Tracking

tracking = Tracking("project", "exp", "mlflow", {}, run_dir=sys.argv[1])
tracking.log({"train/loss": 1.0}, step=1)
tracking.finish(76)
from mlflow.telemetry import get_telemetry_client
from mlflow.telemetry.utils import is_telemetry_disabled

assert is_telemetry_disabled() and get_telemetry_client() is None
"""


def test_mlflow_reports_nothing_about_its_users(tmp_path):
    """The environment lacks the variables by which MLflow recognises tests and CI, where it never
    sends usage data.
    """
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    run_python("-c", MLFLOW_RUN, str(tmp_path / "run"), env=environment, check=True)
    assert mlflow_run(tmp_path / "run")[1].info.status == "FAILED"


def test_the_hub_reports_nothing_about_users_of_trackio(tmp_path, monkeypatch):
    """This holds even if the Hub's library was imported before, as by transformers, because it
    reads the environment only then.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import _telemetry, send_telemetry

    class Run:
        id = "1"

        def __init__(self, **settings):
            send_telemetry("trackio")

        def log(self, data, *, step):
            send_telemetry("trackio/log")

        def finish(self): ...

    library = ModuleType("trackio")
    library.Run = Run
    monkeypatch.setitem(sys.modules, "trackio", library)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    reports = Queue()
    monkeypatch.setattr(_telemetry, "_TELEMETRY_QUEUE", reports)
    monkeypatch.setattr(_telemetry, "_start_telemetry_thread", lambda: None)
    attempt(tmp_path, "trackio", range(1, 3))
    assert run_file(tmp_path)["last_sent"] == {"trackio": 2} and reports.empty()
