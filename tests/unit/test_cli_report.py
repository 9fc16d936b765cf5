"""The report command: its output and exit codes, and the page that a run writes at its end."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from log_formats import make_curves, write_own, write_swift
from page_text import Page

from trainer.cli import report
from trainer.cli.arguments import write_file
from trainer.errors import CannotWriteError
from trainer.tools.report import analyse as analysis
from trainer.tools.report.analyse import analyse
from trainer.train.start.end import write_final_report


@pytest.fixture
def call(capsys, tmp_path, monkeypatch):
    """Run the command next to two runs, `ours` and `swift`. Return exit code, stdout and stderr."""
    for name, write in (("ours", write_own), ("swift", write_swift)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, make_curves(num_steps=120))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return lambda words: (report.main(words.split()), *capsys.readouterr())


def test_one_run_gives_a_verdict_and_a_page(call):
    code, out, err = call("ours --html a.html")
    assert (code, err) == (0, "") and out.startswith("ours (fsdp-sft)") and "wrote a.html" in out
    assert "What next" in Page(Path("a.html").read_text(encoding="utf-8")).words


def test_two_runs_give_one_page_an_array_and_a_comparison(call):
    code, out, _ = call("ours swift --html a.html")
    assert code == 0 and "\nswift (ms-swift)" in out and "metric or option" in out
    page = Path("a.html").read_text(encoding="utf-8")
    assert page.count("<article>") == 3 and "Side by side" in page
    trees = json.loads(call("ours swift --json")[1])
    assert [run["title"] for run in trees] == ["ours", "swift"]


def test_a_run_is_judged_by_the_profile_it_is_given(call):
    with patch.object(analysis, "analyse", wraps=analyse) as analysed:
        assert call("ours --profile grpo")[0] == 0
    assert analysed.call_args.kwargs == {"profile": "grpo"}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("", 2, "required: PATH"),
        ("ours --profile x", 2, "invalid choice: 'x'"),
        ("ours elsewhere", 4, "cannot read elsewhere as a training log"),
        ("ours --html no/a.html", 73, "choose a different path"),
    ],
)
def test_errors_have_their_exit_code_and_name_the_cause(call, words, code, message):
    found, out, err = call(words)
    assert found == code and err.startswith("ERROR: ") and message in err
    assert out == "" or code == 73


@pytest.mark.parametrize(
    ("verdict", "code"), [("OK", 0), ("INSUFFICIENT", 0), ("ATTENTION", 1), ("FAIL", 3)]
)
def test_with_check_the_exit_code_is_the_verdict(call, monkeypatch, verdict, code):
    judged = lambda log, **own: replace(analyse(log, **own), verdict=verdict)  # noqa: E731
    monkeypatch.setattr(analysis, "analyse", judged)
    exit_code, out, err = call("swift --json --check")
    assert (exit_code, err) == (code, "") and json.loads(out)["verdict"] == verdict
    assert call("ours swift --check")[0] == code and call("ours")[0] == 0


def test_a_page_does_not_take_the_place_of_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CannotWriteError, match="not a regular file"):
        write_file(tmp_path / "pipe", "page")
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(
    ("stderr", "told"),
    [
        ("a warning\nERROR: 'x' is bad\nFix: do y\n", "report: ERROR: 'x' is bad\nFix: do y; bash"),
        ("Traceback:\n  line\nKeyError: 'x'\n", "report: KeyError: 'x'; bash"),
    ],
)
def test_the_warning_about_a_report_that_fails_holds_the_whole_message(
    tmp_path, monkeypatch, caplog, stderr, told
):
    done = subprocess.CompletedProcess([], 4, "", stderr)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    write_final_report(tmp_path)
    assert told in caplog.text
