"""The page a run leaves behind, and that its failure is no failure of the run."""

import logging

from trainer.tracking import Tracking
from trainer.train.start.end import write_final_report


def test_a_run_leaves_a_page_and_its_verdict(tmp_path, caplog):
    tracking = Tracking("project", "exp", [], {}, run_dir=tmp_path, total_steps=5)
    for step in range(1, 6):
        tracking.log({"train/loss": 2.0 - 0.1 * step, "train/grad_norm": 1.0}, step)
    tracking.finish(0)
    with caplog.at_level(logging.INFO):
        write_final_report(tmp_path)
    assert "report      " in caplog.text and str(tmp_path / "report.html") in caplog.text
    assert "</html>" in (tmp_path / "report.html").read_text()


def test_a_report_that_fails_is_only_a_warning(tmp_path, caplog):
    write_final_report(tmp_path / "nothing")
    assert "no report: ERROR: cannot read" in caplog.text
    assert "bash run_sft.sh report" in caplog.text
