"""A storage that kills, refuses, cuts short or shows late: what stays in a mirror, and what a
machine takes of it.
"""

import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_fakes import content_of, expected_files, save, stage
from mirror_faults import (
    KINDS,
    URL,
    FaultyStorage,
    Killed,
    campaign,
    mirrored,
    restored,
    roll_back,
    steps_in,
    uploader,
)
from mirror_faults import (
    in_order as in_order,  # a fixture
)
from sweeps import some

from trainer.checkpoint import layout
from trainer.checkpoint.manifest import MANIFEST, parse_manifest
from trainer.errors import ResumableError
from trainer.mirror.contents import RUN_FILES
from trainer.mirror.storage import StorageError


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    (path / "events.jsonl").write_text("{}\n")
    return path


def is_in(storage: FaultyStorage, step: int) -> bool:
    """Whole, and nothing beside it."""
    place = f"/bucket/run/global_step_{step}/"
    found = {
        name.removeprefix(place): data
        for name, data in storage.seen().items()
        if name.startswith(place)
    }
    return found.pop(RUN_FILES, None) is not None and found == expected_files(f"global_step_{step}")


@pytest.mark.parametrize("kind", KINDS)
def test_no_fault_at_any_operation_loses_a_checkpoint_or_lets_a_wrong_one_be_taken(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    (tmp_path / "quiet").mkdir()
    num_operations = mirrored(tmp_path / "quiet", 2, 4, 6).count
    assert num_operations > 40
    points = some(range(1, num_operations + 1), 12)
    assert [line for at in points for line in campaign(at, kind, tmp_path / f"{at}")] == []


@pytest.mark.parametrize("at", range(3, 4 + len(content_of(2))))
def test_a_file_that_was_cut_is_sent_again_before_the_manifest(at: int, run_dir: Path) -> None:
    storage = FaultyStorage(at, "cut")
    save(run_dir, 2)
    own = uploader(run_dir, storage)
    with pytest.raises(StorageError, match="were sent"):
        own.sync()
    assert steps_in(storage) == []
    own.sync()
    assert is_in(storage, 2)


def test_what_another_upload_left_is_removed_before_a_new_one(run_dir: Path) -> None:
    storage = FaultyStorage(7, "killed after")
    save(run_dir, 2)
    with pytest.raises(Killed):
        uploader(run_dir, storage).sync()
    storage.revive()
    storage._put(f"{URL}/global_step_2/optim_world_size_4_rank_3.pt", b"of other ranks")
    uploader(run_dir, storage).sync()
    assert is_in(storage, 2)


def test_a_download_that_ends_early_is_read_again(run_dir: Path, tmp_path: Path) -> None:
    storage = mirrored(run_dir, 2, 4)
    for at in range(1, 30):
        storage.faults = {storage.count + at: "cut"}
        try:
            taken = restored(tmp_path / str(at), storage)
        except ResumableError:
            continue
        assert (
            taken is not None
            and taken.name == "global_step_4"
            and (taken.parent / "events.jsonl").exists()
        )


def test_what_a_rollback_discarded_stays_until_its_target_is_up(
    run_dir: Path, tmp_path: Path
) -> None:
    storage = mirrored(run_dir, 4)
    save(run_dir, 6)
    own = uploader(run_dir, storage, mirror_keep=1)
    own.sync()
    roll_back(run_dir, 4, 6)
    storage.faults = {storage.count + 6: "refused"}
    with pytest.raises(StorageError):
        own.sync()
    assert restored(tmp_path / "new", storage) is not None
    own.sync()
    assert steps_in(storage) == [4]


def test_a_step_that_is_saved_anew_is_never_taken_as_it_was_before(tmp_path: Path) -> None:
    for at in range(1, 12):
        run_dir = tmp_path / f"{at}" / "run"
        run_dir.mkdir(parents=True)
        storage = mirrored(run_dir, 2, 4, 6, mirror_keep=3)
        (run_dir / layout.POINTER).write_text("2")
        uploader(run_dir, storage, mirror_keep=3).sync()
        staging = stage(run_dir, 4)
        manifest = replace(parse_manifest((staging / MANIFEST).read_bytes()), nonce="anew")
        (staging / MANIFEST).write_text(manifest.to_json())
        layout.commit(staging, 4, nonce="anew")
        layout.publish(run_dir, 4)
        storage.faults = {storage.count + at: "killed before"}
        with pytest.raises(Killed):
            uploader(run_dir, storage, mirror_keep=3).sync()
        storage.revive()
        assert (
            restored(run_dir.with_name("new"), storage)
            == run_dir.with_name("new") / "global_step_2"
        ), at


@pytest.mark.parametrize("kind", ["cut", "late"])
def test_a_pointer_that_is_not_seen_is_no_success(kind: str, run_dir: Path, tmp_path: Path) -> None:
    storage = mirrored(run_dir, 2, 4)
    own = uploader(run_dir, storage)
    roll_back(run_dir, 2)
    storage.faults, storage.late_by = {storage.count + 5: kind}, 9
    with pytest.raises(StorageError):
        own.sync()
    for _ in range(4):
        with suppress(StorageError):
            own.sync()
    taken = restored(tmp_path / "new", storage)
    assert taken is not None and taken.name == "global_step_2"
