"""The checkpoint from which a run continues: every state of the run directory has one right answer,
never step 0.
"""

import errno
import os
from pathlib import Path

import pytest
from checkpoint_fakes import (
    commit,
    expected_files,
    files_of,
    is_whole,
    rewrite_manifest,
    save,
    stage,
    write_unfinished,
)

from trainer.checkpoint import fsio, layout, retention
from trainer.checkpoint.choice import NoUsableCheckpointError, Selection, select
from trainer.checkpoint.layout import POINTER, inspect, publish
from trainer.checkpoint.lock import has_ended_in_order
from trainer.checkpoint.manifest import MANIFEST
from trainer.runtime.progress import History


def steps(run_dir):
    return [info.step for info in select(run_dir).candidates]


def point(run_dir, text):
    (run_dir / POINTER).write_text(text)


def test_only_exact_names_are_steps():
    assert layout.parse_step("global_step_0") == 0 and layout.parse_step("global_step_12") == 12
    endings = ("", "-1", "01", "1 ", "1\n", "1.0", "x", "٣", "1.old")
    others = (".corrupt_global_step_1.0", ".staging_global_step_1.ab", "step_1", "Global_step_1")
    for name in (*(f"global_step_{ending}" for ending in endings), *others):
        assert layout.parse_step(name) is None, name


def test_a_new_run_directory_has_nothing_to_continue(tmp_path):
    assert select(tmp_path / "missing") == select(tmp_path) == Selection()
    stage(tmp_path, 10)
    (tmp_path / ".trash_global_step_5.ab").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    assert select(tmp_path).chosen is None


@pytest.mark.covers("S3.16 S3.26")
def test_the_pointer_is_followed_without_remark(tmp_path):
    save(tmp_path, 9, 10, 100)
    assert (tmp_path / POINTER).read_text() == "100"
    assert steps(tmp_path) == [100, 10, 9] and select(tmp_path).notes == ()


NEVER_STEP_0 = [
    lambda run: point(run, "10"),
    lambda run: point(run, ""),
    lambda run: write_unfinished(run, 10),
    lambda run: (run / "global_step_10").mkdir(),
    lambda run: (run / "global_step_10").touch(),
    lambda run: (run / "global_step_10").symlink_to(commit(run.parent, 10)),
    lambda run: (commit(run, 10) / MANIFEST).write_text("{"),
    lambda run: layout.quarantine(commit(run, 10), "hash"),
]


@pytest.mark.parametrize("damage", NEVER_STEP_0, ids=range(len(NEVER_STEP_0)))
def test_damage_never_means_a_silent_start_at_step_0(tmp_path, damage):
    run = tmp_path / "run"
    run.mkdir()
    damage(run)
    named = r"(?s)(global_step_10|: '1?0?'|None).*trainer.experiment_name"
    with pytest.raises(NoUsableCheckpointError, match=named):
        select(run)


def edited(key, value):
    return lambda path: rewrite_manifest(path, lambda tree: tree.update({key: value}))


def listed(path):
    return [{"path": path, "size_bytes": 0, "sha256": "0" * 64}]


REASONS = [
    (lambda p: os.truncate(p / "data.pt", 2), "data.pt has 2 bytes, but 8 were written"),
    (lambda p: (p / layout.model_file(2, 1)).unlink(), "model_world_size_2_rank_1.pt: No such"),
    (edited("step", 11), "manifest.json: it belongs to step 11"),
    (edited("format", 9), "format 9 is not format 2"),
    (edited("files", listed("../x")), "paths inside the checkpoint"),
    (edited("files", listed("a" * 300)), "File name too long"),
    (lambda p: (p / MANIFEST).unlink(), "manifest.json"),
]


@pytest.mark.covers("S3.53")
@pytest.mark.parametrize(("change", "expected"), REASONS, ids=range(len(REASONS)))
def test_reasons_name_the_file(tmp_path, change, expected):
    save(tmp_path, 100)
    change(tmp_path / "global_step_100")
    info = inspect(tmp_path / "global_step_100")
    assert info.status == "incomplete" and expected in info.reason


