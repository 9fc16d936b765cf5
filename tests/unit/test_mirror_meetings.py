"""The mirror and what else a run does: evaluations, a damaged disk, a full one, saves that
fail, several machines.
"""

import errno
import io
import json
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoint_fakes import commit, is_whole, save, stage
from mirror_faults import (
    URL,
    FaultyStorage,
    Killed,
    mirrored,
    restored,
    steps_in,
    trainer_of,
    uploader,
)
from mirror_faults import in_order as in_order  # a fixture

from trainer.checkpoint import fsio, layout
from trainer.errors import CannotWriteError, ResumableError
from trainer.launch import mirroring
from trainer.launch.ranks import NodeLayout
from trainer.mirror import STATE
from trainer.mirror import __main__ as process
from trainer.mirror.contents import RUN_FILES
from trainer.mirror.storage import Storage
from trainer.run.compose import load_config
from trainer.runtime.json_lines import read_object


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_an_evaluation_that_finds_the_best_checkpoint_late_has_it_kept(run_dir: Path) -> None:
    save(run_dir, 2, 4, 6)
    storage, trainer = FaultyStorage(), trainer_of(run_dir, mirror_keep=1)
    object.__setattr__(trainer, "best_metric", "eval/toy")
    own = process.uploader_of(trainer, Storage(URL, storage))
    own.sync()
    assert steps_in(storage) == [6] and not own.is_behind
    row = {"kind": "summary", "name": "eval/toy", "step": 4, "nonce": "a1b4", "mean": 0.9}
    (run_dir / "evaluations.jsonl").write_text(json.dumps(row) + "\n")
    assert own.is_behind
    own.sync()
    assert steps_in(storage) == [4, 6] and not own.is_behind


