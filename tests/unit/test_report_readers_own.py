"""Our run directory as the report reads it: restarts, rollbacks, events, checkpoints, proofs."""

from dataclasses import asdict

import pytest
from checkpoint_fakes import save, write_unfinished
from log_formats import write_own
from report_curves import sft_run
from small_files import write_json, write_lines

from trainer.runtime.progress import Rollback
from trainer.tools.report.analyse import analyse
from trainer.tools.report.page import as_page
from trainer.tools.report.readers import read_run
from trainer.tools.report.run_log import LogEvent
from trainer.tools.report.sections import sections
from trainer.tracking import Tracking, row_losses


def row(step, attempt=1, kind="train", **metrics):
    return {"step": step, "attempt": attempt, "kind": kind, "ts": 1000.0 + step, **metrics}


def train_rows(steps, attempt, value):
    return [row(step, attempt, **{"train/loss": value}) for step in steps]


@pytest.fixture
def run_dir(tmp_path):
    """The directory of a run with three steps."""
    write_lines(tmp_path / "metrics.jsonl", train_rows(range(1, 4), 1, 1.0))
    return tmp_path


@pytest.mark.parametrize(
    ("rows", "losses", "num_attempts", "num_lost_steps"),
    [
        pytest.param(
            [
                row(0, kind="start"),
                *train_rows(range(1, 11), 1, 1.0),
                row(10, kind="val", **{"val/loss": 3.0}),
                row(6, 2, "start"),
                *train_rows(range(7, 9), 2, 2.0),
            ],
            [1, 1, 1, 1, 1, 1, 2, 2],
            2,
            4,
            id="a start takes back steps that were not trained again yet",
        ),
        pytest.param(
            [
                row(0, kind="start"),
                *train_rows(range(1, 9), 1, 1.0),
                row(4, kind="rollback"),
                *train_rows(range(5, 7), 1, 2.0),
                row(3, kind="rollback"),
                *train_rows(range(4, 6), 1, 3.0),
            ],
            [1, 1, 1, 3, 3],
            1,
            4 + 3,
            id="rollbacks inside an attempt count the steps lost and no attempt",
        ),
    ],
)
def test_a_marker_takes_back_later_rows(tmp_path, rows, losses, num_attempts, num_lost_steps):
    log = read_run(write_lines(tmp_path / "metrics.jsonl", rows))
    assert log.series["train/loss"].by_step() == dict(enumerate(losses, 1))
    assert "val/loss" not in log.series
    assert (log.num_attempts, log.num_lost_steps) == (num_attempts, num_lost_steps)
    assert log.num_rows == sum(one["kind"] in ("train", "val") for one in rows)


def test_events_and_the_exit_code_of_the_last_attempt(run_dir):
    start = {"step": 0, "kind": "start", "level": "info", "message": "begins"}
    end = {"step": 3, "kind": "end", "level": "error", "message": "crashed", "exit_code": 1}
    write_lines(run_dir / "events.jsonl", [start, end])
    config = {"optim": {"lr": 1e-4}, "trainer": {"logger": ["csv"]}}
    write_lines(run_dir / "run.json", [{"total_steps": 9, "config": config}])
    log = read_run(run_dir)
    assert log.events == (LogEvent(0, "start", "begins"), LogEvent(3, "end", "crashed", "error"))
    assert (log.exit_code, log.total_steps) == (1, 9)
    assert log.config == {"optim.lr": 1e-4, "trainer.logger": ["csv"]}
    write_lines(run_dir / "events.jsonl", [start, end, start])
    assert read_run(run_dir).exit_code is None, "it runs again"


def test_the_configuration_is_known_whichever_file_of_a_run_is_read(run_dir):
    """Without `model.random_weights`, the report warns of a usual loss."""
    config = {"model": {"random_weights": True}}
    write_lines(run_dir / "run.json", [{"config": config}])
    (run_dir / "training_history.csv").write_text("epoch,loss\n1,5.84\n")
    for name in ("metrics.jsonl", "training_history.csv"):
        assert read_run(run_dir / name).config == {"model.random_weights": True}, name


def test_checkpoints_are_judged_by_names_and_sizes(run_dir):
    save(run_dir, 10, 20, 30, 40)
    (run_dir / "global_step_20" / "huggingface" / "config.json").unlink()
    (run_dir / "global_step_30" / "data.pt").write_bytes(b"123")
    (run_dir / "global_step_40" / "manifest.json").write_text("{")
    write_unfinished(run_dir, 50)
    log = read_run(run_dir)
    whole, *damaged = log.checkpoints
    assert not whole.faults and whole.size_bytes > 100
    causes = ("huggingface/config.json", "data.pt has 3 bytes", "manifest.json", "no manifest")
    assert [state.step for state in damaged] == [20, 30, 40, 50]
    for state, cause in zip(damaged, causes, strict=True):
        assert len(state.faults) == 1 and cause in state.faults[0]
    remedies = {one.id: one.remedy for one in analyse(log).findings if one.rule == "ckpt_complete"}
    assert "Resuming does not need it" in remedies["ckpt_complete:step-20"]
    assert "Resume from an older one" in remedies["ckpt_complete:step-30"]


