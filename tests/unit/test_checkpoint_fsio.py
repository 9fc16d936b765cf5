"""Files of a checkpoint: hashed, synced, exclusive, atomic; errors name the place."""

import ast
import errno
import hashlib
import os
import threading
import time
from pathlib import Path

import pytest
from processes import run_python

from trainer.checkpoint import fsio
from trainer.checkpoint.fsio import FileRecord

RECORD = FileRecord("shard.pt", 5, "0" * 64)
CHANGES = {"mkdir", "rename", "unlink", "rmdir", "write_bytes", "write_text", "fsync"}
OTHER_FILES = {"lock", "reading", "requests"}
"""Modules that change only files outside checkpoints."""


def test_no_other_module_changes_the_files_of_a_checkpoint():
    """Otherwise the crash states, which follow `fsio.observer`, would miss an operation."""
    found = []
    for file in Path(fsio.__file__).parent.glob("*.py"):
        calls = (
            node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)
        )
        for called in (ast.unparse(call.func) for call in calls):
            owner, _, name = called.rpartition(".")
            is_change = name in CHANGES and owner not in ("fsio", "")
            if is_change or called in ("open", "os.open", "os.replace"):
                found.append(file.stem)
    assert set(found) == OTHER_FILES | {"fsio"}


def test_hashing_file_records_what_is_on_disk(tmp_path):
    (tmp_path / "sub").mkdir()
    with fsio.HashingFile(tmp_path / "sub" / "a.bin", root=tmp_path) as file:
        assert file.write(b"abc") == 3
        assert file.write(memoryview(b"\0" * 16).cast("I")) == 16
    data = (tmp_path / "sub" / "a.bin").read_bytes()
    assert data == b"abc" + b"\0" * 16
    assert file.record == FileRecord("sub/a.bin", 19, hashlib.sha256(data).hexdigest())
    assert fsio.sha256_of(tmp_path / "sub" / "a.bin") == file.record.sha256


DISK_FULL = """
import resource, signal, sys, torch
from pathlib import Path
from trainer.checkpoint import fsio
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
root = Path(sys.argv[1])
try:
    with fsio.HashingFile(root / "m.pt", root=root) as file:
        torch.save({"w": torch.zeros(1_000_000)}, file)
except OSError as error:
    print(error.errno, error.filename)
"""


def test_a_disk_error_inside_torch_save_keeps_its_cause_and_place(tmp_path):
    found = run_python("-c", DISK_FULL, str(tmp_path))
    assert found.stdout.split() == [str(errno.EFBIG), str(tmp_path / "m.pt")], found.stderr


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "a").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("a", "link"):
        with pytest.raises(FileExistsError):
            fsio.write_file(tmp_path / name, b"new", root=tmp_path)
    with pytest.raises(FileExistsError):
        fsio.make_dir(tmp_path / "a")
    assert (tmp_path / "a").read_text() == "old" and not (tmp_path / "elsewhere").exists()


@pytest.fixture
def failing_syncs(monkeypatch):
    """Every sync fails; the list receives the descriptors."""
    attempts = []

    def fail(descriptor):
        attempts.append(descriptor)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    return attempts


def test_a_failed_fsync_is_not_repeated_and_names_the_file(tmp_path, failing_syncs):
    with pytest.raises(OSError, match=r"Input/output error: .*/a'"):
        fsio.write_file(tmp_path / "a", b"x", root=tmp_path)
    assert len(failing_syncs) == 1
    with pytest.raises(OSError, match=str(tmp_path.name)):
        fsio.fsync_dir(tmp_path)


def test_a_failed_atomic_write_keeps_the_old_file_and_no_leftover(tmp_path, failing_syncs):
    (tmp_path / "p").write_bytes(b"1")
    with pytest.raises(OSError, match="Input/output error"):
        fsio.atomic_write(tmp_path / "p", b"2")
    assert (tmp_path / "p").read_bytes() == b"1" and os.listdir(tmp_path) == ["p"]


def test_a_short_file_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: os.ftruncate(fd, 1))
    with pytest.raises(OSError, match="1 bytes on disk after 3 were written"):
        fsio.write_file(tmp_path / "a", b"xyz", root=tmp_path)


def test_links_are_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    root = tmp_path / "root"
    (root / "real").mkdir(parents=True)
    (root / "link").symlink_to(outside)
    (root / "file").symlink_to(outside / "precious")
    for relative in ("link/precious", "file", "real", "missing", "file/precious"):
        assert fsio.size_problem(root, FileRecord(relative, 1, "")) is not None
    for read in (fsio.sha256_of, fsio.read_bytes):
        with pytest.raises(OSError, match="symbolic links"):
            read(root / "file")
    fsio.remove_tree(root)
    assert not root.exists() and (outside / "precious").read_text() == "x"


def test_a_file_that_appears_late_is_waited_for(tmp_path):
    def write_slowly():
        (tmp_path / "shard.pt").write_bytes(b"ab")
        threading.Event().wait(0.15)
        (tmp_path / "shard.pt").write_bytes(b"abcde")

    writer = threading.Timer(0.15, write_slowly)
    writer.start()
    fsio.await_files(tmp_path, [RECORD], deadline=time.monotonic() + 20)
    assert (tmp_path / "shard.pt").stat().st_size == 5
    writer.join()
