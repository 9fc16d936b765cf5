"""The commands `checkpoint ls` and `verify`, and wrong usage of all of them."""

from pathlib import Path

import pytest
from checkpoint_fakes import commit, content_of, files_of, save, write_unfinished
from cli_states import call as call  # fixtures
from cli_states import rows
from cli_states import run_dir as run_dir
from small_files import flip

from trainer.checkpoint.lock import LOCK
from trainer.checkpoint.manifest import MANIFEST
from trainer.runtime.text import readable


def test_ls_shows_each_checkpoint_why_it_is_not_usable_and_the_one_a_resume_takes(run_dir, call):
    size = readable(sum(map(len, files_of(run_dir / "global_step_2").values())))
    facts = f"committed {size} 2 1.5000 2026-01-01T00:00:00"
    (run_dir / "global_step_4" / "data.pt").write_bytes(b"")
    write_unfinished(run_dir, 5)
    commit(run_dir, 8)
    code, out, err = call("ls", run_dir)
    assert (code, err) == (0, "") and out.splitlines()[0] == str(run_dir)
    table = dict(row.split(" ", 1) for row in rows(out))
    assert list(table) == ["2", "4", "5", "6", "8"]
    assert table["4"].startswith("incomplete") and "data.pt has 0 bytes" in table["4"]
    assert table["5"].startswith("incomplete") and "no manifest.json" in table["5"]
    assert (table["2"], table["6"]) == (facts, f"{facts} pointer")
    assert table["8"].endswith("00 resumes from here")
    assert "the run died after saving global_step_8" in out


def test_ls_alone_shows_every_run_below_checkpoints(tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("ls")[0] == 2
    for name in ("b/second", "a/first"):
        Path("checkpoints", name).mkdir(parents=True, exist_ok=True)
        save(Path("checkpoints", name), 1)
    blocks = [block.splitlines() for block in call("ls")[1].split("\n\n")]
    found = [block[0].removeprefix("checkpoints/") for block in blocks]
    assert found == ["a/first", "b/second"]


def test_control_characters_do_not_reach_the_terminal(run_dir, call):
    (run_dir / ".corrupt_\x1b[2J\udcff").mkdir()  # a name that is not even UTF-8
    out = call("ls", run_dir)[1]
    assert "\x1b" not in out and r"\x1b[2J\udcff" in out


def test_verify_proves_every_byte(run_dir, call):
    code, out, err = call("verify", run_dir)
    lines = [line.split()[:2] for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert lines == [["ok", str(run_dir / f"global_step_{step}")] for step in (2, 4, 6)]
    for name in [*content_of(4), MANIFEST]:
        flip(run_dir / "global_step_4" / name)
        code, out, _ = call("verify", run_dir / "global_step_4")
        assert code == 1 and name in out and "FAILED" in out, name
        flip(run_dir / "global_step_4" / name)


WRONG_USAGE = {
    "": "usage: ",
    "prune run": "--keep",
    "prune run/global_step_2 --keep 1": "'run/global_step_2'",
    "verify run/global_step_9": "'run/global_step_9'",
    "verify other": "'other' is not a run directory",
    "verify new": "'new' has no checkpoint",
    "export run hf --dtype int8": "--dtype",
    "export broken hf": "'broken'",
}


@pytest.mark.parametrize("words", WRONG_USAGE)
def test_wrong_usage(run_dir, call, monkeypatch, words):
    monkeypatch.chdir(run_dir.parent)
    for name in ("other", "new", "broken/global_step_1"):
        Path(name).mkdir(parents=True)
    Path("new", LOCK).touch()
    code, out, err = call(*(word.strip("'") for word in words.split()))
    assert (code, out) == (2, "") and err.startswith("ERROR: ") and WRONG_USAGE[words] in err
    assert not Path("hf").exists()
