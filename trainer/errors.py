"""Exit codes, and the errors that have one of their own."""

EXIT_DONE = 0
EXIT_CRASH = 1
EXIT_USAGE = 2
EXIT_BAD_DATA = 65
EXIT_CANNOT_WRITE = 73
EXIT_RESUMABLE = 75
EXIT_DIVERGED = 76


class DataError(ValueError):
    """The user's data cannot be trained on; the message names files, lines and reasons. Exit
    code 65.
    """


class CannotWriteError(OSError):
    """The run directory cannot be written; the message names the path and the cause. Exit code
    73.
    """


class ResumableError(RuntimeError):
    """The run cannot go on, but its last checkpoint stands and the same command continues. Exit
    code 75.
    """
