"""Decides when a save is due: by time, or because of a file SAVE in the run directory."""

import logging
import math
import time
from pathlib import Path

logger = logging.getLogger(__name__)
FILE_NAME = "SAVE"
LOOK_EVERY_S = 1.0
"""Seconds between checks for the file. A check can be slow on a network file system."""


class SaveRequests:
    """Tells the main rank when a save is due. `every_s`: seconds from one save to the next."""

    def __init__(self, run_dir: Path, *, every_s: float = math.inf) -> None:
        self._file = run_dir / FILE_NAME
        self._every_s = every_s
        self._saved_at = time.monotonic()
        self._looked_at = -math.inf
        self._is_asked = False
        self._is_answered = False
        """True if the last save began after the file was seen."""

    def is_due(self) -> bool:
        now = time.monotonic()
        if now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            self._is_asked = self._file.is_file()
        return self._is_asked or now - self._saved_at >= self._every_s

    def begin(self) -> None:
        """Note that a save of the current state begins."""
        self._saved_at = time.monotonic()
        self._is_answered = self._is_asked
        self._is_asked = False

    def settle(self) -> None:
        """Delete the file that requested the last save. Call this once that save is committed."""
        if not self._is_answered:
            return
        self._is_answered = False
        try:
            self._file.unlink(missing_ok=True)
        except OSError as error:
            logger.warning(
                "%s cannot be deleted, so this run ignores it from now on: %s", self._file, error
            )
            self._looked_at = math.inf
