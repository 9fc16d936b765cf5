"""Steps of a run trained again without some rows: equal with them, different without, and the run untouched."""

import json
import re
import shutil
from pathlib import Path

import pytest
import whole_runs
from whole_runs import tiny_model

from trainer.checkpoint import retention
from trainer.cli.replay import main
from trainer.data_tools.ledger import ledger, read_history
from trainer.resume_proof.bit_equality import compare_steps
from trainer.resume_proof.counterfactual import verdict
from trainer.resume_proof.killed_runs import KilledRun
from trainer.tracking.metrics_file import read_metrics

trained: list[list[str]] = []
"""The words of the runs that `forked_ranks` started."""
STEPS = ("trainer.total_training_steps=6", "trainer.save_freq=2", "trainer.test_freq=2")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of six steps on two ranks, with dropout; its name is one that a shell would take apart."""
    root = tmp_path_factory.mktemp("replay")
    words = (*tiny_model(root), *STEPS, f"trainer.default_local_dir='{root}/a run'")
    config = json.loads((root / "model" / "config.json").read_text())
    (root / "model" / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    code, output = whole_runs.run(2, *words, log=root / "log")
    assert code == 0, output
    return root / "a run"


@pytest.fixture(autouse=True)
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the launcher, which `verify-resume` is tested with."""

    def train(run: KilledRun) -> None:
        num_ranks, *words = run.words
        trained.append(words)
        code, output = whole_runs.run(int(num_ranks), *words, log=run.log)
        assert code in run.good_codes, output

    monkeypatch.setattr(KilledRun, "train", train)


@pytest.fixture(scope="module")
def rows(run_dir: Path) -> dict[int, list[str]]:
    """Those of each step."""
    (source,) = ledger(run_dir, has_rows=True)["sources"]
    schedule = read_history(run_dir).ranges[0].schedule
    places = list(source["by_row"])
    return {step: [places[row] for row in schedule.rows(step)] for step in range(1, 7)}


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def losses(directory: Path) -> dict[int, float]:
    return {row["step"]: row["train/loss"] for row in read_metrics(directory / "metrics.jsonl") if "train/loss" in row}


def test_steps_with_their_rows_are_those_of_the_run_and_without_one_they_differ_from_its_step_on(
    run_dir: Path, rows: dict[int, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert {len(of_step) for of_step in rows.values()} == {4}, "a batch"
    before, row = contents(run_dir), rows[4][1]
    code = main([str(run_dir), "--from", "2", "--steps", "2", "--without", row, "--keep"])
    assert contents(run_dir) == before
    output = capsys.readouterr().out
    assert code == 0 and "those of the run, bit for bit (rows and " in output, output
    (work,) = run_dir.parent.glob("a run.replay-*")
    ran, without = losses(work / "with"), losses(work / "without")
    assert ran == {step: losses(run_dir)[step] for step in (3, 4)} and list(without) == [3, 4]
    assert ran[3] == without[3] and ran[4] != without[4], "dropout and packing are as they were"
    step_3, step_4, parameters = (line for line in output.splitlines() if line.startswith(("step ", "parameters ")))
    assert step_3 == f"step 3: train/loss {ran[3]:.6g} -> {ran[3]:.6g} (+0), " + step_3.partition("), ")[2]
    assert f"({without[4] - ran[4]:+.2g})" in step_4 and "val/loss" in step_4 and step_4.endswith(f"left out: {row}")
    assert re.fullmatch(
        r"parameters after step 4: 0\.\d+ apart, \d+\.\d% of how far the steps moved them .*", parameters
    )
    (again,) = [words for words in trained if f"'{work}/without'" in " ".join(words)]
    code, output = whole_runs.run(2, *again, log=run_dir.parent / "again.log")
    assert code == 75 and list(losses(work / "without")) == [3, 4], "it has come to where it was to stop"
    shutil.rmtree(work)


def test_without_a_whole_checkpoint_before_it_begins_where_the_run_began(
    run_dir: Path, rows: dict[int, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run_dir, thin := tmp_path / "thin")
    retention.thin(thin, keep_full=1)
    code = main([str(thin), "--from", "3", "--steps", "1", "--without", rows[4][1], "--keep"])
    output = capsys.readouterr().out
    assert code == 0 and "steps 1 to 4" in output and "from the weights that the run began with" in output, output
    (work,) = tmp_path.glob("thin.replay-*")
    ran, without = losses(work / "with"), losses(work / "without")
    assert ran == {step: losses(run_dir)[step] for step in (1, 2, 3, 4)}
    assert {step for step, loss in without.items() if loss != ran[step]} == {4}
    assert re.search(r"bit for bit \(rows and \d+ tensors\)", output), (
        "what is left of the run's checkpoint is compared"
    )


def test_what_cannot_be_trained_again_is_refused(
    run_dir: Path, rows: dict[int, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    file = rows[1][0].rpartition(":")[0]
    refused = {
        ("--from", "2", "--steps", "2", "--without", rows[6][0]): f"{rows[6][0]}: step 6",
        ("--from", "2", "--steps", "2", "--without", f"{file}:99999"): "not among the rows that are trained",
        ("--from", "2", "--steps", "2", "--without", "elsewhere.jsonl:1"): "not among the rows that are trained",
        ("--from", "4", "--steps", "3", "--without", rows[5][0]): "from step 4 at most 2 more",
        ("--from", "4", "--steps", "1", "--without", ",".join(rows[5])): "nothing would be trained in step 5",
    }
    for words, text in refused.items():
        assert main([str(run_dir), *words]) == 2
        assert text in capsys.readouterr().err
    assert not list(run_dir.parent.glob("a run.replay-*"))


def test_steps_that_are_not_those_of_the_run_are_told(run_dir: Path, tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    loss = json.dumps(losses(run_dir)[3])
    log.write_text((run_dir / log.name).read_text().replace(loss, "9.5"))
    code, text = verdict(compare_steps(run_dir, tmp_path, range(3, 5)))
    assert code == 1 and "are not those of the run (largest difference" in text and "step 3, train/loss" in text
    assert verdict(compare_steps(run_dir, tmp_path, range(4, 5)))[0] == 0
