"""`keep_full`: old checkpoints lose their optimizer states, and nothing is lost or chosen by it that should not be."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_fakes import commit, content_of, expected_files, save, write_unfinished
from cli_states import Call, flip

from trainer.checkpoint import choice, fsio, layout, retention, rollback
from trainer.checkpoint.choice import NoUsableCheckpointError, candidates_of
from trainer.checkpoint.fsio import Operation
from trainer.checkpoint.layout import POINTER
from trainer.checkpoint.retention import Retention
from trainer.checkpoint_tools import listing
from trainer.cli import checkpoint as cli
from trainer.config import CheckpointConfig, TrainerConfig
from trainer.progress import History

OPTIMIZER = layout.optim_file(2, 0)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    return lambda *words: (cli.main([str(word) for word in words]), *capsys.readouterr())


def step_dir(run_dir: Path, step: int) -> Path:
    return run_dir / layout.step_dir_name(step)


def thinned(run_dir: Path) -> list[int]:
    """Independent of the code under test: those with all their files but the optimizer's."""
    found = []
    for path in sorted(run_dir.glob("global_step_*"), key=lambda path: int(path.name[12:])):
        expected = {name: data for name, data in expected_files(path.name).items() if name != OPTIMIZER}
        assert all((path / name).read_bytes() == data for name, data in expected.items())
        found += [] if (path / OPTIMIZER).exists() else [int(path.name[12:])]
    return found


def test_old_checkpoints_lose_their_optimizer_states_and_nothing_else(tmp_path: Path, call: Call) -> None:
    save(tmp_path, 2, 4, 6, 8)
    write_unfinished(tmp_path, 3)
    shutil.rmtree(step_dir(tmp_path, 3))
    retention.settle(tmp_path, 8, Retention(keep=3, keep_full=1))
    assert thinned(tmp_path) == [4, 6] and [info.step for info in choice.select(tmp_path).candidates] == [8]
    code, out, _ = call("ls", tmp_path)
    texts = [line for line in out.splitlines() if "its optimizer state was removed" in line]
    assert code == 0 and [int(line.split()[0]) for line in texts] == [4, 6]
    assert call("verify", tmp_path)[0] == 0, "what was removed on purpose is no damage"
    flip(step_dir(tmp_path, 4) / "data.pt")
    code, out, _ = call("verify", tmp_path)
    assert code == 1 and "data.pt changed" in out and "optim" not in out
    assert [info.thinned for info in layout.committed(tmp_path)] == [True, True, False]


def test_a_kill_at_any_operation_leaves_whole_or_thinned_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        run_dir = tmp_path / str(number)
        run_dir.mkdir()
        save(run_dir, 2, 4, 6)
        operations: list[str] = []

        def kill(operation: Operation, number: int = number, operations: list[str] = operations) -> None:
            if len(operations) == number:
                raise KeyboardInterrupt
            operations.append(operation.kind)

        monkeypatch.setattr(fsio, "observer", kill)
        try:
            retention.settle(run_dir, 6, Retention(keep_full=1))
            is_done = True
        except KeyboardInterrupt:
            is_done = False
        monkeypatch.setattr(fsio, "observer", None)
        for info in layout.checkpoints(run_dir):
            assert info.status == "committed" and (info.thinned or (info.path / OPTIMIZER).exists())
            assert listing.prove(info.path) == []
        retention.settle(run_dir, 6, Retention(keep_full=1))
        assert thinned(run_dir) == [2, 4] and choice.select(run_dir).candidates[0].step == 6
        if is_done:
            break
    assert number > 8 and operations.index("fsync_dir") < operations.index("unlink"), "the mark is durable first"


def test_what_is_read_is_thinned_later_and_who_comes_meanwhile_waits(tmp_path: Path) -> None:
    save(tmp_path, 2, 4)
    with retention.reading(step_dir(tmp_path, 2)) as is_there, retention.reading(step_dir(tmp_path, 2)):
        assert is_there and retention.thin(tmp_path, keep_full=1) == [step_dir(tmp_path, 2)]
        assert thinned(tmp_path) == []
    assert retention.thin(tmp_path, keep_full=1) == [] and thinned(tmp_path) == [2]
    with retention.reading(step_dir(tmp_path, 2)) as is_there:
        assert is_there


def config(run_dir: Path, *, path: Path | None = None, contents: tuple[str, ...] = ()) -> TrainerConfig:
    own = CheckpointConfig() if not contents else CheckpointConfig(load_contents=list(contents))
    found = TrainerConfig(default_local_dir=str(run_dir), checkpoint=own)
    return found if path is None else replace(found, resume_mode="resume_path", resume_from_path=str(path))


