"""What the command says of metrics, and the page it writes."""

import subprocess
import sys
from pathlib import Path

import pytest

from trainer.cli import metrics as command
from trainer.metrics import METRICS
from trainer.metrics.table import ALIASES
from trainer.report.vocabulary import FOREIGN


@pytest.mark.covers("S0.34", "S4.40")
def test_the_page_of_metrics_is_up_to_date(repository: Path) -> None:
    page = (repository / "docs/metrics.md").read_text(encoding="utf-8")
    assert page == command.page(), "run: python -m trainer.cli.metrics --write docs/metrics.md"
    for metric in METRICS.values():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{metric.key}` |")]
        assert all(f"`{key}`" in row for key in metric.config)
        assert f"| {metric.every} |" in row and f"| {metric.over_ranks} |" in row
    assert all(f"| `{key}` |" in page for key in (*ALIASES, *(foreign.key for foreign in FOREIGN)))


def test_the_page_is_written_where_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--write", str(tmp_path / "m.md")]) == 0
    assert (tmp_path / "m.md").read_text(encoding="utf-8") == command.page()
    assert command.main(["--write", str(tmp_path / "none" / "m.md")]) == 73
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.covers("S4.40")
def test_the_command_lists_all_and_starts_without_torch(repository: Path) -> None:
    script = "import sys; from trainer.cli.metrics import main; main([]); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], cwd=repository, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first_words = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    assert {metric.key for metric in (*METRICS.values(), *FOREIGN)} | set(ALIASES) <= first_words


def test_the_command_tells_what_is_known_of_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["val/loss", "memory/cpu/sft/eval/end/rss@max"]) == 0
    loss, rss = capsys.readouterr().out.split("\n\n")
    assert "logged      every validation, configured by trainer.test_freq" in loss
    assert "configured  data.val_files, data.val_ratio" in loss
    assert "good        lower is better" in loss
    assert "largest of all ranks" in rss
    assert "<infix>" in rss


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train/los"], "unknown metric 'train/los': did you mean 'train/loss'"),
        (["trian/grad_norm@max"], "did you mean 'train/grad_norm'"),
        (["?"], "without a key this command lists all"),
        (["--writ", "x"], "--writ"),
    ],
)
def test_a_typo_is_answered_with_the_nearest_key(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(words) == 2
    captured = capsys.readouterr()
    assert (captured.out, message in captured.err) == ("", True)