def test_a_best_checkpoint_that_is_damaged_holds_up_nothing_else(run_dir: Path) -> None:
    row = {"step": 2, "attempt": 1, "kind": "val", "ts": 1.0, "val/loss": 1.0}
    (run_dir / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    storage = FaultyStorage()
    own = uploader(run_dir, storage, mirror_keep=1)
    save(run_dir, 2)
    (run_dir / "global_step_2" / "huggingface" / "config.json").unlink()
    for step in (4, 6):
        save(run_dir, step)
        with pytest.raises(OSError, match=r"huggingface/config\.json"):
            own.sync()
        assert steps_in(storage) == [step] == read_object(run_dir / STATE)["steps"]
        assert "config.json" in read_object(run_dir / STATE)["failed"]


def test_a_disk_that_is_full_while_a_checkpoint_comes_back_is_told_and_tried_again(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, new, write, written = (
        mirrored(run_dir, 2),
        tmp_path / "new",
        fsio.HashingFile.write,
        list[bytes](),
    )

    def full(file: fsio.HashingFile, data: bytes) -> int:
        written.append(data)
        if len(written) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    with monkeypatch.context() as patched, pytest.raises(CannotWriteError, match="No space left"):
        patched.setattr(fsio.HashingFile, "write", full)
        restored(new, storage)
    assert not list(new.glob("global_step_*")) and not (new / layout.POINTER).exists()
    taken = restored(new, storage)
    assert taken is not None and is_whole(taken) and not list(new.glob(f"{layout.STAGING_PREFIX}*"))


def test_what_a_save_that_failed_left_never_goes_up(run_dir: Path) -> None:
    storage = mirrored(run_dir, 2)
    names = set(storage.store)
    own = uploader(run_dir, storage)
    stage(run_dir, 4)
    own.sync()
    commit(run_dir, 4)  # and nothing points to it
    own.sync()
    assert set(storage.store) == names
    layout.publish(run_dir, 4)
    own.sync()
    assert steps_in(storage) == [2, 4]


def test_what_a_killed_process_left_of_logs_goes_with_the_next(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_dir / "metrics.jsonl").write_text("{}\n")
    storage, new = mirrored(run_dir, 2), tmp_path / "new"
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr("shutil.copyfileobj", raise_killed)
        restored(new, storage)
    restored(new, storage)
    assert [path.name for path in new.glob(".*") if path.name != ".train.lock"] == []
    assert list(run_dir.glob(".reading_*")) == []


def archive_of(members: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def put_logs(storage: FaultyStorage, members: dict[str, bytes]) -> None:
    (name,) = [name for name in storage.store if name.endswith(RUN_FILES)]
    with storage.undisturbed():
        storage.pipe_file(name, archive_of(members))


def test_logs_that_cannot_be_unpacked_leave_nothing_in_the_checkpoint(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(source: io.BufferedReader, file: io.BufferedWriter) -> None:
        file.write(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    storage, new = mirrored(run_dir, 2), tmp_path / "new"
    put_logs(storage, {"metrics.jsonl": b"{}"})
    monkeypatch.setattr("shutil.copyfileobj", full)
    taken = restored(new, storage)
    assert (
        taken is not None
        and is_whole(taken)
        and not list(new.rglob("partial"))
        and not list(new.rglob("*.jsonl"))
    )
    assert "No space left" in caplog.text and "begin anew" in caplog.text


def test_only_logs_of_a_sane_size_are_unpacked(
    run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = mirrored(run_dir, 2)
    logs, others = ("metrics.jsonl", "proofs/x.json"), (".train.lock", "../x", "global_step_9/x")
    put_logs(storage, dict.fromkeys((*logs, *others), b"{}\n"))
    assert restored(tmp_path / "first", storage) is not None
    names = {path.name for path in (tmp_path / "first").iterdir()}
    assert {"metrics.jsonl", "proofs", "global_step_2"} <= names and "global_step_9" not in names
    assert "cannot be read" not in caplog.text
    put_logs(storage, {"metrics.jsonl": bytes(2**26)})
    assert restored(tmp_path / "second", storage) is not None
    assert (
        not (tmp_path / "second" / "metrics.jsonl").exists()
        and "unpacks to more than 64 MiB" in caplog.text
    )


def raise_killed(*words: object) -> None:
    raise Killed


def test_a_storage_silent_at_the_start_holds_up_only_who_has_nothing_to_go_on_from(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "POLL_S", 0.01)
    save(run_dir, 2)
    for path in (run_dir, tmp_path / "new"):
        storage, trainer = FaultyStorage(1, "silent"), trainer_of(path)
        object.__setattr__(trainer, "dist_timeout_s", 0.2)
        if path == run_dir:
            process._prepared(trainer, Storage(URL, storage))
            assert "has not answered for 0 s; training goes on" in caplog.text
        else:
            with pytest.raises(ResumableError, match="has not answered"):
                process._prepared(trainer, Storage(URL, storage))
        storage.answers.set()


@pytest.mark.parametrize("arrives", [True, False])
def test_other_machines_wait_for_what_arrives_and_no_longer(
    arrives: bool,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nine times as long as they would wait for nothing; the clock is made up."""
    words = ["dist_timeout_s=1000", f"checkpoint.mirror={URL}", f"default_local_dir={run_dir}"]
    staging, now, tries = (
        run_dir / f"{layout.STAGING_PREFIX}global_step_4.1",
        [0.0],
        iter(range(100)),
    )
    staging.mkdir()

    def sleep(seconds: float) -> None:
        now[0] += 600.0
        with (staging / "shard").open("ab") as file:
            file.write(b"more" if arrives else b"")

    monkeypatch.setattr(mirroring, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(mirroring, "_listens", lambda layout: next(tries) == 15)
    config = load_config([f"trainer.{word}" for word in words])
    with mirroring.mirrored(config, NodeLayout(2, 1, "head", 29500)) as refusal:
        assert refusal == (None if arrives else 75)
    assert now[0] == (9000.0 if arrives else 1800.0)
    assert ("nothing arrived from memory://bucket/run" in capsys.readouterr().err) is not arrives
