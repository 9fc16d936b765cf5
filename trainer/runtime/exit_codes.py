"""What an error means for the exit code of a run (floor 1)."""

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
from trainer.runtime.signals import StopRequest, lost_ranks

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
    # stopped: another rank left at once on the same signal, and this one missed it in a collective
    code = EXIT_RESUMABLE if stop.is_set else EXIT_CRASH
    if lost := lost_ranks():  # torchrun stops those that are left; what became of it the agent says
        return code, f"rank {lost[0]} of this machine is gone, and the others cannot go on without it: {error}"
    if stop.is_set:
        return code, f"stopped by {stop.reason} before the next step boundary: {error}"
    return code, "".join(traceback.format_exception(error))
