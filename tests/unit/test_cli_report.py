"""The commands report, diagnose and compare: what they write, and what their exit codes say."""

import json
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from page_text import Page
from report_examples import examples

from trainer.cli import compare, diagnose, report
from trainer.cli.arguments import write_file
from trainer.cli.report_options import EXIT_UNREADABLE
from trainer.errors import CannotWriteError
from trainer.report.result import Report
from trainer.report.run_log import RunLog, UnreadableLogError

Patch = pytest.MonkeyPatch


class Analysis:
    """Stands for the readers and the rules: `sft` and `grpo` are the paths of runs, and `given` what was asked."""

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
    return lambda command, *words: (command.main([str(word) for word in words]), *capsys.readouterr())


def test_report_prints_and_writes_page_and_json(call: Call, tmp_path: Path) -> None:
    page, tree = tmp_path / "a.html", tmp_path / "a.json"
    code, out, err = call(report, "sft", "--html", page, "--json", tree)
    assert (code, err) == (0, "") and out.startswith("sft-7b") and f"wrote {page}" in out
    assert "What matters" in Page(page.read_text(encoding="utf-8")).words
    assert json.loads(tree.read_text())["verdict"] == "FAIL"


def test_report_of_two_runs_is_one_page_and_an_array(call: Call, tmp_path: Path) -> None:
    page, tree = tmp_path / "a.html", tmp_path / "a.json"
    code, out, _ = call(report, "sft", "grpo", "--html", page, "--json", tree)
    assert code == 0 and "\nv3 " in out
    assert [run["title"] for run in json.loads(tree.read_text())] == ["sft-7b", "v3"]
    assert page.read_text(encoding="utf-8").count("<article>") == 2


def test_the_page_of_a_running_training_follows_it_to_its_end(
    call: Call, analysis: Analysis, monkeypatch: Patch, tmp_path: Path
) -> None:
    page, pages, waited = tmp_path / "a.html", [], []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        pages.append(page.read_text(encoding="utf-8"))
        analysis.is_running = len(waited) < 2

    analysis.is_running = True
    monkeypatch.setattr("trainer.cli.report.time.sleep", sleep)
    assert call(report, "sft", "--html", page, "--every", "30s")[0] == 0
    assert waited == [30, 30] and all('http-equiv="refresh" content="30"' in text for text in pages)
    assert "refresh" not in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("is_full_to_the_end", [False, True])
def test_a_full_disk_leaves_the_page_there_and_does_not_end_the_command(
    call: Call, analysis: Analysis, monkeypatch: Patch, tmp_path: Path, is_full_to_the_end: bool
) -> None:
    """A limit of this process on the size of files stands for the disk: both end a write in its middle."""
    page, pages = tmp_path / "a.html", []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def sleep(seconds: float) -> None:
        pages.append(page.read_text(encoding="utf-8"))
        assert os.listdir(tmp_path) == ["a.html"]
        analysis.is_running = len(pages) < 3
        is_full = len(pages) < 3 or is_full_to_the_end
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if is_full else limits[0], limits[1]))

    analysis.is_running = True
    monkeypatch.setattr("trainer.cli.report.time.sleep", sleep)
    try:
        code, _, err = call(report, "sft", "--html", page, "--every", "30s")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(pages) == 3 and set(pages) == {pages[0]} and "</html>" in pages[0]
    assert err.count("WARNING: cannot write") == 1 and "the old one stays" in err
    assert (code, "refresh" in page.read_text(encoding="utf-8")) == ((73, True) if is_full_to_the_end else (0, False))


def test_report_judges_by_the_limits_profile_and_results_it_is_given(
    call: Call, analysis: Analysis, tmp_path: Path
) -> None:
    (limits := tmp_path / "limits").write_text("kl_high: 5")
    words = ("--profile", "grpo", "--config", limits, "--external", "500=0.6", "--external", "1000=0.7")
    assert call(report, "sft", *words)[0] == 0
    assert analysis.given == {"profile": "grpo", "thresholds": {"kl_high": 5.0}, "external": {500: 0.6, 1000: 0.7}}
    call(report, "sft")
    assert analysis.given == {"profile": "auto", "thresholds": None, "external": None}


def test_report_around_a_step_prints_only_rows(call: Call) -> None:
    code, out, _ = call(report, "grpo", "--around", 3145, "--window", 10)
    assert code == 0 and "steps 3135 to 3155" in out and "verdict" not in out.lower()
    assert [line.split()[0] for line in out.splitlines()[-5:]] == ["3135", "3140", "3145", "3150", "3155"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "required: PATH"),
        (("sft", "--profile", "x"), "invalid choice: 'x'"),
        (("sft", "--config", "no-such-file"), "--config no-such-file"),
        (("sft", "--external", "500"), "must be STEP=VALUE"),
        (("sft", "--around", 5, "--html", "x"), "leave out --html"),
        (("sft", "--every", "30s"), "add --html FILE"),
        (("sft", "--every", "0", "--html", "x"), "must be whole seconds"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_names_the_option(call: Call, words: tuple[str, ...], message: str) -> None:
    code, out, err = call(report, *words)
    assert (code, out) == (2, "") and err.startswith("ERROR: ") and message in err


def test_a_log_that_cannot_be_read_is_exit_code_4(call: Call) -> None:
    for command in (report, diagnose, compare):
        code, out, err = call(command, *["elsewhere"] * (1 + (command is compare)))
        assert (code, out, err) == (EXIT_UNREADABLE, "", "ERROR: elsewhere is no log: give a run directory\n")


def test_a_fault_of_the_program_is_not_taken_for_an_unreadable_log(
    call: Call, analysis: Analysis, monkeypatch: Patch
) -> None:
    def fails(log: RunLog, **options: Any) -> Report:
        raise ValueError("a fault")

    monkeypatch.setattr(sys.modules["trainer.report.analyse"], "analyse", fails)
    with pytest.raises(ValueError, match="a fault"):
        call(diagnose, "sft")


def test_a_page_that_cannot_be_written_is_exit_code_73(call: Call, tmp_path: Path) -> None:
    code, _, err = call(report, "sft", "--html", tmp_path / "no" / "a.html")
    assert code == 73 and "cannot write" in err and "choose another place" in err


@pytest.mark.parametrize(("verdict", "code"), [("OK", 0), ("INSUFFICIENT", 0), ("ATTENTION", 1), ("FAIL", 2)])
def test_diagnose_prints_json_alone_and_exits_with_the_verdict(
    call: Call, analysis: Analysis, verdict: str, code: int
) -> None:
    analysis.verdict = verdict
    exit_code, out, err = call(diagnose, "grpo")
    assert (exit_code, err) == (code, "") and json.loads(out)["verdict"] == verdict


def test_a_mistyped_option_does_not_look_like_a_failed_run(call: Call) -> None:
    assert call(diagnose, "sft", "--no-such-option")[0] == 64


@pytest.mark.covers("S0.28")
def test_compare_prints_runs_side_by_side(call: Call) -> None:
    code, out, _ = call(compare, "sft", "grpo")
    words = " ".join(out.split())
    assert code == 0 and "1: sft-7b 2: v3" in words and "tokens per second 38,540 –" in words
    assert call(compare, "sft")[0] == 2


def test_a_page_does_not_take_the_place_of_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CannotWriteError, match="no regular file"):
        write_file(tmp_path / "pipe", "page")
    assert (tmp_path / "pipe").is_fifo()
