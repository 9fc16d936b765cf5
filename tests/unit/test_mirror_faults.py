"""Faults of a storage: no checkpoint is lost, and no wrong one is restored."""

import errno
import io
import logging
import tarfile
from contextlib import contextmanager, suppress

import pytest
from checkpoint_fakes import content_of, expected_files, is_whole, save
from mirror_faults import (
    KINDS,
    LAST_FAULT,
    URL,
    FaultyStorage,
    Killed,
    Trial,
    mirrored,
    restored,
    roll_back,
    steps_in,
    uploader,
)
from mirror_faults import in_order as in_order  # fixtures
from mirror_faults import run_dir as run_dir
from sweeps import some

from trainer.checkpoint import fsio, layout, rollback
from trainer.checkpoint.choice import NoUsableCheckpointError
from trainer.checkpoint.storage import StorageError
from trainer.errors import CannotWriteError, ResumableError
from trainer.runtime.evaluations import read_summaries
from trainer.tools.mirror import upload
from trainer.tools.mirror.contents import RUN_FILES


@pytest.mark.parametrize("kind", KINDS)
def test_no_fault_at_any_operation_loses_a_checkpoint_or_lets_a_wrong_one_be_taken(
    kind, tmp_path, caplog
):
    caplog.set_level(logging.CRITICAL)
    for at in some(range(1, LAST_FAULT), 12):
        Trial(at, tmp_path / f"{at}", FaultyStorage({at: kind})).run()


def test_faults_that_come_together_lose_no_checkpoint_and_let_no_wrong_one_be_taken(
    tmp_path, caplog
):
    caplog.set_level(logging.CRITICAL)
    for seed in some(range(1, 301), 12):
        Trial(seed, tmp_path / f"{seed}").run()


@pytest.mark.parametrize("at", range(12, 13 + len(content_of(2))))
def test_a_file_that_was_cut_is_sent_again_before_the_manifest(at, run_dir):
    storage = FaultyStorage({at: "cut"})
    save(run_dir, 2)
    own = uploader(run_dir, storage)
    with pytest.raises(StorageError, match="were sent"):
        own.sync()
    assert steps_in(storage) == []
    own.sync()
    assert is_in(storage, 2)


def is_in(storage, step):
    """Return True if the mirror holds the complete checkpoint and no other file."""
    place = f"/bucket/run/global_step_{step}/"
    found = {
        name.removeprefix(place): data
        for name, data in storage.seen().items()
        if name.startswith(place)
    }
    return found.pop(RUN_FILES, None) is not None and found == expected_files(f"global_step_{step}")


EVALUATED = '{"kind":"summary","name":"eval/acc","step":6,"mean":0.61}\n'


def has_all_results(path):
    return (
        [entry.target_step for entry in rollback.read(path).entries] == [6]
        and read_summaries(path).keys() == {"eval/acc"}
        and (path / "proofs" / "step_6.json").exists()
    )


def test_a_download_that_ends_early_is_read_again(run_dir, tmp_path):
    storage = mirrored(run_dir, 2, 4)
    for at in range(1, 30):
        storage.fail_in(at, "cut")
        with suppress(ResumableError):
            new = tmp_path / str(at)
            assert restored(new, storage) == new / "global_step_4"
            assert (new / "metrics.jsonl").exists()


def test_what_a_rollback_discarded_stays_until_its_target_is_up(run_dir, tmp_path):
    storage = mirrored(run_dir, 4, 6, 8)
    own = uploader(run_dir, storage)
    own.sync()
    roll_back(run_dir, 4)
    storage.fail_in(6, "refused")
    with pytest.raises(StorageError):
        own.sync()
    assert restored(tmp_path / "new", storage)
    own.sync()
    assert steps_in(storage) == [4]


