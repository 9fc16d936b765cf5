"""The rank's side of the watchdog: its record, its stacks on request, its file for people."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.runtime.heartbeat import Heartbeat
from trainer.runtime.status import VARIABLE, Beat, Status, new_status, write_beat

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch) -> Iterator[Status]:
    with new_status(4) as made:
        monkeypatch.setenv(VARIABLE, made.address)
        monkeypatch.setenv("LOCAL_RANK", "3")
        yield made


def test_a_rank_starts_unwatched_and_says_what_it_does(status):
    before = time.monotonic()
    heartbeat = Heartbeat()
    first = status.beats()[3]
    heartbeat.enter("train", limit_s=120.5)
    second = status.beats()[3]
    heartbeat.beat()
    third = status.beats()[3]
    assert (first.phase, first.limit_s) == ("start", math.inf)
    assert (second.phase, second.limit_s) == ("train", 120.5)
    assert (third.phase, third.limit_s, third.pid) == ("train", 120.5, os.getpid())
    assert before <= first.at_s <= second.at_s < third.at_s <= time.monotonic()


def test_a_half_written_record_is_no_beat(status):
    assert status.beats() == {}, "no rank has begun"
    file = status.open_rank(3)
    old, new = Beat(9, 1.0, 5.0, "start"), Beat(9, 2.0, 1.0, "train")
    write_beat(file, old)
    assert status.beats() == {3: old}
    size = len(new.packed())
    for cut in range(8, size - 8):
        for rest in (old.packed()[cut:], bytes(size - cut)):
            os.pwrite(file, new.packed()[:cut] + rest, 0)
            assert status.beats() == {}
    write_beat(file, new)
    assert status.beats() == {3: new}


def test_a_joined_rank_writes_the_stacks_of_all_threads_on_sigusr2(status):
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
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LOCAL_RANK": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    stacks = status.stacks(1).decode()
    assert stacks.count(" in in_a_thread") == stacks.count(" in in_main") == 2


@pytest.mark.covers("S3.50:C")
def test_people_can_read_where_a_rank_is(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("trainer.runtime.heartbeat.REPORT_EVERY_S", 0.0)
    monkeypatch.setenv("RANK", "2")
    heartbeat = Heartbeat()
    heartbeat.enter("train", limit_s=10.0)
    assert not (tmp_path / "heartbeat").exists()
    heartbeat.report_to(tmp_path)
    heartbeat.step = 17
    heartbeat.beat()
    (path,) = (tmp_path / "heartbeat").iterdir()
    report = json.loads(path.read_text())
    assert path.name == "rank_2.json"
    assert (report["rank"], report["step"], report["phase"]) == (2, 17, "train")
    assert abs(report["ts"] - time.time()) < 60