@pytest.mark.covers("S3.54")
def test_publish_repairs_and_then_writes_nothing(tmp_path, monkeypatch):
    save(tmp_path, 10)
    commit(tmp_path, 20)
    # The rename of the pointer may not be on the disk yet: it is written again before the mark.
    point(tmp_path, "20")
    renamed_or_created = []

    def observe(operation):
        if operation.kind in ("rename", "create"):
            renamed_or_created.append((operation.target or operation.path).name)

    monkeypatch.setattr(fsio, "observer", observe)
    publish(tmp_path, 20)
    assert renamed_or_created[1:] == [POINTER, ".published"]
    renamed_or_created.clear()
    publish(tmp_path, 20)
    assert renamed_or_created == []


def test_commit_sets_an_abandoned_attempt_aside_but_never_the_pointers_target(tmp_path):
    save(tmp_path, 10, 20)
    with pytest.raises(FileExistsError, match="never replaced"):
        commit(tmp_path, 20)
    assert is_whole(tmp_path / "global_step_20")
    point(tmp_path, "10")
    (tmp_path / "global_step_20" / "data.pt").write_bytes(b"cut")
    assert is_whole(commit(tmp_path, 20))
    assert (tmp_path / ".corrupt_global_step_20.0" / "data.pt").read_bytes() == b"cut"
    aside = layout.quarantine(tmp_path / "global_step_20", "test")
    assert aside.name == ".corrupt_global_step_20.1"


def test_a_good_checkpoint_after_a_pointer_moved_back_is_not_called_corrupt(tmp_path):
    """The checkpoint was renamed to `.corrupt_*` when its step was saved again."""
    save(tmp_path, 10, 20)
    point(tmp_path, "10")
    commit(tmp_path, 20, nonce="other")
    assert list(tmp_path.glob(".corrupt_*")) == []
    assert (
        files_of(tmp_path / ".discarded_global_step_20.0").items()
        >= expected_files("global_step_20").items()
    )


def test_leftovers_are_removed_and_nothing_else(tmp_path, caplog):
    save(tmp_path, 10)
    layout.quarantine(commit(tmp_path, 11), "test")
    stage(tmp_path, 20)
    stage(tmp_path, 20)
    fsio.rename(commit(tmp_path, 5), tmp_path / ".trash_global_step_5.ab")
    for name in (POINTER, "rollbacks.json", ".train.lock"):
        fsio.temporary_path(tmp_path / name).touch()
    fsio.make_dirs(export := fsio.temporary_path(tmp_path / "export"))  # in progress
    (tmp_path / ".train.lock").touch()
    outside = tmp_path.with_name(tmp_path.name + "_outside")
    outside.mkdir()
    (tmp_path / ".trash_link").symlink_to(outside)
    caplog.clear()
    last = inspect(tmp_path / "global_step_10")
    assert len(layout.leftovers(tmp_path)) == 7 and not has_ended_in_order(tmp_path, last)
    layout.clean_leftovers(tmp_path)
    kept = [".corrupt_global_step_11.0", ".train.lock", export.name, "global_step_10", POINTER]
    assert sorted(os.listdir(tmp_path)) == sorted(kept)
    assert outside.is_dir() and is_whole(tmp_path / "global_step_10") and not caplog.records
    assert has_ended_in_order(tmp_path, last)


def test_a_displaced_run_cannot_commit_a_save_that_the_next_run_is_deleting(tmp_path, monkeypatch):
    """The run published an incomplete checkpoint."""
    staging = stage(tmp_path, 20)
    results = []

    def commit_late(operation):
        if operation.kind == "unlink":
            monkeypatch.setattr(fsio, "observer", None)
            with pytest.raises(FileNotFoundError):
                layout.commit(staging, 20, nonce="other")
            results.append(layout.checkpoints(tmp_path))

    monkeypatch.setattr(fsio, "observer", commit_late)
    layout.clean_leftovers(tmp_path)
    assert results == [[]]


