"""Exit codes, and the errors that have their own exit code."""

EXIT_DONE = 0
EXIT_CRASH = 1
EXIT_USAGE = 2
EXIT_BAD_DATA = 65
EXIT_CANNOT_WRITE = 73
EXIT_RESUMABLE = 75
EXIT_DIVERGED = 76


class DataError(ValueError):
    """The user's data cannot be used for training. Exit code 65.

    The message names files, lines and reasons.
    """


class CannotWriteError(OSError):
    """The run directory cannot be written. Exit code 73.

    The message names the path and the cause.
    """


class ResumableError(RuntimeError):
    """The run cannot continue, but rerunning the command resumes it from its last checkpoint. Exit
    code 75.
    """
