"""The backends, read back with the readers their users have, over a restart of the run."""

import io
import json
import logging
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from queue import Queue
from types import ModuleType
from typing import Any

import pytest
import wandb_files

from trainer.tracking import Tracking, read_metrics
from trainer.tracking.mlflow_backend import MetricNames

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = {"optim": {"lr": 1e-4}, "trainer": {"logger": ["wandb"]}}


def attempt(run_dir: Path, backend: str, *, steps: range, exit_code: int = 0) -> Tracking:
    """Log `steps`, validating every second one, as one attempt of a run; `finish` at its end."""
    tracking = Tracking("project", "exp", backend, CONFIG, run_dir=run_dir, total_steps=8)
    for step in steps:
        tracking.log(
            {"train/loss": tracking.attempt + step / 100, "train/lr(1e-3)": 0.125}, step=step
        )
        if step % 2 == 0:
            tracking.log({"val/loss": float(step)}, step=step)
    tracking.finish(exit_code)
    return tracking


def test_tensorboard_has_each_step_once_after_a_resume(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    layout_pb2 = pytest.importorskip("tensorboard.plugins.custom_scalar.layout_pb2")
    attempt(tmp_path, "tensorboard", steps=range(1, 7), exit_code=1)
    attempt(tmp_path, "tensorboard", steps=range(5, 9))
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = [(event.step, round(event.value, 4)) for event in events.Scalars("train/loss")]
    assert losses == [
        (1, 1.01),
        (2, 1.02),
        (3, 1.03),
        (4, 1.04),
        (5, 2.05),
        (6, 2.06),
        (7, 2.07),
        (8, 2.08),
    ]
    assert [event.step for event in events.Scalars("val/loss")] == [2, 4, 6, 8]
    assert {"train/lr(1e-3)"} <= set(events.Tags()["scalars"])
    content = events.SummaryMetadata("custom_scalars__config__").plugin_data.content
    layout = layout_pb2.Layout.FromString(
        events.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0]
    )
    assert content == b"" and len(layout.category) > 3
    charts = {
        chart.title: list(chart.multiline.tag)
        for category in layout.category
        for chart in category.chart
    }
    assert [bool(re.match(tag, "train/lr(1e-3)")) for tag in charts["lr(1e-3)"]] == [True]
    for key in ("train/loss", "val/loss"):
        assert [tag for tag in charts["loss"] if re.match(tag, key)] == [f"^{key}$"]


def test_tensorboard_from_scratch_again_purges_all(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    for _ in range(2):
        attempt(tmp_path, "tensorboard", steps=range(3))
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [0, 1, 2]


@pytest.mark.parametrize(("exit_code", "status"), [(0, "FINISHED"), (76, "FAILED")])
def test_mlflow_continues_one_run_and_sets_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exit_code: int, status: str
) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    pytest.importorskip("sqlalchemy")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    client = tracking.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    first = attempt(tmp_path, "mlflow", steps=range(1, 5), exit_code=75)
    run_id = first.state_dict()["run_ids"]["mlflow"]
    assert client.get_run(run_id).info.status == "KILLED"
    second = attempt(tmp_path, "mlflow", steps=range(5, 9), exit_code=exit_code)
    assert second.state_dict()["run_ids"]["mlflow"] == run_id

    experiment = client.get_experiment_by_name("project")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_id, run.info.run_name, run.info.status) == (run_id, "exp", status)
    assert run.data.params["optim.lr"] == "0.0001"
    history = client.get_metric_history(run_id, "train/lr_1e-3")
    assert [(metric.step, metric.value) for metric in history] == [
        (step, 0.125) for step in range(1, 9)
    ]
    assert run.data.tags["metric_name/train/lr_1e-3"] == "train/lr(1e-3)"


def test_mlflow_names_are_unique_stable_and_reversible() -> None:
    names = MetricNames({})
    converted = [names.convert(name) for name in ("train/loss", "a(b)", "a_b", "a[b]", "a(b)")]
    assert converted == [
        ("train/loss", False),
        ("a_b", True),
        ("a_b_", True),
        ("a_b__", True),
        ("a_b", False),
    ]
    restored = MetricNames(
        {"metric_name/a_b": "a(b)", "metric_name/a_b_": "a_b", "mlflow.user": "x"}
    )
    assert restored.convert("a_b") == ("a_b_", False)
    assert restored.convert("a(b)") == ("a_b", False)


