"""A rank may be silent only for a limited time, even before the first step: the phases of a start,
and their limits.
"""

import logging
import os
import subprocess
from unittest.mock import Mock

import pytest

from trainer import __main__
from trainer.runtime import log, signals
from trainer.runtime.exit_codes import explain
from trainer.runtime.signals import StopRequest
from trainer.runtime.status import LOST_RANK, VARIABLE, Beat, new_status, write_beat
from trainer.train.start import main as run
from trainer.train.start.compose import load_config

LIMITS = ["trainer.device=cpu", "trainer.hang_timeout_s=300"]


@pytest.fixture
def status(monkeypatch):
    """Return the status of a launcher of two ranks, as its ranks see it."""
    with new_status(2) as made:
        monkeypatch.setenv(VARIABLE, made.address)
        yield made


class ReachedError(Exception):
    """Raised where the tested part of a run ends."""


@pytest.fixture
def rank_runs(monkeypatch):
    """Starts a rank whose run is a function. Returns its exit code."""

    def start(function):
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        monkeypatch.setattr(signals.StopRequest, "install", lambda self: None)
        monkeypatch.setattr(signals, "join_launcher", lambda: None)
        monkeypatch.setattr(log, "configure", lambda rank: None)
        monkeypatch.setattr(run, "run", function)
        return __main__.main(LIMITS)

    return start


def test_a_rank_is_watched_while_it_imports_torch(status, rank_runs):
    def phase_of_the_first_rank(*args):
        beat = status.beats()[0]
        assert (beat.phase, beat.limit_s) == ("start", 900)
        return 0

    assert rank_runs(phase_of_the_first_rank) == 0


@pytest.mark.parametrize("is_signalled", [False, True])
def test_a_rank_that_lost_another_says_so_first(
    is_signalled, status, rank_runs, monkeypatch, caplog
):
    """torchrun stops the other ranks with SIGTERM. No user requested this stop, and it is not the
    cause.
    """

    def lose_a_rank(config, stop, heartbeat):
        stop.signal_name = "SIGTERM" if is_signalled else None
        raise RuntimeError("Connection closed by peer")

    lost = subprocess.Popen(["true"])
    lost.wait()
    for rank, pid in enumerate((os.getpid(), lost.pid)):
        write_beat(status.open_rank(rank), Beat(pid, 1.0, 900.0, "train"))
    monkeypatch.setattr(logging.getLogger("trainer"), "propagate", True)
    assert rank_runs(lose_a_rank) == (75 if is_signalled else LOST_RANK)
    assert "rank 1 of this machine has ended" in caplog.text


@pytest.mark.parametrize(
    ("reason", "num_ranks", "code"),
    [
        ("[gloo/transport/tcp/pair.cc:537] Read error [10.0.0.2]: Connection reset by peer", 4, 75),
        ("NCCL error: ncclRemoteError: A call failed", 4, 75),
        ("[gloo/transport/tcp/pair.cc:537] Read error [10.0.0.2]: Connection reset by peer", 2, 1),
        ("shape '[2]' is invalid for input of size 3", 4, 1),
    ],
)
def test_who_lost_another_machine_can_continue_with_the_same_command(
    reason, num_ranks, code, monkeypatch
):
    """Two of `num_ranks` ranks are on this machine, and both are healthy: the fault is elsewhere,
    or the program is wrong.
    """
    for name, value in {"RANK": "0", "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(VARIABLE, raising=False)
    found, message = explain(RuntimeError(reason), StopRequest())
    assert found == code and reason in message
    assert message.startswith("another machine of this run failed or cannot be reached") is (
        code == 75
    )


def test_preparation_meeting_and_loading_have_limits(monkeypatch):
    heartbeat = Mock()
    deterministic = Mock()
    monkeypatch.delenv(VARIABLE, raising=False)
    # a lone rank says there where it meets itself
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    lone = {name: value for name, value in os.environ.items() if name not in ranks}
    monkeypatch.setattr(os, "environ", lone)
    monkeypatch.setattr(run.seeding, "use_deterministic_kernels", deterministic)
    monkeypatch.setattr(run, "prepare_inputs", Mock())
    monkeypatch.setattr(run, "facts_of", Mock(return_value={}))
    monkeypatch.setattr(run, "choose", Mock(side_effect=ReachedError))
    config = load_config([*LIMITS, "trainer.deterministic=true"])
    try:
        with pytest.raises(ReachedError):
            run.run(config, StopRequest(), heartbeat)
    finally:
        run.distributed.stop()
    phases = [(call.args[0], call.kwargs["limit_s"]) for call in heartbeat.enter.mock_calls]
    assert phases == [("prepare", 900), ("meet", 900), ("load", 2700)]
    deterministic.assert_called_once()
