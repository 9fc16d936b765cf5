"""The rank's side of the watchdog: its record, its stacks on request, and that it never stops the run itself."""

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.runtime.heartbeat import MAX_PHASE_BYTES, Beat, Heartbeat, unpack_beat

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def status_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SFT_STATUS_DIR", str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "3")
    return tmp_path


def last_beat(status_dir: Path) -> Beat:
    beat = unpack_beat((status_dir / "rank_3.beat").read_bytes())
    assert beat is not None
    return beat


def test_a_rank_starts_unwatched_and_says_what_it_does(status_dir: Path) -> None:
    before = time.monotonic()
    heartbeat = Heartbeat()
    first = last_beat(status_dir)
    assert (first.phase, first.limit_s) == ("start", None)
    heartbeat.enter("train", limit_s=120.5)
    second = last_beat(status_dir)
    assert (second.phase, second.limit_s) == ("train", 120.5)
    heartbeat.beat()
    third = last_beat(status_dir)
    assert (third.phase, third.limit_s, third.count) == ("train", 120.5, second.count + 1)
    assert before <= first.at_s <= second.at_s <= third.at_s <= time.monotonic()


def test_a_beat_is_one_write_of_fixed_width(status_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat = Heartbeat()
    size_bytes = (status_dir / "rank_3.beat").stat().st_size
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "pwrite", lambda file, record, offset: calls.append((len(record), offset)))
    heartbeat.beat()
    heartbeat.enter("a" * MAX_PHASE_BYTES, limit_s=1)
    assert calls == [(size_bytes, 0)] * 2


def test_without_a_launcher_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SFT_STATUS_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    heartbeat = Heartbeat()
    heartbeat.enter("train", limit_s=1.0)
    heartbeat.beat()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("phase", "limit_s"),
    [("", 1.0), ("a" * (MAX_PHASE_BYTES + 1), 1.0), ("train", 0.0), ("train", float("nan")), ("train", float("inf"))],
)
def test_a_phase_that_cannot_be_watched_is_refused(phase: str, limit_s: float, status_dir: Path) -> None:
    heartbeat = Heartbeat()
    with pytest.raises(ValueError, match="phase"):
        heartbeat.enter(phase, limit_s=limit_s)
    assert last_beat(status_dir).phase == "start"


def test_a_half_written_record_is_no_beat(status_dir: Path) -> None:
    heartbeat = Heartbeat()
    old = (status_dir / "rank_3.beat").read_bytes()
    heartbeat.enter("train", limit_s=1.0)
    new = (status_dir / "rank_3.beat").read_bytes()
    assert unpack_beat(new) is not None
    for cut in range(8, len(new) - 8):
        assert unpack_beat(new[:cut] + old[cut:]) is None
        assert unpack_beat(new[:cut]) is None
    assert unpack_beat(b"") is None


def test_a_heartbeat_that_cannot_be_written_ends_the_watch_and_not_the_run(
    status_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heartbeat = Heartbeat()
    heartbeat.enter("train", limit_s=1.0)
    calls: list[int] = []

    def fail(file: int, record: bytes, offset: int) -> int:
        calls.append(offset)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    monkeypatch.setattr(logging.getLogger("trainer"), "propagate", True)
    heartbeat.beat()
    heartbeat.beat()
    heartbeat.enter("save", limit_s=1.0)
    assert calls == [0]
    assert not (status_dir / "rank_3.beat").exists()
    assert [record.getMessage() for record in caplog.records] == [
        f"hangs of this rank are no longer noticed: cannot write {status_dir / 'rank_3.beat'}: "
        f"[Errno 28] No space left on device"
    ]


def test_a_joined_rank_writes_the_stacks_of_all_threads_on_sigusr2(tmp_path: Path) -> None:
    program = """
import os, signal, threading, time
from trainer.runtime.signals import join_launcher
is_inside = threading.Event()
def in_a_thread():
    is_inside.set()
    time.sleep(60)
def in_main():
    os.kill(os.getpid(), signal.SIGUSR2)
join_launcher()
threading.Thread(target=in_a_thread, daemon=True).start()
is_inside.wait()
in_main()
in_main()
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SFT_STATUS_DIR": str(tmp_path), "LOCAL_RANK": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    stacks = (tmp_path / "rank_1.stacks").read_text()
    assert stacks.count(" in in_a_thread") == stacks.count(" in in_main") == 2


@pytest.mark.covers("S3.50:C")
def test_people_can_read_where_a_rank_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SFT_STATUS_DIR", raising=False)
    monkeypatch.setattr("trainer.runtime.heartbeat.REPORT_EVERY_S", 0.0)
    heartbeat = Heartbeat()
    heartbeat.enter("train", limit_s=10.0)
    assert not (tmp_path / "heartbeat").exists()
    heartbeat.report_to(tmp_path, rank=2)
    heartbeat.step = 17
    heartbeat.beat()
    report = json.loads((tmp_path / "heartbeat" / "rank_2.json").read_text())
    assert (report["rank"], report["step"], report["phase"]) == (2, 17, "train")
    assert abs(report["ts"] - time.time()) < 60
    assert [path.name for path in (tmp_path / "heartbeat").iterdir()] == ["rank_2.json"]


def test_a_run_directory_that_cannot_be_written_costs_only_the_file(tmp_path: Path) -> None:
    (tmp_path / "heartbeat").write_text("in the way")
    heartbeat = Heartbeat()
    heartbeat.report_to(tmp_path, rank=0)
    heartbeat.beat()