@pytest.mark.parametrize("kind", ["", "killed within", "killed after", "cut"])
def test_results_of_a_checkpoint_that_is_already_up_are_restored(kind, run_dir, tmp_path):
    """A run that was rolled back and lost its machine trained the skipped batches after all. At
    every operation, a restore of the rollback's target must also restore the rollback.
    """
    storage = mirrored(run_dir, 4, 6, 8)
    roll_back(run_dir, 6)
    (run_dir / "evaluations.jsonl").write_text(EVALUATED)
    (run_dir / "proofs").mkdir()
    (run_dir / "proofs" / "step_6.json").write_text("{}")
    own = uploader(run_dir, storage)
    for at in range(1, 20 if kind else 2):
        storage.fail_in(at, kind)
        with suppress(StorageError, Killed):
            own.sync()
        if storage.revive():
            own = uploader(run_dir, storage)
        with storage.undisturbed():
            taken = restored(tmp_path / f"{at}", storage)
        assert (tmp_path / f"{at}" / "metrics.jsonl").exists(), at
        assert taken.name == "global_step_8" or has_all_results(tmp_path / f"{at}"), at
    storage.faults = {}
    own.sync()
    assert restored(tmp_path / "new", storage).name == "global_step_6"
    assert has_all_results(tmp_path / "new")
    assert not own.is_behind
    (run_dir / "evaluations.jsonl").write_text(EVALUATED.replace("0.61", "0.62"))
    assert own.is_behind


def test_a_mirror_waits_for_the_end_of_a_rollback(run_dir, tmp_path, monkeypatch):
    """The mirror lost the checkpoint that the pointer still named, and kept older logs without a
    rollback.
    """
    storage = mirrored(run_dir, 4, 6, 8)
    own = uploader(run_dir, storage)
    own.sync()
    with monkeypatch.context() as patched:
        patched.setattr(rollback, "complete", lambda run_dir: None)
        roll_back(run_dir, 6)
    before = dict(storage.store)
    own.sync()
    assert storage.store == before
    rollback.complete(run_dir)
    assert own.is_behind
    own.sync()
    assert restored(tmp_path / "new", storage).name == "global_step_6"
    assert rollback.read(tmp_path / "new").entries


@pytest.mark.parametrize("is_up", [False, True])
def test_logs_of_a_checkpoint_never_discard_it(is_up, run_dir, tmp_path, monkeypatch):
    """The run was rolled back while its newest checkpoint, or new results, were uploaded. Without
    the target, no start could complete the rollback.
    """
    storage = mirrored(run_dir, 6)
    save(run_dir, 4, 8)
    own = uploader(run_dir, storage)
    if is_up:
        own.sync()
        (run_dir / "evaluations.jsonl").write_text(EVALUATED)
    pack = upload.packed

    @contextmanager
    def packed_after_a_rollback(path):
        roll_back(run_dir, 4)
        with pack(path) as archive:
            yield archive

    with monkeypatch.context() as patched:
        patched.setattr(upload, "packed", packed_after_a_rollback)
        own.sync()
    taken = restored(tmp_path / "new", storage)
    discarded = rollback.read(tmp_path / "new").discarded_nonces
    assert layout.inspect(taken).nonce not in discarded


def test_a_run_that_saves_anew_before_its_rollback_is_up_loses_no_rollback(run_dir, tmp_path):
    storage = mirrored(run_dir, 4, 6, 8)
    roll_back(run_dir, 6)
    save(run_dir, 8, nonce="anew")
    for at in range(1, 22):
        storage.fail_in(at, "killed before")
        with suppress(Killed):
            uploader(run_dir, storage).sync()
        storage.revive()
        with storage.undisturbed():
            taken = restored(tmp_path / f"{at}", storage)
        is_undone = (taken / "data.pt").read_bytes() == b"data 8"
        assert is_undone or rollback.read(tmp_path / f"{at}").entries, at


