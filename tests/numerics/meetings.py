"""Every pair of features meets at least once: the rows of tiny runs that test_meetings.py tries."""

import traceback
from pathlib import Path

from command_ranks import CommandRanks
from covering import Row, covering_rows
from meeting_features import EXCLUDED, FEATURES, Places, refused_rows
from meeting_trials import Found, refused, tried

SEED = 1


def trials(seed: int) -> list[tuple[Row, str]]:
    """Rows with the reason for which they are refused; first those that train."""
    return [
        (row, "") for row in covering_rows(FEATURES, excluded=EXCLUDED, seed=seed)
    ] + refused_rows()


def attempt(row: Row, reason: str, places: Places, run_dir: Path, ranks: CommandRanks) -> Found:
    try:
        return (
            refused(row, reason, places, run_dir, ranks)
            if reason
            else tried(row, places, run_dir, ranks)
        )
    except Exception:
        return Found([traceback.format_exc()])
