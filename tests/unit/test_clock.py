"""Phases of a step: they add up, those of a device are its own, and their spans can be looked
at.
"""

import json
import time

import pytest
import torch

from trainer.train.clock import PhaseClock, TraceFile

CPU = torch.device("cpu")


@pytest.mark.covers("S0.6", "S0.23", "S0.24", "S0.33")
def test_phases_add_up_to_the_step_and_can_be_opened_in_perfetto(tmp_path):
    trace = TraceFile(tmp_path, rank=3)
    clock, began_s = PhaseClock(CPU, trace=trace), time.time()
    for phase, seconds in (("data", 0.02), ("forward", 0.03), ("forward", 0.01)):
        time.sleep(seconds)
        clock.mark(phase)
    time.sleep(0.05)
    clock.exclude()
    time.sleep(0.02)
    lap = clock.lap()
    assert lap["forward"] >= 0.04 and lap["data"] >= 0.02 and 0.02 <= lap["other"] < 0.05
    claimed = sum(seconds for phase, seconds in lap.items() if phase != "step")
    assert claimed == pytest.approx(lap["step"], rel=1e-9), "the pause belongs to no phase"
    time.sleep(0.01)
    assert 0.01 <= clock.lap()["step"] < 0.05, "the next step begins where this one ended"
    trace._file.flush()
    text = (tmp_path / "trace" / "rank_3.json").read_text()
    spans = json.loads(text.rstrip().rstrip(",") + "]")
    assert [span["name"] for span in spans] == ["data", "forward", "forward", "other", "other"]
    assert all(span["ph"] == "X" and span["pid"] == 3 for span in spans)
    assert abs(spans[0]["ts"] / 1e6 - began_s) < 5


class FakeEvent:
    """A device that is done with everything 1 s after the last."""

    count = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        FakeEvent.count += 1.0
        self.at_s = FakeEvent.count

    def elapsed_time(self, end: "FakeEvent") -> float:
        return (end.at_s - self.at_s) * 1e3


def test_phases_of_a_device_are_measured_by_its_own_events(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    clock = PhaseClock(torch.device("cuda"))
    for phase in [
        "data",
        "shard",
        "forward",
        "backward",
        "forward",
        "backward",
        "optimizer",
        "guard",
    ]:
        clock.mark(phase)
    lap = clock.lap()
    assert (lap["shard"], lap["forward"], lap["backward"], lap["optimizer"]) == (1.0, 2.0, 2.0, 1.0)
    assert lap["data"] < 0.1 and lap["guard"] < 0.1, "the host's own phases are on its own clock"