def test_directories_that_only_resemble_checkpoints_are_none(run_dir):
    save(run_dir, 10)
    for name in ("global_step_012", "global_step_", "global_step_7x", f"global_step_{2**70}"):
        (run_dir / name).mkdir()
        (run_dir / name / "file").touch()
    assert [state.step for state in read_run(run_dir).checkpoints] == [10]


def test_proofs_of_served_losses_are_shown_and_a_refused_one_fails_with_its_cause(tmp_path):
    proof = {"step": 50, "engine": "vllm 1", "val_loss": 1.5, "served_loss": 1.5001}
    equal = proof | {"tolerance": 0.001, "is_equal": True, "causes": []}
    refused = {"step": 100, "served_loss": None, "is_equal": False, "causes": ["rope_theta"]}
    write_own(tmp_path, sft_run(1).series)
    (tmp_path / "proofs").mkdir()
    for number, content in enumerate([equal, equal | refused, {"step": 7}, [1]]):
        write_json(tmp_path / "proofs" / f"step_{number}_vllm.json", content)
    (tmp_path / "proofs" / "step_9_torn.json").write_text('{"step": 9, "is_eq')
    log = read_run(tmp_path)
    report = analyse(log)
    (finding,) = (finding for finding in report.findings if finding.rule == "serving")
    assert report.verdict == "FAIL" and report.top[0] == finding and finding.id == "serving:100"
    assert "step 100" in finding.title and "rope_theta" in finding.title
    (section,) = (one for one in sections(report, log) if one.title == "Served loss")
    assert [list(one)[:4] for one in section.rows] == [
        [50, "vllm 1", True, []],
        [100, "vllm 1", False, ["rope_theta"]],
    ]


def test_results_of_checkpoints_that_a_rollback_discarded_do_not_count(tmp_path):
    """A step that was saved again has a different nonce. Rotation removed step 5, whose results
    still count.
    """
    write_lines(tmp_path / "metrics.jsonl", train_rows(range(1, 41), 1, 1.0))
    save(tmp_path, 10, 20, 30)
    entry = Rollback(36, 40, 20, 28, 48, "a rule", discarded=["old30", "old40"])
    write_json(tmp_path / "rollbacks.json", {"rollbacks": [asdict(entry)]})
    nonces = {5: "rotated", 10: "a1b10", 20: "restarted", 30: "old30", 40: "old40", 50: ""}
    summary = {"kind": "summary", "name": "eval/x"}
    results = [summary | {"step": at, "nonce": nonces[at], "mean": at / 100} for at in nonces]
    others = [summary | {"name": "eval/lost", "step": 30, "nonce": "old30", "mean": 1}]
    write_lines(tmp_path / "evaluations.jsonl", results + others)
    (tmp_path / "proofs").mkdir()
    proof = {"engine": "vllm", "val_loss": 1, "served_loss": 2, "tolerance": 0, "is_equal": False}
    for at, nonce in nonces.items():
        known = {"nonce": nonce} if nonce else {}
        content = proof | {"step": at, "causes": ["lost"]} | known
        write_json(tmp_path / "proofs" / f"step_{at}_vllm.json", content)
    log = read_run(tmp_path)
    assert {name: [*rows] for name, rows in log.evaluations.items()} == {"eval/x": [5, 10, 50]}
    assert [one.step for one in log.proofs] == [5, 10, 50]
    told = analyse(log).generalisation
    assert told and told.recommended_step == 10


def test_losses_of_samples_that_take_too_long_to_read_are_named_and_hide_nothing(
    run_dir, monkeypatch
):
    monkeypatch.setattr(row_losses, "MAX_BYTES", 10)
    write_lines(run_dir / "row_losses.jsonl", [{"step": 1, "kind": "start"}])
    summary = {"kind": "summary", "name": "eval/x", "step": 3, "mean": 0.5}
    write_lines(run_dir / "evaluations.jsonl", [summary])
    log = read_run(run_dir)
    assert log.notes == (f"{run_dir}/row_losses.jsonl cannot be read: it is longer than 10 B",)
    assert log.evaluations.keys() == {"eval/x"}


def test_a_run_without_a_recorded_configuration_is_read(run_dir):
    """Code of one's own may call `Tracking` without one."""
    (run_dir / "run.json").write_text('{"config": null, "environment": null}')
    assert read_run(run_dir).config == {}


def test_machine_versions_and_a_sample_are_on_the_page(tmp_path):
    tracking = Tracking("project", "exp", [], {}, run_dir=tmp_path, total_steps=8)
    sample = "<|im_start|>user\n<b>hi</b>\n[[  hello]]"
    tracking.describe({"environment": {"ranks": "8 on H100", "torch": "2.13.0"}, "sample": sample})
    tracking.log({"train/loss": 1.0}, step=1)
    tracking.finish(0)
    log = read_run(tmp_path)
    page = as_page([(analyse(log), log)])
    assert "8 on H100" in page and "2.13.0" in page
    assert "&lt;b&gt;hi&lt;/b&gt;\n[[  hello]]" in page
