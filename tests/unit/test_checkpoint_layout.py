"""Which checkpoint a run continues from: every state of the run directory has one right answer,
never step 0.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_fakes import commit, is_whole, rewrite_manifest, save, stage, write_unfinished

from trainer.checkpoint import fsio, layout, retention
from trainer.checkpoint.choice import NoUsableCheckpointError, Selection, select
from trainer.checkpoint.layout import POINTER, inspect, publish
from trainer.checkpoint.manifest import MANIFEST, verify_files
from trainer.checkpoint.retention import Retention


def steps(run_dir: Path) -> list[int]:
    return [info.step for info in select(run_dir).candidates]


def point(run_dir: Path, text: str) -> None:
    (run_dir / POINTER).write_text(text)


@pytest.mark.parametrize(
    ("name", "step"),
    [("global_step_0", 0), ("global_step_12", 12)]
    + [
        (f"global_step_{bad}", None)
        for bad in ("", "-1", "01", "1 ", "1\n", "1.0", "x", "٣", "1.old")
    ]
    + [
        (name, None)
        for name in (
            ".corrupt_global_step_1.0",
            ".staging_global_step_1.ab",
            "step_1",
            "Global_step_1",
        )
    ],
)
def test_only_exact_names_are_steps(name, step):
    assert layout.parse_step(name) == step


@pytest.mark.covers("S3.17", "S3.18", "S3.19", "S3.20")
def test_file_names_are_those_other_tools_know():
    assert layout.step_dir_name(12) == "global_step_12"
    assert layout.model_file(8, 3) == "model_world_size_8_rank_3.pt"
    assert layout.optim_file(8, 3) == "optim_world_size_8_rank_3.pt"
    assert layout.extra_file(8, 3) == "extra_state_world_size_8_rank_3.pt"


def test_a_new_run_directory_has_nothing_to_continue(tmp_path):
    assert select(tmp_path / "missing") == select(tmp_path) == Selection()
    stage(tmp_path, 10)
    (tmp_path / ".trash_global_step_5.ab").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    assert select(tmp_path).chosen is None


@pytest.mark.covers("S3.16", "S3.26")
def test_the_pointer_is_followed_without_remark(tmp_path):
    save(tmp_path, 9, 10, 100)
    assert (tmp_path / POINTER).read_text() == "100"
    selection = select(tmp_path)
    assert [info.step for info in selection.candidates] == [100, 10, 9] and selection.notes == ()
    assert selection.chosen is not None and selection.chosen.manifest is not None
    assert selection.chosen.published and selection.chosen.manifest.step == 100


def test_a_pointer_to_a_damaged_or_uncommitted_directory_falls_back(tmp_path):
    save(tmp_path, 10, 20)
    (tmp_path / "global_step_20" / "data.pt").unlink()
    selection = select(tmp_path)
    assert [info.step for info in selection.candidates] == [10]
    assert "'20'" in selection.notes[0] and "global_step_10" in selection.notes[0]
    assert (
        selection.notes[1]
        == "WARNING: passed over global_step_20: data.pt: No such file or directory"
    )


def test_a_crash_before_publish_rolls_forward(tmp_path):
    commit(tmp_path, 10)
    assert steps(tmp_path) == [10] and not select(tmp_path).notes[0].startswith("WARNING")
    publish(tmp_path, 10)
    commit(tmp_path, 20)
    selection = select(tmp_path)
    assert [info.step for info in selection.candidates] == [
        20,
        10,
    ] and "global_step_20" in selection.notes[0]
    (tmp_path / POINTER).write_text("20")  # a crash between pointer and mark
    assert steps(tmp_path) == [20, 10] and select(tmp_path).notes == ()


def test_a_pointer_moved_back_by_hand_is_honoured(tmp_path):
    save(tmp_path, 10, 20, 30)
    point(tmp_path, "20\n")
    selection = select(tmp_path)
    assert [info.step for info in selection.candidates] == [20, 10]
    assert "moved back to global_step_20" in selection.notes[0]
    # the continued run dies between commit and publish, beside the abandoned 30
    commit(tmp_path, 25)
    assert steps(tmp_path) == [25, 20, 10]


NEVER_STEP_0: list[Callable[[Path], object]] = [
    lambda run: point(run, "10"),
    lambda run: point(run, ""),
    lambda run: write_unfinished(run, 10),
    lambda run: (run / "global_step_10").mkdir(),
    lambda run: (run / "global_step_10").touch(),
    lambda run: (run / "global_step_10").symlink_to(commit(run.parent, 10)),
    lambda run: (commit(run, 10) / MANIFEST).write_text("{"),
    lambda run: (commit(run, 10) / "fsdp_config.json").unlink(),
    lambda run: os.truncate(commit(run, 10) / "data.pt", 1),
    lambda run: layout.quarantine(commit(run, 10), "hash"),
]


@pytest.mark.parametrize("damage", NEVER_STEP_0, ids=range(len(NEVER_STEP_0)))
def test_damage_never_means_a_silent_start_at_step_0(tmp_path, damage):
    run = tmp_path / "run"
    run.mkdir()
    damage(run)
    with pytest.raises(
        NoUsableCheckpointError,
        match=r"(?s)(global_step_10|: '1?0?'|missing).*trainer.experiment_name",
    ):
        select(run)


def reason_after(path: Path, change: Callable[[Path], object]) -> str:
    change(path)
    info = inspect(path)
    assert info.status == "incomplete"
    return info.reason


@pytest.mark.covers("S3.53")
def test_reasons_name_the_file(tmp_path):
    def edit(key: str, value: object) -> Callable[[Path], object]:
        return lambda path: rewrite_manifest(path, lambda tree: tree.update({key: value}))

    cases: list[tuple[Callable[[Path], object], str]] = [
        (lambda p: os.truncate(p / "data.pt", 2), "data.pt has 2 bytes, 7 were written"),
        (
            lambda p: (p / layout.model_file(2, 1)).unlink(),
            "model_world_size_2_rank_1.pt: No such file",
        ),
        (edit("step", 11), "manifest.json: it belongs to step 11"),
        (edit("format", 9), "format 9 is not format 2"),
        (
            edit("files", [{"path": "../x", "size_bytes": 0, "sha256": "0" * 64}]),
            "paths inside the checkpoint",
        ),
        (
            edit("files", [{"path": "a" * 300, "size_bytes": 0, "sha256": "0" * 64}]),
            "File name too long",
        ),
        (lambda p: (p / MANIFEST).unlink(), ""),
    ]
    for step, (change, expected) in enumerate(cases[:-1]):
        assert expected in reason_after(commit(tmp_path, 10 + step), change)
    bare = commit(tmp_path, 99)
    assert "its save did not finish" in reason_after(bare, cases[-1][0])
    save(tmp_path, 100)
    assert (
        reason_after(tmp_path / "global_step_100", cases[-1][0]) == "its manifest.json was removed"
    )


@pytest.mark.covers("S3.54")
def test_publish_repairs_and_then_writes_nothing(tmp_path, monkeypatch):
    save(tmp_path, 10)
    commit(tmp_path, 20)
    # the rename of the pointer may not be on the disk yet: write it again before the mark
    point(tmp_path, "20")
    order: list[str] = []
    write, write_file = fsio.atomic_write, fsio.write_file
    monkeypatch.setattr(fsio, "atomic_write", lambda p, d: (order.append(p.name), write(p, d)))
    monkeypatch.setattr(
        fsio,
        "write_file",
        lambda p, d, root: (order.append(p.name), write_file(p, d, root=root))[1],
    )
    publish(tmp_path, 20)
    assert [name for name in order if not name.endswith(".tmp")] == [POINTER, ".published"]
    order.clear()
    publish(tmp_path, 20)
    assert order == []


def test_commit_sets_an_abandoned_attempt_aside_but_never_the_pointers_target(
    tmp_path,
):
    save(tmp_path, 10, 20)
    with pytest.raises(FileExistsError, match="never replaced"):
        commit(tmp_path, 20)
    assert is_whole(tmp_path / "global_step_20")
    point(tmp_path, "10")
    (tmp_path / "global_step_20" / "data.pt").write_bytes(b"abandoned")
    assert is_whole(commit(tmp_path, 20))
    assert (tmp_path / ".corrupt_global_step_20.0" / "data.pt").read_bytes() == b"abandoned"
    assert (
        layout.quarantine(tmp_path / "global_step_20", "test").name == ".corrupt_global_step_20.1"
    )


def test_leftovers_are_removed_and_nothing_else(tmp_path, caplog):
    save(tmp_path, 10)
    layout.quarantine(commit(tmp_path, 11), "test")
    stage(tmp_path, 20)
    stage(tmp_path, 20)
    fsio.rename(commit(tmp_path, 5), tmp_path / ".trash_global_step_5.ab")
    for name in (POINTER, "rollbacks.json", ".train.lock"):
        fsio.temporary_path(tmp_path / name).touch()
    # under way, beside a run that trains
    fsio.make_dirs(export := fsio.temporary_path(tmp_path / "export"))
    (tmp_path / ".train.lock").touch()
    outside = tmp_path.with_name(tmp_path.name + "_outside")
    outside.mkdir()
    (tmp_path / ".trash_link").symlink_to(outside)
    caplog.clear()
    layout.clean_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(
        [".corrupt_global_step_11.0", ".train.lock", export.name, "global_step_10", POINTER]
    )
    assert outside.is_dir() and is_whole(tmp_path / "global_step_10") and not caplog.records


@pytest.mark.covers("S3.24")
def test_rotation_keeps_newest_pointer_protected_and_all_that_is_not_committed(
    tmp_path,
):
    save(tmp_path, 5, 6, 9, 10, 20, 30)
    write_unfinished(tmp_path, 1)
    (commit(tmp_path, 40) / "data.pt").unlink()
    point(tmp_path, "9")

    def victims(keep: int | None, protect: frozenset[int] = frozenset()) -> list[str]:
        return [
            path.name
            for path in retention.checkpoints_to_delete(tmp_path, keep=keep, protect=protect)
        ]

    assert victims(1) == ["global_step_5", "global_step_6", "global_step_10", "global_step_20"]
    assert victims(2) == ["global_step_5", "global_step_10"]
    assert victims(1, frozenset({6})) == ["global_step_5", "global_step_10", "global_step_20"]
    assert victims(None) == [] and victims(9) == []
    with pytest.raises(ValueError, match="at least 1"):
        victims(0)
    retention.rotate(tmp_path, keep=1)
    assert sorted(os.listdir(tmp_path)) == sorted(
        [f"global_step_{step}" for step in (1, 9, 30, 40)] + [POINTER]
    )


def test_what_could_not_be_pointed_to_does_not_outrank_a_pointer_moved_back_later(
    tmp_path,
):
    save(tmp_path, 4)
    commit(tmp_path, 6)
    commit(tmp_path, 8)
    retention.settle(tmp_path, 8, Retention())
    point(tmp_path, "4")
    assert steps(tmp_path) == [4]


def test_a_committed_checkpoint_stays_saved_when_memory_ends_while_it_is_published(
    tmp_path, monkeypatch
):
    def fail(operation: fsio.Operation) -> None:
        raise MemoryError

    save(tmp_path, 4)
    commit(tmp_path, 6)
    monkeypatch.setattr(fsio, "observer", fail)
    retention.settle(tmp_path, 6, Retention(keep=1))
    assert steps(tmp_path) == [6, 4]


@pytest.mark.covers("S3.52")
def test_a_lost_export_does_not_lose_the_checkpoint(tmp_path):
    save(tmp_path, 10, 20)
    shutil.rmtree(tmp_path / "global_step_20" / "huggingface")
    info = inspect(tmp_path / "global_step_20")
    assert info.status == "committed" and steps(tmp_path) == [20, 10]
    assert info.manifest is not None
    assert verify_files(info.path, info.manifest) == [
        "huggingface/config.json: No such file or directory"
    ]
