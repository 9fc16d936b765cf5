"""The commands `checkpoint ls` and `verify`, and wrong usage of all of them."""

import re
from pathlib import Path

import pytest
from checkpoint_fakes import commit, content_of, save, write_unfinished
from cli_states import LEFT, flip, leave_behind, rows, snapshot
from cli_states import call as call  # fixtures
from cli_states import run_dir as run_dir

from trainer.checkpoint import fsio, layout, retention
from trainer.checkpoint.lock import LOCK, RunLock
from trainer.checkpoint.manifest import MANIFEST
from trainer.runtime.files import tree_bytes
from trainer.runtime.text import readable


def test_ls_shows_each_checkpoint_and_the_one_a_resume_takes(run_dir, call):
    code, out, err = call("ls", run_dir)
    size = readable(sum(len(data) for data in snapshot(run_dir / "global_step_2").values()))
    facts = f"committed {size} 2 1.5000 2026-01-01T00:00:00"
    assert (code, err) == (0, "") and out.splitlines()[0] == str(run_dir)
    assert rows(out) == [f"2 {facts}", f"4 {facts}", f"6 {facts} pointer, resume takes it"]


def test_ls_says_why_a_checkpoint_is_not_usable(run_dir, call):
    (run_dir / "global_step_4" / "data.pt").write_bytes(b"")
    write_unfinished(run_dir, 5)
    commit(run_dir, 8)
    out = call("ls", run_dir)[1]
    table = dict(row.split(" ", 1) for row in rows(out))
    assert list(table) == ["2", "4", "5", "6", "8"]
    assert table["4"].startswith("incomplete") and "data.pt has 0 bytes" in table["4"]
    assert table["5"].startswith("incomplete") and "no manifest.json" in table["5"]
    assert table["6"].endswith("00 pointer") and table["8"].endswith("00 resume takes it")


def test_ls_alone_shows_every_run_below_checkpoints(tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("ls")[0] == 2
    Path("checkpoints/c/started").mkdir(parents=True)
    assert call("ls")[:2] == (0, "no run below 'checkpoints' yet\n")
    Path("checkpoints/c/started", LOCK).touch()
    for name in (
        "b/second",
        "a/first",
        "a/first/nested",
        ".cache/none",
        "a/first/global_step_1/none",
    ):
        Path("checkpoints", name).mkdir(parents=True, exist_ok=True)
        save(Path("checkpoints", name), 1)
    blocks = [block.splitlines() for block in call("ls")[1].split("\n\n")]
    found = [block[0].removeprefix("checkpoints/") for block in blocks]
    assert found == ["a/first", "a/first/nested", "b/second", "c/started"] and blocks[3][1:] == [
        "  no checkpoint yet"
    ]
    assert call("ls", "checkpoints/b")[1].splitlines()[0] == "checkpoints/b/second"


def test_ls_shows_leftovers_writes_nothing_and_does_not_mind_a_training_run(run_dir, call):
    leave_behind(run_dir)
    with RunLock(run_dir) as lock:
        before, holder = snapshot(run_dir), (run_dir / LOCK).read_bytes()
        code, out, _ = call("ls", run_dir)
        assert code == 0 and lock.is_held()
        assert (snapshot(run_dir), (run_dir / LOCK).read_bytes()) == (before, holder)
    for name in LEFT:
        assert f"  {name}  {readable(tree_bytes(run_dir / name))}\n" in out


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


def test_verify_names_all_damaged_files_of_all_checkpoints(run_dir, call):
    flip(run_dir / "global_step_2" / layout.model_file(2, 1))
    (run_dir / "global_step_2" / "huggingface" / "config.json").write_bytes(b"{")
    (run_dir / "global_step_2" / "data.pt").unlink()
    (run_dir / "global_step_4").rename(run_dir / "global_step_5")
    write_unfinished(run_dir, 7)
    code, out, _ = call("verify", run_dir / "global_step_6", run_dir)
    parts = [part.splitlines() for part in re.split(r"\n(?=\w)", out)]
    assert code == 1
    assert [part[0].split()[0] for part in parts] == ["ok", "FAILED", "FAILED", "ok", "FAILED"]
    damaged = [line.split()[0].rstrip(":") for line in parts[1][1:]]
    assert sorted(damaged) == ["data.pt", "huggingface/config.json", layout.model_file(2, 1)]
    assert "step 4" in parts[2][1] and MANIFEST in parts[4][1]


def test_a_checkpoint_rotated_away_during_verify_is_not_damaged(run_dir, call, monkeypatch):
    sha256_of = fsio.sha256_of
    monkeypatch.setattr(
        fsio, "sha256_of", lambda path: (retention.rotate(run_dir, keep=2), sha256_of(path))[1]
    )
    code, out, _ = call("verify", run_dir)
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == ["gone", "ok", "ok"]
    save(run_dir, 8)
    assert call("verify", run_dir / "global_step_4")[0] == 1, "asked for by name, and not proven"


WRONG_USAGE = {
    "": "usage: ",
    "prune run": "--keep",
    "prune run --keep 0": "--keep",
    "prune run --keep 1 --keep-last 1": "usage: bash run_sft.sh checkpoint prune ",
    "prune run/global_step_2 --keep 1": "'run/global_step_2'",
    "verify run/global_step_9": "'run/global_step_9'",
    "verify other": "'other' is no run directory",
    "verify new": "'new' has no checkpoint",
    "export run": "TARGET",
    "export run hf --dtype int8": "--dtype",
    "export run/global_step_9 hf": "'run/global_step_9'",
    "export new hf": "'new' has no checkpoint",
    "export broken hf": "'broken'",
    "export other hf": "'other' is no run directory",
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


def test_relative_paths_are_resolved(run_dir, call, monkeypatch):
    monkeypatch.chdir(run_dir / "global_step_2")
    assert call("verify", ".")[0] == 0 and len(rows(call("ls", "..")[1])) == 3
