"""Runs torchrun's agent to its end or a hang: stop signals on their way to the ranks, exit codes on
theirs.

Three generations of processes: the launcher, torchrun's agent in a session of its own, and the
ranks. Each dies with its parent, so killing the launcher leaves nothing behind. torchrun folds
every failure into 1 and kills ranks 30 s after a signal; so ranks write their pid and exit code
into the launcher's status, and signals go to them directly.
"""

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from trainer.errors import EXIT_CRASH, EXIT_DONE, EXIT_RESUMABLE
from trainer.launch.watchdog import Watchdog
from trainer.runtime.processes import die_with_parent, name_signal
from trainer.runtime.signals import heeded_signals
from trainer.runtime.status import ABORTED, Status

POLL_S = 1.0


def supervise(
    command: Sequence[str], *, env: Mapping[str, str], status: Status, watchdog: Watchdog
) -> int:
    """Run the agent to its end or a hang, pass every signal on to the ranks once, and return
    the run's exit code.
    """
    forwarded = heeded_signals()
    awaited = {*forwarded, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    try:
        if signal.sigpending() & forwarded:
            return EXIT_RESUMABLE
        child_setup = functools.partial(_set_up_agent, os.getpid(), awaited)
        agent = subprocess.Popen(command, env=env, start_new_session=True, preexec_fn=child_setup)
        was_signalled = False
        while agent.poll() is None:
            received = signal.sigtimedwait(awaited, POLL_S)
            if watchdog.finds_hang():
                watchdog.end_run(agent)
                return killed_exit_code(status.exit_code())
            if watchdog.finds_agent_waiting():
                watchdog.kill(agent)
                return run_exit_code(
                    status.exit_code(), agent_code=EXIT_DONE, was_signalled=was_signalled
                )
            # not in the set: Python 3.11 returns any number when SIGCONT interrupts it after its
            # time ran out
            if received is None or received.si_signo not in forwarded:
                continue
            was_signalled = True
            if not _signal_ranks(status, received.si_signo):
                watchdog.kill(agent)
                return killed_exit_code(status.exit_code())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    reported = status.exit_code()
    if reported is None and agent.returncode < 0:
        killer = name_signal(-agent.returncode)
        print(
            f"ERROR: the ranks were killed by {killer}; continue with the same command",
            file=sys.stderr,
        )
    return run_exit_code(reported, agent_code=agent.returncode, was_signalled=was_signalled)


def run_exit_code(reported: int | None, *, agent_code: int, was_signalled: bool) -> int:
    """Return what the ranks reported, unless they reported an orderly end that the agent did not see.

    Then one rank was lost, or left at once on a signal, and another only believed in an orderly
    end. `ABORTED` stays: what it means depends on the run.
    """
    if reported not in (None, EXIT_DONE, EXIT_RESUMABLE):
        return reported
    if agent_code == 0:
        return EXIT_DONE if reported is None else reported
    if reported is not None and was_signalled:
        return EXIT_RESUMABLE
    return ABORTED if agent_code == ABORTED else EXIT_CRASH


def killed_exit_code(reported: int | None) -> int:
    """The exit code of a run that the launcher killed: resumable, unless a rank had reported a
    failure that the rest follows from.
    """
    return EXIT_RESUMABLE if reported in (None, EXIT_DONE) else reported


def _set_up_agent(launcher_pid: int, blocked: Collection[int]) -> None:
    """Die with the launcher, and undo the launcher's way of receiving signals. Runs in the new
    process.
    """
    die_with_parent(launcher_pid, code=EXIT_CRASH)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)


def _signal_ranks(status: Status, number: int) -> bool:
    """Send a signal to every registered rank; False when there is none yet."""
    beats = status.beats().values()
    for beat in beats:
        with suppress(ProcessLookupError):
            os.kill(beat.pid, number)
    return bool(beats)