@pytest.fixture
def wandb_offline(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb").teardown()  # its settings are read once per process
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path_factory.mktemp(name)))


def test_wandb_offline_continues_one_run(
    tmp_path: Path,
    wandb_offline: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_NAME", "shown")
    monkeypatch.setenv("WANDB_RUN_GROUP", "together")
    first = attempt(tmp_path, "wandb", steps=range(1, 5), exit_code=75)
    time.sleep(1.1)  # wandb names its offline directories by the second
    second = attempt(tmp_path, "wandb", steps=range(5, 9))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    run_id = first.state_dict()["run_ids"]["wandb"]
    assert second.state_dict()["run_ids"] == {"wandb": run_id}
    assert json.loads((tmp_path / "run.json").read_text()) == {
        "project_name": "project", "experiment_name": "exp", "group": "together", "total_steps": 8, "config": CONFIG,
        "run_ids": {"wandb": run_id}, "last_sent": {"wandb": 8},
    }  # fmt: skip

    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{run_id}.wandb"] * 2
    steps, exit_codes, metrics = [], [], set()
    for record in (record for file in files for record in wandb_files.records(file)):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            assert (record.run.run_id, record.run.project) == (run_id, "project")
            assert (record.run.display_name, record.run.run_group) == ("shown", "together")
        elif kind == "history":
            items = {
                item.key or item.nested_key[0]: json.loads(item.value_json)
                for item in record.history.item
            }
            steps += [items["trainer/step"]] if "train/loss" in items else []
        elif kind == "exit":
            exit_codes.append(record.exit.exit_code)
        elif kind == "metric":
            metrics.add((record.metric.glob_name, record.metric.step_metric))
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8]
    assert exit_codes == [75, 0]
    assert ("*", "trainer/step") in metrics

    evaluation = Tracking(
        "project",
        "exp_arithmetic",
        "wandb",
        {"evaluation": "arithmetic", "of": "exp"},
        run_dir=tmp_path / "evaluation",
    )
    evaluation.log({"eval/arithmetic": 1.0}, step=8)
    evaluation.finish()
    (file,) = (tmp_path / "evaluation" / "wandb").glob("offline-run-*/*.wandb")
    (run,) = (
        record.run
        for record in wandb_files.records(file)
        if record.WhichOneof("record_type") == "run"
    )
    assert (run.display_name, run.run_group) == ("exp_arithmetic", "together"), (
        "the name is that of the training alone"
    )


def test_wandb_without_key_is_dropped_and_never_asks(
    tmp_path: Path,
    wandb_offline: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    attempt(tmp_path, "wandb", steps=range(1, 3))
    wandb.teardown()
    (warning,) = (
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    )
    assert "'wandb' dropped" in warning and "WANDB_MODE=offline" in warning
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3


def test_console_prints_one_plain_line_per_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracking = Tracking("project", "exp", "console", CONFIG, run_dir=tmp_path, total_steps=200)
    train = {
        "train/loss": 2.341,
        "train/lr(1e-3)": 0.12,
        "train/grad_norm": 1.02,
        "throughput/train/tokens_per_s": 3900.4,
        "train/time(s)": 0.84,
        "progress/eta_s": 158.2,
        "memory/cpu/rss_gib": 3.0,
    }
    tracking.log(train, step=12)
    tracking.log(
        {"val/loss": 1.2345, "val/loss_stderr": 0.01, "val/tokens": 12345, "val/samples": 1200},
        step=12,
    )
    tracking.log({"memory/cpu/rss_gib": 3.0}, step=12)
    tracking.log({"train/loss": float("nan"), "optim/skipped_steps": 1}, step=13)
    tracking.finish(0)
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0]
        == "step 12/200 | loss 2.3410 | lr 1.20e-04 | grad_norm 1.02 | 3,900 tok/s | 0.84 s | eta "
        "0:02:38"
    )
    assert lines[1] == "step 12/200 | val/loss 1.2345 ± 0.0100 | 1,200 samples"
    assert lines[2] == "step 13/200 | loss nan | skipped 1"
    assert len(lines) == 3


