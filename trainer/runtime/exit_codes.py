"""What an error means for the exit code of a run (floor 1)."""

import re
import traceback

from trainer.config import ConfigError
from trainer.errors import (
    EXIT_BAD_DATA,
    EXIT_CANNOT_WRITE,
    EXIT_CRASH,
    EXIT_RESUMABLE,
    EXIT_USAGE,
    CannotWriteError,
    DataError,
    ResumableError,
)
from trainer.runtime.environment import rank_and_size, ranks_on_machine
from trainer.runtime.signals import StopRequest, lost_ranks, reported_exit_code
from trainer.runtime.status import LOST_RANK

_PROCESS_LOST = re.compile(
    r"DataLoader worker .* (killed|exited)|processes that prepare data was killed"
)
_CONNECTION_LOST = re.compile(r"gloo/transport|ncclRemoteError|DistNetworkError|DistStoreError")

DOCUMENTED: dict[type[Exception], int] = {
    ConfigError: EXIT_USAGE,
    DataError: EXIT_BAD_DATA,
    CannotWriteError: EXIT_CANNOT_WRITE,
    ResumableError: EXIT_RESUMABLE,
}


def explain(error: Exception, stop: StopRequest) -> tuple[int, str]:
    """(exit code, message for the user) of a run that ends with an error."""
    for kind, code in DOCUMENTED.items():
        if isinstance(error, kind):
            return code, str(error)
    # stopped: another rank left at once on the same signal, and this one missed it in a collective;
    # or that one lost another machine, and with it this one lost both
    code = EXIT_RESUMABLE if stop.is_set or reported_exit_code() == EXIT_RESUMABLE else EXIT_CRASH
    if _PROCESS_LOST.search(str(error)):
        return code, f"{error}; continue with the same command"
    if lost := lost_ranks():  # torchrun stops those that are left; what became of it the agent says
        code = code if code == EXIT_RESUMABLE else LOST_RANK
        return (
            code,
            f"rank {lost[0]} of this machine is gone, and the others cannot go on without it: "
            f"{error}",
        )
    if stop.is_set:
        return code, f"stopped by {stop.reason} before the next step boundary: {error}"
    if ranks_on_machine() < rank_and_size()[1] and _CONNECTION_LOST.search(repr(error)):
        return (
            EXIT_RESUMABLE,
            f"another machine of this run failed or is out of reach (see its own output): {error}",
        )
    return code, "".join(traceback.format_exception(error))
