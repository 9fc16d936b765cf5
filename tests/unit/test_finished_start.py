"""A start with nothing to do: what the launcher answers for a finished run, and when it has the
ranks look again.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_fakes import save

from trainer.config import Config
from trainer.launch.checks import Launch
from trainer.run import preflight
from trainer.run.compose import load_config
from trainer.run.preflight import find_files
from trainer.tools.verify.checks import resume

LAUNCH = """
import contextlib, sys
from trainer.launch import __main__ as launch
launch.mirrored = lambda *args: contextlib.nullcontext()  # only of a run that trains
launch.supervise = lambda *args, **kwargs: 99  # ranks would start
for num_ranks in sys.argv[1].split(","):
    print(launch.main([num_ranks, *sys.argv[2:]]))
heavy = {"torch", "transformers", "wandb", "huggingface_hub"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A run on rows and a model of its own, with files as it leaves them."""
    (tmp_path / "model" / "more").mkdir(parents=True)
    (tmp_path / "run" / "step").mkdir(parents=True)
    given = {
        "model/config.json": '{"model_type": "qwen2"}',
        "model/tokenizer.json": "{}",
        "model/more/x": "1",
    }
    left = {"run/step/model.pt": "weights", "run/report.html": "<p>"}
    for name, text in {
        **given,
        **left,
        "rows.jsonl": "{}\n",
        "mine.jinja": "{{ messages }}",
    }.items():
        (tmp_path / name).write_text(text)
    return [
        f"data.train_files={tmp_path}/*.jsonl",
        f"data.chat_template={tmp_path}/mine.jinja",
        f"model.partial_pretrain={tmp_path}/model",
        "model.random_weights=true",
        "trainer.device=cpu",
        f"trainer.default_local_dir={tmp_path}/run",
    ]


def stamp(config: Config, num_ranks: int = 2) -> str:
    return preflight.stamp_of(
        config, find_files(config), config.model.partial_pretrain, num_ranks=num_ranks
    )


def recalled(config: Config, num_ranks: int = 2) -> str | None:
    return preflight.recall(Path(config.trainer.default_local_dir), stamp(config, num_ranks))


def write_again(path: Path) -> None:
    """Other bytes, the same size and modification time."""
    before = path.stat()
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES: dict[str, Callable[[Path], object]] = {
    "rows": lambda root: write_again(root / "rows.jsonl"),
    "more rows": lambda root: (root / "rows.jsonl").write_text("{}\n{}\n"),
    "another file of data": lambda root: (root / "more.jsonl").write_text("{}\n"),
    "the template": lambda root: (root / "mine.jinja").write_text("{{ more }}"),
    "a file of the model": lambda root: write_again(root / "model" / "more" / "x"),
    "a damaged checkpoint": lambda root: write_again(root / "run" / "step" / "model.pt"),
    "no report": lambda root: (root / "run" / "report.html").unlink(),
    "a run that has begun": lambda root: (root / "run" / ".train.lock").write_text("{}"),
    "a damaged record": lambda root: (root / "run" / preflight.RECORD).write_text("[]"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_recalled_once_something_has_changed(
    words: list[str], tmp_path: Path, change: str
) -> None:
    config = load_config(words)
    preflight.remember(tmp_path / "run", stamp(config), "all done")
    assert recalled(config) == "all done"
    CHANGES[change](tmp_path)
    assert recalled(config) is None


def test_nor_for_another_run(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(words)
    preflight.remember(tmp_path / "run", stamp(config), "all done")
    assert (
        recalled(load_config([*words, "trainer.total_epochs=7"])) is None
        and recalled(config, num_ranks=3) is None
    )
    monkeypatch.setattr(preflight, "version", lambda name: "another")
    assert recalled(config) is None


def test_doctor_says_that_nothing_is_left_to_do(words: list[str], tmp_path: Path) -> None:
    launch = Launch(load_config(words), 2)
    save(tmp_path / "run", 2)
    assert [said.what for said in resume(launch)] == [
        f"continues from {tmp_path}/run/global_step_2"
    ]
    preflight.remember(tmp_path / "run", stamp(launch.config), "all done")
    assert [said.what for said in resume(launch)] == ["all done"]


def test_what_changed_while_the_run_read_it_is_looked_at_again(
    words: list[str], tmp_path: Path
) -> None:
    config = load_config(words)
    before = stamp(config)
    (tmp_path / "rows.jsonl").write_text("{}\n{}\n")
    preflight.remember(tmp_path / "run", before, "all done")
    assert recalled(config) is None


def test_the_launcher_answers_without_ranks_and_without_libraries(
    words: list[str], tmp_path: Path
) -> None:
    # which is not up to date: nobody asks it here
    words.append("trainer.checkpoint.mirror=hf://org/model")
    preflight.remember(tmp_path / "run", stamp(load_config(words)), "all done")
    command = [sys.executable, "-c", LAUNCH, "2,3", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:3] == ["all done", "0", "99"]
    assert done.stderr.count("hf://org/model does not hold what was saved last: ") == 1