@pytest.mark.covers("S3.24")
def test_rotation_keeps_newest_pointer_protected_and_all_that_is_not_committed(tmp_path):
    save(tmp_path, 5, 6, 9, 10, 20, 30)
    write_unfinished(tmp_path, 1)
    (commit(tmp_path, 40) / "data.pt").unlink()
    point(tmp_path, "9")

    def victims(keep, *protect):
        paths = retention.checkpoints_to_delete(tmp_path, keep=keep, protect=set(protect))
        return [layout.parse_step(path.name) for path in paths]

    assert victims(1) == [5, 6, 10, 20] and victims(1, 6) == [5, 10, 20]
    assert victims(2) == [5, 10] and victims(None) == victims(9) == []
    retention.rotate(tmp_path, keep=1)
    kept = [POINTER, *(f"global_step_{step}" for step in (1, 9, 30, 40))]
    assert sorted(os.listdir(tmp_path)) == sorted(kept)


def test_checkpoints_beyond_a_pointer_moved_back_are_not_counted_as_kept(tmp_path):
    save(tmp_path, 10, 20, 30)
    point(tmp_path, "10")
    for step in (12, 14, 16):
        commit(tmp_path, step)
        retention.settle(tmp_path, step, keep=2, history=History())
    assert steps(tmp_path) == [16, 14], "a damaged newest one needs another to fall back on"


def test_an_unpublished_checkpoint_does_not_outrank_a_pointer_moved_back_later(tmp_path):
    save(tmp_path, 4)
    commit(tmp_path, 6)
    commit(tmp_path, 8)
    retention.settle(tmp_path, 8, keep=None, history=History())
    point(tmp_path, "4")
    assert steps(tmp_path) == [4]


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOSPC, "full")])
@pytest.mark.parametrize("place", [(fsio, "atomic_write"), (retention, "worth_keeping")])
def test_an_error_after_the_commit_does_not_undo_it(tmp_path, monkeypatch, caplog, place, error):
    def fail(*_):
        raise error

    save(tmp_path, 1)
    commit(tmp_path, 2)
    with monkeypatch.context() as patched:
        patched.setattr(*place, fail)
        retention.settle(tmp_path, 2, keep=1, history=History())
    assert "is committed, but" in caplog.text and steps(tmp_path) == [2, 1]
    retention.settle(tmp_path, 2, keep=1, history=History())
    assert steps(tmp_path) == [2]


def test_a_rename_that_was_carried_out_and_reported_as_failed_counts(tmp_path, monkeypatch):
    """A server carried out the rename, the reply was lost, and the retry finds nothing."""
    real = os.rename

    def rename(source, target):
        real(source, target)
        raise OSError(errno.ESTALE, "Stale file handle", str(source))

    save(tmp_path, 1)
    staging = stage(tmp_path, 2)
    monkeypatch.setattr(os, "rename", rename)
    layout.commit(staging, 2, nonce="a1b2")
    assert layout.inspect(tmp_path / "global_step_2").status == "committed"


def test_another_runs_checkpoint_of_the_same_step_is_not_mistaken_for_ours(tmp_path, monkeypatch):
    staging = stage(tmp_path, 2)
    real = os.rename

    def lose_the_race(source, target):
        fsio.remove_tree(Path(source))
        monkeypatch.setattr(os, "rename", real)
        commit(tmp_path, 2)
        raise OSError(errno.ENOENT, "No such file or directory", str(source))

    monkeypatch.setattr(os, "rename", lose_the_race)
    with pytest.raises(OSError, match="No such file"):
        layout.commit(staging, 2, nonce="ffff")


def test_the_weights_of_an_adapter_are_not_advised_as_a_model(tmp_path):
    (tmp_path / "huggingface").mkdir()
    assert "model.partial_pretrain=" in layout.new_run_from(tmp_path)
    (tmp_path / "huggingface/adapter_config.json").touch()
    assert "model.lora_adapter_path=" in layout.new_run_from(tmp_path)
