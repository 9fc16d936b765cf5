"""Saves without torch, for strace to kill or to fail at any system call: `fake_save.py RUN_DIR STEP
KEEP`.

Says on standard output what it has achieved, a line each. After a failed save it frees the space
and saves the next step, as a run does that goes on training.
"""

import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests" / "unit")]

from checkpoint_fakes import commit  # noqa: E402  found by the paths above

from trainer.checkpoint import layout, retention  # noqa: E402
from trainer.checkpoint.retention import Retention  # noqa: E402


def save(run_dir: Path, step: int, keep: int) -> None:
    commit(run_dir, step)
    say(f"committed {step}")
    retention.settle(run_dir, step, Retention(keep=keep))
    say(f"settled {step}")


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def main(run_dir: Path, step: int, keep: int) -> None:
    try:
        save(run_dir, step, keep)
    except OSError as error:
        say(f"failed {error}")
        layout.clean_leftovers(run_dir)
        save(run_dir, step + 1, keep)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
