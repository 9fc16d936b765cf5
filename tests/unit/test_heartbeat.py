"""The rank's side of the watchdog: its record, its stacks on request, and its file for users."""

import os

import pytest
from small_files import read_json

from trainer.runtime.heartbeat import Heartbeat
from trainer.runtime.status import VARIABLE, Beat, new_status, write_beat


@pytest.fixture
def status(monkeypatch):
    with new_status(4) as made:
        monkeypatch.setenv(VARIABLE, made.address)
        monkeypatch.setenv("LOCAL_RANK", "3")
        yield made


def test_a_half_written_record_is_no_beat(status):
    file = status.open_rank(3)
    old = Beat(9, 1.0, 5.0, "start")
    new = Beat(9, 2.0, 1.0, "train")
    write_beat(file, old)
    assert status.beats() == {3: old}
    size = len(new.packed())
    for cut in range(8, size - 8):
        for rest in (old.packed()[cut:], bytes(size - cut)):
            os.pwrite(file, new.packed()[:cut] + rest, 0)
            assert status.beats() == {}
    write_beat(file, new)
    assert status.beats() == {3: new}


@pytest.mark.covers("S3.50:C")
def test_people_can_read_where_a_rank_is(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("trainer.runtime.heartbeat.REPORT_EVERY_S", 0.0)
    monkeypatch.setenv("RANK", "2")
    heartbeat = Heartbeat()
    heartbeat.enter("train", limit_s=10.0)
    heartbeat.report_to(tmp_path)
    heartbeat.step = 17
    heartbeat.beat()
    report = read_json(tmp_path / "heartbeat/rank_2.json")
    assert (report["rank"], report["step"], report["phase"]) == (2, 17, "train")