def test_console_shows_a_bar_over_the_whole_run_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    tracking = Tracking("project", "exp", "console", CONFIG, run_dir=tmp_path, total_steps=200)
    tracking.log({"train/loss": 2.5, "train/time(s)": 1.0, "progress/eta_s": 99.0}, step=101)
    tracking.log({"val/loss": 1.25}, step=101)
    tracking.finish(0)
    shown = terminal.getvalue()
    assert (
        "100/200" in shown and "101/200" in shown and "loss 2.5000 | 1.00 s | eta 0:01:39" in shown
    )
    assert "step 101/200 | val/loss 1.2500" in shown
    assert sys.stdout is terminal


def test_trackio_has_name_group_configuration_tables_and_alerts_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path_factory.getbasetemp() / "trackio"))
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    tracking = Tracking("own", "exp-eval", "trackio", CONFIG, run_dir=tmp_path, group="exp")
    tracking.log({"train/loss": float("nan"), "train/lr(1e-3)": 0.125}, step=1)
    tracking.table("samples", 1, [{"prompt": "2+2?", "score": 1.0}])
    tracking.event("severe", 1, "the loss is NaN", "error")
    tracking.finish(0)
    (run,) = storage.get_run_records("own")
    assert (run["name"], run["id"]) == ("exp-eval", tracking.state_dict()["run_ids"]["trackio"])
    config = storage.get_run_config("own", run_id=run["id"])
    assert (config["_Group"], config["optim"]) == ("exp", {"lr": 1e-4})
    first, second = storage.get_logs("own", run_id=run["id"])
    assert math.isnan(first["train/loss"]) and first["train/lr(1e-3)"] == 0.125
    assert second["samples"]["_value"] == [{"prompt": "2+2?", "score": 1.0}]
    assert [(alert["title"], alert["level"]) for alert in storage.get_alerts("own")] == [
        ("severe", "error")
    ]


MLFLOW_RUN = """
import sys
from trainer.tracking import Tracking

tracking = Tracking("project", "exp", "mlflow", {}, run_dir=sys.argv[1])
tracking.log({"train/loss": 1.0}, step=1)
tracking.finish(0)
from mlflow.telemetry import get_telemetry_client
from mlflow.telemetry.utils import is_telemetry_disabled

assert is_telemetry_disabled() and get_telemetry_client() is None
"""


def test_mlflow_reports_nothing_about_its_users(tmp_path: Path) -> None:
    """In an environment without the variables by which MLflow recognises tests and CI, where it
    reports nothing.
    """
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    program = [sys.executable, "-c", MLFLOW_RUN, str(tmp_path / "run")]
    subprocess.run(program, env=environment, check=True, timeout=120)
    assert (tmp_path / "run" / "mlflow" / "mlflow.db").exists()


def test_the_hub_reports_nothing_about_users_of_trackio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the Hub's library was imported before, as by transformers: it reads the
    environment only then.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import _telemetry, send_telemetry

    class Run:
        id = "1"

        def __init__(self, **settings: Any) -> None:
            send_telemetry("trackio")

        def log(self, data: dict[str, float], *, step: int) -> None:
            send_telemetry("trackio/log")

        def finish(self) -> None: ...

    library = ModuleType("trackio")
    library.Run = Run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", library)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    reports: Queue[Any] = Queue()
    monkeypatch.setattr(_telemetry, "_TELEMETRY_QUEUE", reports)
    monkeypatch.setattr(_telemetry, "_start_telemetry_thread", lambda: None)
    send_telemetry("control")
    attempt(tmp_path, "trackio", steps=range(1, 3))
    assert json.loads((tmp_path / "run.json").read_text())["last_sent"] == {"trackio": 2}
    assert [reports.get()["topic"] for _ in range(reports.qsize())] == ["control"]
