"""`evaluate` during a run that rotates its checkpoints does not change a bit of the run."""

import hashlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import whole_runs

from trainer.cli import evaluate as command
from trainer.runtime.evaluations import FILE_NAME, read_evaluations, read_summaries
from trainer.tracking import read_metrics

STEPS = 12
WORDS = (f"trainer.total_training_steps={STEPS}", "trainer.save_freq=2", "trainer.test_freq=4")
EVALUATE = ("--score", "exact", "--watch", "--max-new-tokens", "4", "--name", "words")


def computed(run_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics that depend on neither clock nor machine."""
    rows = [
        row for row in read_metrics(run_dir / "metrics.jsonl") if row["kind"] in ("train", "val")
    ]
    own = ("step", "train/", "val/")
    return [
        {key: row[key] for key in row if key.startswith(own) and key != "train/time(s)"}
        for row in rows
    ]


def written(run_dir: Path) -> dict[str, str]:
    """Return the digests of the last checkpoint, without files that contain dates or paths."""
    files = [path for path in (run_dir / f"global_step_{STEPS}").rglob("*") if path.is_file()]
    files = [
        path
        for path in files
        if not path.name.startswith(("manifest.json", "finished.json", "extra_state"))
    ]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def waited_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.01)


def test_a_run_that_is_scored_beside_computes_and_writes_the_same(tmp_path, monkeypatch, capsys):
    words = (*whole_runs.tiny_model(tmp_path), *WORDS, "trainer.max_ckpt_to_keep=1")
    alone, beside = tmp_path / "alone", tmp_path / "beside"
    code, output = whole_runs.run(
        1, *words, f"trainer.default_local_dir={alone}", log=tmp_path / "alone.log"
    )
    assert code == 0, output
    monkeypatch.setattr(command, "POLL_S", 0.1)
    codes: list[int] = []
    scoring = threading.Thread(target=lambda: codes.append(command.main([str(beside), *EVALUATE])))
    log = tmp_path / "beside.log"
    with whole_runs.started(1, *words, f"trainer.default_local_dir={beside}", log=log) as attempt:
        waited_for(beside / "latest_checkpointed_iteration.txt")
        pid = attempt.ranks[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # until it is being scored: the machine may be slow
        scoring.start()
        waited_for(beside / FILE_NAME)
        os.kill(pid, signal.SIGCONT)
        assert attempt.wait(90) == 0, attempt.output
    scoring.join(60)
    assert codes == [0], capsys.readouterr().err
    assert computed(beside) == computed(alone) and len(computed(alone)) == STEPS + STEPS // 4
    assert (
        written(beside) == written(alone)
        and {"data.pt", "model.safetensors"} <= written(alone).keys()
    )
    found = read_summaries(beside)["eval/words"]
    assert len(found) >= 2 and max(found) == STEPS, "one while it was trained, and the last"
    rows = [row for row in read_evaluations(beside) if row["kind"] == "sample"]
    num_samples = sum(summary["n"] for summary in found.values())
    assert len(rows) == len({(row["step"], row["index"]) for row in rows}) == num_samples
