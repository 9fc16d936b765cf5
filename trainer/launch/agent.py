"""torchrun's agent, which starts the ranks: a process of its own, below the launcher.

Every start waits for it: beside torch it imports next to nothing.
"""

import logging
import os
import signal
import sys

from trainer.errors import EXIT_CRASH, EXIT_DONE, EXIT_RESUMABLE, EXIT_USAGE
from trainer.runtime.environment import uncollected
from trainer.runtime.log import keep_streams_safe
from trainer.runtime.processes import name_signal
from trainer.runtime.signals import AGENT_PID, heeded_signals, report_exit_code
from trainer.runtime.status import ABORTED, LOST_RANK


def run_agent(argv: list[str]) -> int:
    """Run torchrun without its own messages: the last thing a user reads is the error of the rank.

    Schedulers signal every process of a job. The ranks then save and leave; an agent that reacted
    would kill them.
    """
    for number in heeded_signals():
        signal.signal(number, lambda *_: None)
    os.environ[AGENT_PID] = str(os.getpid())
    logging.disable(logging.CRITICAL)
    with uncollected():
        from torch.distributed import DistError, run
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    arguments = run.parse_args(argv)
    try:
        run.run(arguments)
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            # SIGTERM is how the agent stops the rest
            if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
                killer = name_signal(-failure.exitcode)
                print(
                    f"ERROR: rank {rank} was killed by {killer}; continue with the same command",
                    file=sys.stderr,
                )
        codes = {failure.exitcode for failure in error.failures.values()}
        return ABORTED if codes - {LOST_RANK, -signal.SIGTERM} == {-signal.SIGABRT} else EXIT_CRASH
    except DistError as error:  # only the meeting of the machines raises it
        if "EADDRINUSE" in str(error):
            report_exit_code(EXIT_USAGE)
            print(
                f"ERROR: MASTER_PORT={arguments.master_port} is already in use on this machine, "
                f"the first of the run. Fix: set MASTER_PORT to a free port, the same on all "
                f"machines",
                file=sys.stderr,
            )
            return EXIT_USAGE
        report_exit_code(EXIT_RESUMABLE)
        reason = str(error).partition("\n")[0]  # below it are torch's own frames
        fix = "start the same command on each, with the NNODES, MASTER_ADDR and MASTER_PORT of all"
        print(f"ERROR: the machines did not meet: {reason}; {fix}", file=sys.stderr)
    return EXIT_DONE


if __name__ == "__main__":
    keep_streams_safe(says_so=False)
    sys.exit(run_agent(sys.argv[1:]))