def test_a_step_that_is_saved_anew_is_never_taken_as_it_was_before(tmp_path):
    for at in range(1, 14):
        run_dir = tmp_path / f"{at}" / "run"
        run_dir.mkdir(parents=True)
        storage = mirrored(run_dir, 2, 4)
        (run_dir / layout.POINTER).write_text("2")
        uploader(run_dir, storage).sync()
        save(run_dir, 4, nonce="anew")
        storage.fail_in(at, "killed before")
        with pytest.raises(Killed):
            uploader(run_dir, storage).sync()
        storage.revive()
        new = run_dir.with_name("new")
        assert restored(new, storage) == new / "global_step_2", at


@pytest.mark.parametrize("kind", ["cut", "late"])
def test_a_pointer_that_is_not_seen_is_no_success(kind, run_dir, tmp_path):
    storage = mirrored(run_dir, 2, 4)
    own = uploader(run_dir, storage)
    own.sync()
    (run_dir / layout.POINTER).write_text("2")
    storage.fail_in(11, kind)
    storage.late_by = 9
    with pytest.raises(StorageError):
        own.sync()
    for _ in range(4):
        with suppress(StorageError):
            own.sync()
    assert restored(tmp_path / "new", storage).name == "global_step_2"


def test_a_damaged_file_lets_the_one_before_be_taken(run_dir, tmp_path, caplog):
    storage = mirrored(run_dir, 2, 4)
    storage._put(f"{URL}/global_step_4/data.pt", b"dAta 4")
    new = tmp_path / "new"
    assert restored(new, storage) == new / "global_step_2" and is_whole(new / "global_step_2")
    assert not list(new.glob(".staging_*")), "the damaged one takes no room"
    assert "data.pt differs" in caplog.text
    storage._put(f"{URL}/global_step_2/data.pt", b"dAta 2")
    with pytest.raises(NoUsableCheckpointError):
        restored(tmp_path / "newer", storage)


def test_a_disk_that_is_full_while_a_checkpoint_comes_back_is_told_and_tried_again(
    run_dir, tmp_path, monkeypatch
):
    storage = mirrored(run_dir, 2)
    new = tmp_path / "new"
    write = fsio.HashingFile.write
    written = []

    def full(file, data):
        written.append(data)
        if len(written) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    with monkeypatch.context() as patched, pytest.raises(CannotWriteError, match="No space left"):
        patched.setattr(fsio.HashingFile, "write", full)
        restored(new, storage)
    assert not list(new.glob("global_step_*")) and not (new / layout.POINTER).exists()
    assert is_whole(restored(new, storage))


def put_logs(storage, *members, data=b"{}\n"):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    (name,) = [name for name in storage.store if name.endswith(RUN_FILES)]
    with storage.undisturbed():
        storage.pipe_file(name, packed.getvalue())


def test_only_logs_of_a_sane_size_are_unpacked(run_dir, tmp_path, caplog):
    storage = mirrored(run_dir, 2)
    new = tmp_path / "new"
    put_logs(storage, "metrics.jsonl", "proofs/x.json", ".train.lock", "../x", "global_step_9/x")
    assert restored(new, storage)
    assert {"metrics.jsonl", "proofs", "global_step_2"} <= {path.name for path in new.iterdir()}
    assert not (new / "global_step_9").exists() and not (tmp_path / "x").exists()
    assert "cannot be read" not in caplog.text
    put_logs(storage, "metrics.jsonl", data=bytes(2**26))
    assert restored(tmp_path / "second", storage)
    assert not (tmp_path / "second" / "metrics.jsonl").exists()
    assert "unpacks to more than 64 MiB" in caplog.text


def test_two_processes_never_upload_one_run_at_once(run_dir):
    storage = FaultyStorage()
    save(run_dir, 2)
    first = uploader(run_dir, storage)
    second = uploader(run_dir, storage)
    refused = []

    def put_file(lpath, rpath, **kwargs):
        if not refused:
            with pytest.raises(StorageError, match="another process is uploading") as error:
                second.sync()
            refused.append(error)
        FaultyStorage.put_file(storage, lpath, rpath)

    storage.put_file = put_file
    first.sync()
    assert refused and not first.is_behind
    second.sync()
