"""torchrun's agent: the process below the launcher that starts the ranks.

Every start waits for this process, so it imports little besides torch.
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
    """Run torchrun without its own messages, so that the rank's error is the last line a user
    reads.

    Schedulers signal every process of a job, so the agent ignores stop signals: it would kill the
    ranks while they save.
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
        stopped_by_agent = -signal.SIGTERM
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        for rank, code in codes.items():
            if code < 0 and code != stopped_by_agent:
                print(
                    f"ERROR: rank {rank} was killed by {name_signal(-code)}. Fix: continue with "
                    f"the same command",
                    file=sys.stderr,
                )
        causes = set(codes.values()) - {LOST_RANK, stopped_by_agent}
        return ABORTED if causes == {-signal.SIGABRT} else EXIT_CRASH
    except DistError as error:  # only the rendezvous raises it
        is_port_taken = "EADDRINUSE" in str(error)
        report_exit_code(EXIT_USAGE if is_port_taken else EXIT_RESUMABLE)
        reason = str(error).partition("\n")[0]  # torch's stack follows
        if is_port_taken:
            reason = f"MASTER_PORT={arguments.master_port} is already in use on the first machine"
        print(
            f"ERROR: the machines did not meet: {reason}. Fix: start the same command on each "
            f"machine, with the same NNODES and MASTER_ADDR, and a MASTER_PORT that is free on the "
            f"first machine",
            file=sys.stderr,
        )
    return EXIT_DONE


if __name__ == "__main__":
    keep_streams_safe(reports_loss=False)
    sys.exit(run_agent(sys.argv[1:]))
