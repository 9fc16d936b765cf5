"""Runs torchrun's agent to its end or to a hang, passes stop signals to the ranks, and determines
the run's exit code.

There are three generations of processes: the launcher, torchrun's agent in its own session, and the
ranks. Each dies with its parent, so killing the launcher leaves nothing behind. torchrun reports
every failure as exit code 1 and kills ranks 30 s after a signal. Therefore the ranks write their
pid and exit code into the launcher's status, and the launcher signals them directly. A stop request
takes this way:

1. The launcher keeps stop signals blocked, receives them here, and sends them to the ranks' pids.
2. A rank that trains remembers the request. The next reduction of a step tells all ranks, which
   save at the end of that step.
3. Each rank reports exit code 75 in the status and exits with 0, so that torchrun sees no failure.
4. The agent ends with 0, and the launcher returns the reported code.
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
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    status: Status,
    watchdog: Watchdog,
) -> int:
    """Run the agent to its end or to a hang. Pass each stop signal to the ranks once.

    Return the exit code of the run, or `ABORTED`.
    """
    stop_signals = heeded_signals()
    awaited = {*stop_signals, signal.SIGCHLD}
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    try:
        if signal.sigpending() & stop_signals:
            return EXIT_RESUMABLE
        set_up = functools.partial(_set_up_agent, os.getpid(), awaited)
        agent = subprocess.Popen(
            command,
            env=env,
            start_new_session=True,
            preexec_fn=set_up,
        )
        was_signalled = False
        while agent.poll() is None:
            received = signal.sigtimedwait(awaited, POLL_S)
            if watchdog.finds_hang():
                watchdog.end_run(agent)
                return killed_exit_code(status.exit_code())
            if watchdog.finds_idle_agent():
                watchdog.kill(agent)
                reported = status.exit_code()
                return EXIT_CRASH if reported is None else reported
            # Python 3.11 returns an arbitrary number when SIGCONT interrupts an expired wait
            if received is None or received.si_signo not in stop_signals:
                continue
            was_signalled = True
            if not _signal_ranks(status, received.si_signo):
                watchdog.kill(agent)
                return killed_exit_code(status.exit_code())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
    reported = status.exit_code()
    if reported is None and agent.returncode < 0:
        killer = name_signal(-agent.returncode)
        print(
            f"ERROR: the ranks were killed by {killer}. Fix: continue with the same command",
            file=sys.stderr,
        )
    return run_exit_code(reported, agent_code=agent.returncode, was_signalled=was_signalled)


def run_exit_code(reported: int | None, *, agent_code: int, was_signalled: bool) -> int:
    """Return the exit code that the ranks reported, if the agent agrees.

    If the agent saw a failure but the ranks reported an orderly end, a rank was lost or a signal
    ended it at once. `ABORTED` is returned unchanged, because its meaning depends on the run.
    """
    if reported not in (None, EXIT_DONE, EXIT_RESUMABLE):
        return reported
    if agent_code == 0:
        return EXIT_DONE if reported is None else reported
    if reported is not None and was_signalled:
        return EXIT_RESUMABLE
    return ABORTED if agent_code == ABORTED else EXIT_CRASH


def killed_exit_code(reported: int | None) -> int:
    """Return the exit code of a run that the launcher killed: resumable, unless a rank had reported
    a failure, which is then the cause.
    """
    return EXIT_RESUMABLE if reported in (None, EXIT_DONE) else reported


def _set_up_agent(launcher_pid: int, blocked: Collection[int]) -> None:
    """Make the new process die with the launcher and receive signals again."""
    die_with_parent(launcher_pid, code=EXIT_CRASH)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)


def _signal_ranks(status: Status, number: int) -> bool:
    """Send a signal to every registered rank. Return False if no rank has registered yet."""
    beats = status.beats().values()
    for beat in beats:
        with suppress(ProcessLookupError):
            os.kill(beat.pid, number)
    return bool(beats)
