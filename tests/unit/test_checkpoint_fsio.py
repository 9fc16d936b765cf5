"""Files of a checkpoint: hashed, synced, exclusive, atomic; errors say where."""

import errno
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.checkpoint import fsio


def test_hashing_file_records_what_is_on_disk(tmp_path):
    (tmp_path / "sub").mkdir()
    with fsio.HashingFile(tmp_path / "sub" / "a.bin", root=tmp_path) as file:
        assert file.write(b"abc") == 3
        assert file.write(memoryview(b"\0" * 16).cast("I")) == 16
        with pytest.raises(ValueError, match="not closed"):
            _ = file.record
    data = (tmp_path / "sub" / "a.bin").read_bytes()
    assert data == b"abc" + b"\0" * 16
    assert file.record == fsio.FileRecord("sub/a.bin", 19, hashlib.sha256(data).hexdigest())
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
    pytest.importorskip("torch")
    command = [sys.executable, "-c", DISK_FULL, str(tmp_path)]
    found = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False
    )
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


def test_a_failed_fsync_is_not_repeated_and_names_the_file(tmp_path, monkeypatch):
    attempts = []

    def fail(descriptor: int) -> None:
        attempts.append(descriptor)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with (
        pytest.raises(OSError, match=r"Input/output error: .*/a'"),
        fsio.HashingFile(tmp_path / "a", root=tmp_path) as f,
    ):
        f.write(b"x")
    assert len(attempts) == 1
    with pytest.raises(OSError, match=str(tmp_path.name)):
        fsio.fsync_dir(tmp_path)


def test_a_short_file_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: os.ftruncate(fd, 1))
    with pytest.raises(OSError, match="1 bytes on disk after 3 were written"):
        fsio.write_file(tmp_path / "a", b"xyz", root=tmp_path)


def test_a_failed_atomic_write_keeps_the_old_file_and_no_leftover(tmp_path, monkeypatch):
    fsio.atomic_write(tmp_path / "p", b"1")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        fsio.atomic_write(tmp_path / "p", b"2")
    assert (tmp_path / "p").read_bytes() == b"1" and os.listdir(tmp_path) == ["p"]


def test_links_are_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    root = tmp_path / "root"
    (root / "real").mkdir(parents=True)
    (root / "link").symlink_to(outside)
    (root / "file").symlink_to(outside / "precious")
    for relative in ("link/precious", "file", "real", "missing", "file/precious"):
        with pytest.raises(OSError, match=r"symbolic link|not a|No such file"):
            fsio.size_within(root, relative)
    for read in (fsio.sha256_of, fsio.read_bytes):
        with pytest.raises(OSError, match="symbolic links"):
            read(root / "file")
    fsio.remove_tree(root)
    assert not root.exists() and (outside / "precious").read_text() == "x"
