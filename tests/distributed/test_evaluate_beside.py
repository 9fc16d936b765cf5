"""`evaluate` does not change a bit of a run that rotates its checkpoints meanwhile."""

import os
import signal
import threading

import whole_runs
from exports import tensors_in
from processes import wait_until
from toy import differing

from trainer.cli import evaluate as command
from trainer.runtime.evaluations import FILE_NAME, read_evaluations, read_summaries
from trainer.tools.verify.equality import compare_runs

STEPS = 12
WORDS = (f"trainer.total_training_steps={STEPS}", "trainer.save_freq=2", "trainer.test_freq=4")
EVALUATE = ("--score", "exact", "--watch", "--max-new-tokens", "4", "--name", "words")


def test_a_run_that_is_scored_beside_computes_and_writes_the_same(tmp_path, monkeypatch, capsys):
    words = (*whole_runs.tiny_model(tmp_path), *WORDS, "trainer.max_ckpt_to_keep=1")
    alone = tmp_path / "alone"
    beside = tmp_path / "beside"
    whole_runs.train(alone, 1, *words)
    monkeypatch.setattr(command, "POLL_S", 0.1)
    codes = []
    scoring = threading.Thread(target=lambda: codes.append(command.main([str(beside), *EVALUATE])))
    log = tmp_path / "beside.log"
    with whole_runs.started(1, *words, f"trainer.default_local_dir={beside}", log=log) as attempt:
        assert wait_until((beside / "latest_checkpointed_iteration.txt").exists, timeout_s=60)
        pid = attempt.ranks[0].pid
        os.kill(pid, signal.SIGSTOP)  # until it is being scored: the machine may be slow
        scoring.start()
        assert wait_until((beside / FILE_NAME).exists, timeout_s=60)
        os.kill(pid, signal.SIGCONT)
        assert attempt.wait(90) == 0, attempt.output
    scoring.join(60)
    assert codes == [0], capsys.readouterr().err
    same = compare_runs(alone, beside, steps=STEPS)
    assert same.differences == [] and same.num_equal > 4 * STEPS
    exports = [path / f"global_step_{STEPS}" / "huggingface" for path in (alone, beside)]
    assert differing(*map(tensors_in, exports)) == []
    found = read_summaries(beside)["eval/words"]
    assert len(found) >= 2 and max(found) == STEPS, "one while it was trained, and the last"
    rows = [row for row in read_evaluations(beside) if row["kind"] == "sample"]
    num_samples = sum(summary["n"] for summary in found.values())
    assert len(rows) == len({(row["step"], row["index"]) for row in rows}) == num_samples
