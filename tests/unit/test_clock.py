"""Phases of a step: they add up, phases of a device are measured on the device, and their spans can
be viewed.
"""

import json
import time

import pytest
import torch

from trainer.train.clock import PhaseClock, TraceFile

CPU = torch.device("cpu")


@pytest.mark.covers("S0.6 S0.23 S0.24 S0.33")
def test_phases_add_up_to_the_step_and_can_be_opened_in_perfetto(tmp_path):
    trace = TraceFile(tmp_path, rank=3)
    clock = PhaseClock(CPU, trace=trace)
    for phase in ("data", "forward", "forward"):
        time.sleep(0.02)
        clock.mark(phase)
    time.sleep(0.05)
    clock.exclude()
    time.sleep(0.02)
    lap = clock.lap()
    assert lap["forward"] >= 0.04 and lap["data"] >= 0.02 and 0.02 <= lap["other"] < 0.05
    claimed = sum(lap.values()) - lap["step"]
    assert claimed == pytest.approx(lap["step"], rel=1e-9), "the pause belongs to no phase"
    trace._file.flush()
    text = (tmp_path / "trace" / "rank_3.json").read_text()
    spans = json.loads(text.rstrip().rstrip(",") + "]")
    assert [span["name"] for span in spans] == ["data", "forward", "forward", "other"]
    assert all(span["ph"] == "X" and span["pid"] == 3 for span in spans)
