"""The report command: its output and its exit codes."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from page_text import Page
from report_examples import examples

from trainer.cli import report
from trainer.cli.arguments import write_file
from trainer.cli.report import EXIT_UNREADABLE
from trainer.errors import CannotWriteError
from trainer.report.result import Report
from trainer.report.run_log import RunLog, UnreadableLogError

Patch = pytest.MonkeyPatch


class Analysis:
    """Stands for the readers and the rules: `sft` and `grpo` are the paths of runs, and `given`
    what was asked.
    """

    def __init__(self) -> None:
        self.verdict: str | None = None
        self.given: dict[str, Any] = {}
        self.is_running = False

    def read_run(self, path: Path) -> RunLog:
        if path.name not in examples():
            raise UnreadableLogError(f"{path} is no log: give a run directory")
        return replace(examples()[path.name][1], is_running=self.is_running)

    def analyse(self, log: RunLog, **options: Any) -> Report:
        self.given = options
        name = "sft" if log.source == "fsdp-sft" else "grpo"
        found = examples()[name][0]
        return replace(found, verdict=self.verdict or found.verdict)


@pytest.fixture(autouse=True)
def analysis(monkeypatch: Patch) -> Analysis:
    fake = Analysis()
    for name, content in {
        "readers": {"read_run": fake.read_run},
        "analyse": {"analyse": fake.analyse},
        "thresholds": {"read_thresholds": _read_thresholds},
    }.items():
        module = ModuleType(f"trainer.report.{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, f"trainer.report.{name}", module)
    return fake


def _read_thresholds(path: Path) -> dict[str, float]:
    lines = path.read_text().splitlines()
    return {name: float(value) for name, _, value in (line.partition(":") for line in lines)}


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Exit code, stdout and stderr of a command."""
    return lambda command, *words: (
        command.main([str(word) for word in words]),
        *capsys.readouterr(),
    )


def test_report_prints_a_verdict_and_writes_the_page(call: Call, tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    code, out, err = call(report, "sft", "--html", page)
    assert (code, err) == (0, "") and out.startswith("sft-7b") and f"wrote {page}" in out
    assert "What matters" in Page(page.read_text(encoding="utf-8")).words


def test_report_of_two_runs_is_one_page_an_array_and_side_by_side(
    call: Call, tmp_path: Path
) -> None:
    page = tmp_path / "a.html"
    code, out, _ = call(report, "sft", "grpo", "--html", page)
    words = " ".join(out.split())
    assert code == 0 and "\nv3 " in out
    assert "1: sft-7b 2: v3" in words and "tokens per second 38,540 –" in words
    assert page.read_text(encoding="utf-8").count("<article>") == 2
    trees = json.loads(call(report, "sft", "grpo", "--json")[1])
    assert [run["title"] for run in trees] == ["sft-7b", "v3"]


def test_report_judges_by_the_limits_profile_and_results_it_is_given(
    call: Call, analysis: Analysis, tmp_path: Path
) -> None:
    (limits := tmp_path / "limits").write_text("kl_high: 5")
    words = (
        "--profile",
        "grpo",
        "--config",
        limits,
        "--external",
        "500=0.6",
        "--external",
        "1000=0.7",
    )
    assert call(report, "sft", *words)[0] == 0
    assert analysis.given == {
        "profile": "grpo",
        "thresholds": {"kl_high": 5.0},
        "external": {500: 0.6, 1000: 0.7},
    }
    call(report, "sft")
    assert analysis.given == {"profile": "auto", "thresholds": None, "external": None}


def test_report_around_a_step_prints_only_rows(call: Call) -> None:
    code, out, _ = call(report, "grpo", "--around", 3145, "--window", 10)
    assert code == 0 and "steps 3135 to 3155" in out and "verdict" not in out.lower()
    assert [line.split()[0] for line in out.splitlines()[-5:]] == [
        "3135",
        "3140",
        "3145",
        "3150",
        "3155",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "required: PATH"),
        (("sft", "--profile", "x"), "invalid choice: 'x'"),
        (("sft", "--config", "no-such-file"), "--config no-such-file"),
        (("sft", "--external", "500"), "must be STEP=VALUE"),
        (("sft", "--around", 5, "--html", "x"), "leave out --html"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_names_the_option(
    call: Call, words: tuple[str, ...], message: str
) -> None:
    code, out, err = call(report, *words)
    assert (code, out) == (2, "") and err.startswith("ERROR: ") and message in err


def test_a_log_that_cannot_be_read_is_exit_code_4(call: Call) -> None:
    for paths in (["elsewhere"], ["sft", "elsewhere"]):
        code, out, err = call(report, *paths)
        assert (code, out, err) == (
            EXIT_UNREADABLE,
            "",
            "ERROR: elsewhere is no log: give a run directory\n",
        )


def test_a_fault_of_the_program_is_not_taken_for_an_unreadable_log(
    call: Call, analysis: Analysis, monkeypatch: Patch
) -> None:
    def fails(log: RunLog, **options: Any) -> Report:
        raise ValueError("a fault")

    monkeypatch.setattr(sys.modules["trainer.report.analyse"], "analyse", fails)
    with pytest.raises(ValueError, match="a fault"):
        call(report, "sft")


def test_a_page_that_cannot_be_written_is_exit_code_73(call: Call, tmp_path: Path) -> None:
    code, _, err = call(report, "sft", "--html", tmp_path / "no" / "a.html")
    assert code == 73 and "cannot write" in err and "choose another place" in err


@pytest.mark.parametrize(
    ("verdict", "code"), [("OK", 0), ("INSUFFICIENT", 0), ("ATTENTION", 1), ("FAIL", 3)]
)
def test_with_check_the_exit_code_is_the_verdict(
    call: Call, analysis: Analysis, verdict: str, code: int
) -> None:
    analysis.verdict = verdict
    exit_code, out, err = call(report, "grpo", "--json", "--check")
    assert (exit_code, err) == (code, "") and json.loads(out)["verdict"] == verdict
    assert call(report, "sft", "grpo", "--check")[0] == code
    assert call(report, "grpo")[0] == 0


def test_a_page_does_not_take_the_place_of_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CannotWriteError, match="no regular file"):
        write_file(tmp_path / "pipe", "page")
    assert (tmp_path / "pipe").is_fifo()
