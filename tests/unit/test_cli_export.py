"""The commands that work with torch, seen from outside: what they are asked, what they say, and
how they end.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_states import Call
from cli_states import call as call  # fixtures
from cli_states import run_dir as run_dir

from trainer.checkpoint.lock import LOCK
from trainer.cli import checkpoint as cli

Patch = pytest.MonkeyPatch


@pytest.fixture
def exports(monkeypatch: Patch) -> list[tuple[Path, Path, str]]:
    """What an exporter that makes one file of 2048 bytes was asked for."""
    asked: list[tuple[Path, Path, str]] = []

    def export_from_shards(
        checkpoint: Path, target: Path, *, dtype: str, lora: str, base: Path | None
    ) -> None:
        assert (lora, base) == ("merged", None)
        asked.append((checkpoint, target, dtype))
        target.mkdir()
        (target / "model.safetensors").write_bytes(b"x" * 2048)

    monkeypatch.setitem(
        sys.modules,
        "trainer.checkpoint.offline_export",
        SimpleNamespace(export_from_shards=export_from_shards),
    )  # type: ignore[arg-type]
    return asked


def test_export_says_what_it_made(
    run_dir: Path, call: Call, exports: list[Any], tmp_path: Path
) -> None:
    code, out, err = call("export", run_dir / "global_step_4", tmp_path / "hf")
    assert (code, err) == (0, "") and exports == [
        (run_dir / "global_step_4", tmp_path / "hf", "bfloat16")
    ]
    first, second = out.splitlines()
    assert first == f"exporting {run_dir / 'global_step_4'} in bfloat16"
    assert second == f"wrote {tmp_path / 'hf'}  2 KiB, 0.0 s"
    assert (
        call("export", "--dtype", "float32", run_dir / "global_step_4", tmp_path / "other")[0] == 0
    )
    assert exports[1] == (run_dir / "global_step_4", tmp_path / "other", "float32")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("export run", "required: TARGET\nusage: "),
        ("export run hf --dtype int8", "argument --dtype: invalid choice: 'int8'"),
        ("export run/global_step_9 hf", "no directory 'run/global_step_9': give a run's"),
        ("export new hf", "'new' holds no checkpoint to export: wait for the first save"),
        ("export broken hf", "no checkpoint in 'broken' can be continued from"),
        ("export other hf", "'other' is no run directory"),
    ],
)
def test_wrong_usage(
    run_dir: Path, call: Call, exports: list[Any], monkeypatch: Patch, words: str, message: str
) -> None:
    monkeypatch.chdir(run_dir.parent)
    for name in ("other", "new", "broken/global_step_1"):
        Path(name).mkdir(parents=True)
    Path("new", LOCK).touch()
    code, out, err = call(*words.split())
    assert (code, out, exports) == (2, "", []) and err.startswith("ERROR: ") and message in err


def test_every_command_describes_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for words, expected in {
        ("--help",): ["ls", "verify", "prune", "export"],
        ("ls", "--help"): ["which one a resume takes"],
        ("verify", "--help"): ["exit code 1 if any is damaged"],
        ("prune", "--help"): ["Refused while the run trains"],
        ("export", "--help"): ["default: bfloat16", "Needs no GPU"],
    }.items():
        with pytest.raises(SystemExit) as done:
            cli.main(list(words))
        out = " ".join(capsys.readouterr().out.split())
        assert done.value.code == 0 and all(text in out for text in expected), words
