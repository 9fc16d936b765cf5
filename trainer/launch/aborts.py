"""The exit code of a run whose rank was aborted without reporting an error.

When NCCL loses a peer, or a collective times out, torch's watchdog thread ends the rank with
SIGABRT, and Python code never sees an error. A restart recovers from the loss of a machine. But a
permanent fault looks the same, and a scheduler must not restart such a run forever.
"""

import json
import sys
from contextlib import suppress
from pathlib import Path

from trainer.errors import EXIT_CRASH, EXIT_RESUMABLE
from trainer.runtime.files import atomic_write
from trainer.runtime.json_lines import read_object
from trainer.tracking import read_metrics
from trainer.tracking.metrics_file import FILE_NAME

MAX_IN_A_ROW = 3


def exit_code_after_abort(run_dir: Path, node_rank: int) -> int:
    """Return `EXIT_RESUMABLE`, unless this is the third aborted start in a row and none of them
    reached a new step.

    Each machine counts its starts in `.aborted_<node_rank>.json` in the run directory.
    """
    record = run_dir / f".aborted_{node_rank}.json"
    last = {"step": -1, "in_a_row": 0} | read_object(record)
    step = _last_step(run_dir)
    num_in_a_row = 1 if step > last["step"] else last["in_a_row"] + 1
    step = max(step, last["step"])
    if num_in_a_row < MAX_IN_A_ROW:
        with suppress(OSError):  # the next start reports a directory that cannot be written
            atomic_write(record, json.dumps({"step": step, "in_a_row": num_in_a_row}))
        print(
            f"a rank was aborted before it could report an error, as when NCCL loses another "
            f"machine or a collective times out (start {num_in_a_row} of at most {MAX_IN_A_ROW} in "
            f"a row that train no new step)",
            file=sys.stderr,
        )
        return EXIT_RESUMABLE
    with suppress(OSError):
        record.unlink()  # a person who starts the run again gets the same number of tries
    print(
        f"ERROR: {MAX_IN_A_ROW} starts in a row were aborted, and none got past step {step}, so a "
        f"lost machine is unlikely to be the cause.\nFix: read the lines of the ranks above, and "
        f"the output of the other machines",
        file=sys.stderr,
    )
    return EXIT_CRASH


def _last_step(run_dir: Path) -> int:
    try:
        return max((int(row["step"]) for row in read_metrics(run_dir / FILE_NAME)), default=0)
    except (OSError, ValueError):
        return 0