def test_no_resume_takes_a_thinned_one_unless_it_needs_no_optimizer_state(tmp_path: Path) -> None:
    (run_dir := tmp_path / "run").mkdir()
    save(run_dir, 2, 4, 6)
    retention.thin(run_dir, keep_full=1)
    other, old = tmp_path / "other", step_dir(run_dir, 2)
    with pytest.raises(NoUsableCheckpointError, match=r"load_contents=\[model\] trainer.resume_from_path=.*step_2"):
        candidates_of(config(other, path=old))
    assert candidates_of(config(other, path=old, contents=("model",))).chosen is not None
    assert [info.step for info in candidates_of(config(run_dir)).candidates] == [6]
    assert [info.step for info in candidates_of(config(run_dir, contents=("model", "extra"))).candidates] == [6, 4, 2]

    (run_dir / POINTER).write_text("4")
    with pytest.raises(NoUsableCheckpointError, match=r"names global_step_4.*Write another step into it \(6\)"):
        candidates_of(config(run_dir))
    assert candidates_of(config(run_dir, contents=("model", "extra"))).candidates[0].step == 4

    shutil.rmtree(step_dir(run_dir, 6))
    with pytest.raises(NoUsableCheckpointError, match=r"(?s)global_step_2: its optim.*weights with .*global_step_4"):
        candidates_of(config(run_dir))


@pytest.mark.parametrize("delay", [None, 0, 20])
def test_a_rollback_finds_what_it_would_find_without_keep_full(tmp_path: Path, delay: int | None) -> None:
    (whole := tmp_path / "whole").mkdir()
    (thin := tmp_path / "thin").mkdir()
    history = History(best_step=10, episodes=((33, 34),))
    for step in range(10, 110, 10):
        for run_dir in (whole, thin):
            commit(run_dir, step)
        retention.settle(whole, step, Retention(), history=history)
        retention.settle(thin, step, Retention(keep_full=2, rollback_delay=delay), history=history)
        assert 10 not in thinned(thin), "the newest one before the last trouble: a person may go back to it"
        if delay is not None:
            for onset in (step + 1 - delay, step + 1, step + 9):
                targets = [
                    [info.step for info in rollback.candidates(run_dir, onset=onset, history=history, data=None)][:1]
                    for run_dir in (whole, thin)
                ]
                assert targets[0] == targets[1]
    found = rollback.candidates(thin, onset=200, history=history, data=None)
    assert {info.step for info in found}.isdisjoint(thinned(thin))
    needed = {None: set[int](), 0: {80}, 20: {60, 70, 80}}[delay]
    assert set(range(10, 110, 10)) - set(thinned(thin)) == {10, 90, 100} | needed


def test_prune_thins_what_it_is_asked_to_and_leaves_what_is_read(tmp_path: Path, call: Call) -> None:
    save(tmp_path, 2, 4, 6, 8)
    size = len(content_of(2)[OPTIMIZER])
    words = ("prune", tmp_path, "--keep", 3, "--keep-full", 1)
    assert call("prune", tmp_path)[0] == 2 and thinned(tmp_path) == []
    code, out, _ = call(*words)
    assert code == 0 and f"  would thin global_step_4  {size} B\n  would thin global_step_6  {size} B\n" in out
    assert "would delete global_step_2  " in out and thinned(tmp_path) == []
    with retention.reading(step_dir(tmp_path, 2)), retention.reading(step_dir(tmp_path, 6)):
        code, out, err = call(*words, "--yes")
    assert (code, err) == (0, "") and re.findall(r"left (\w+) as it is, because it is being read", out) == [
        "global_step_2",
        "global_step_6",
    ]
    assert out.endswith(f"deleted {size} B\n") and thinned(tmp_path) == [4]
    assert call(*words, "--yes")[0] == 0 and thinned(tmp_path) == [4, 6] and not step_dir(tmp_path, 2).exists()


def test_rotation_spares_what_a_person_pointed_back_to(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30)
    (tmp_path / POINTER).write_text("10")
    retention.rotate(tmp_path, keep=1)
    assert [info.step for info in layout.checkpoints(tmp_path)] == [10, 30]


def test_what_a_pointer_was_moved_back_behind_counts_for_nothing_that_is_kept(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30)
    (tmp_path / POINTER).write_text("10")
    for step in (12, 14, 16):
        commit(tmp_path, step)
        retention.settle(tmp_path, step, Retention(keep=2))
    candidates = [info.step for info in choice.select(tmp_path).candidates]
    assert candidates == [16, 14], "a damaged newest one needs another to go back to"
