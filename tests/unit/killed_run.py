"""A run that only logs: `python killed_run.py RUN_DIR BACKEND FIRST_STEP KILL_STEP` (-1: to its
end).

Killed as a machine kills: by SIGKILL, as soon as the trackers have taken the row of KILL_STEP.
"""

import os
import signal
import sys
import time
from pathlib import Path

from trainer.tracking import Tracking

STEPS = 12
STEPS_PER_EPOCH = 4


def train_row(step):
    return {
        "train/loss": 2.0 + 1 / step,
        "train/lr(1e-3)": step / 100,
        "train/total_valid_token_count": 10 * step,
        "progress/epoch": (step - 1) // STEPS_PER_EPOCH,
    }


def val_row(step):
    return {"val/loss": 3.0 + 1 / step}


def log_steps(tracking, steps, *, shift=0.0):
    """Log steps with a validation every second one; `shift` is added to every value."""
    for step in steps:
        tracking.log({key: value + shift for key, value in train_row(step).items()}, step)
        if step % 2 == 0:
            tracking.log({key: value + shift for key, value in val_row(step).items()}, step)


def main(run_dir, backend, first_step, kill_step):
    tracking = Tracking(
        "project", "killed", [backend], {"lr": 0.1}, run_dir=run_dir, total_steps=STEPS
    )
    for step in range(first_step, STEPS + 1):
        log_steps(tracking, [step])
        if step == kill_step:
            while any(sink._queue.qsize() for sink in tracking._sinks):
                time.sleep(0.01)
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
    tracking.finish(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
