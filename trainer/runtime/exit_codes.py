"""The exit code of a run that ends with an error."""

import re
import traceback
from collections.abc import Mapping

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
    r"DataLoader worker .* (killed|exited)|data preparation processes was killed"
)
_CONNECTION_LOST = re.compile(r"gloo/transport|ncclRemoteError|DistNetworkError|DistStoreError")

DOCUMENTED: dict[type[Exception], int] = {
    ConfigError: EXIT_USAGE,
    DataError: EXIT_BAD_DATA,
    CannotWriteError: EXIT_CANNOT_WRITE,
    ResumableError: EXIT_RESUMABLE,
}


def code_of(error: BaseException, codes: Mapping[type[Exception], int] = DOCUMENTED) -> int:
    """Return the exit code of an error whose type is in `codes`."""
    return next(code for kind, code in codes.items() if isinstance(error, kind))


def explain(error: Exception, stop: StopRequest) -> tuple[int, str]:
    """Return (exit code, message for the user) of a run that ends with an error."""
    if isinstance(error, tuple(DOCUMENTED)):
        return code_of(error), str(error)
    # Either the run was asked to stop, and another rank left at once while this one was inside a
    # collective; or another rank lost a machine and ended, and this rank then lost both.
    is_resumable = stop.is_set or reported_exit_code() == EXIT_RESUMABLE
    code = EXIT_RESUMABLE if is_resumable else EXIT_CRASH
    if _PROCESS_LOST.search(str(error)):
        return code, f"{error}. Fix: continue with the same command"
    if lost := lost_ranks():  # torchrun stops the other ranks, and the agent prints the cause
        message = "of this machine has ended, and the other ranks cannot continue without it"
        return code if is_resumable else LOST_RANK, f"rank {lost[0]} {message}: {error}"
    if stop.is_set:
        return code, f"stopped by {stop.reason} before the next step boundary: {error}"
    has_other_machines = ranks_on_machine() < rank_and_size()[1]
    if has_other_machines and _CONNECTION_LOST.search(repr(error)):
        message = "another machine of this run failed or cannot be reached (see its output)"
        return EXIT_RESUMABLE, f"{message}: {error}"
    return code, "".join(traceback.format_exception(error))
