"""The exit code of a run whose rank was aborted without a word, and how often in a row that may be.

When NCCL loses a peer, or a collective waits too long, torch's watchdog thread ends the rank with
SIGABRT: Python code never sees an error. Another start is the answer to a lost machine. But a fault
that comes back ends ranks in the same way, and a scheduler must not start that for ever.
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
    """Resumable, unless this is the third start in a row that was aborted and no start got past an
    earlier one.

    Each machine counts for itself, in a file of the run directory that all machines share.
    """
    record = run_dir / f".aborted_{node_rank}.json"
    before = {"step": -1, "in_a_row": 0} | read_object(record)
    step, in_a_row = _last_step(run_dir), before["in_a_row"] + 1
    if step > before["step"]:
        in_a_row = 1
    step = max(step, before["step"])
    if in_a_row < MAX_IN_A_ROW:
        with suppress(OSError):  # a run directory that cannot be written ends the next start
            atomic_write(record, json.dumps({"step": step, "in_a_row": in_a_row}))
        print(
            f"a rank was aborted before it could report an error, as when NCCL loses another "
            f"machine or waits too long; such ends without a new step: {in_a_row}, at most "
            f"{MAX_IN_A_ROW}",
            file=sys.stderr,
            flush=True,
        )
        return EXIT_RESUMABLE
    with suppress(OSError):
        record.unlink()  # whoever starts it again by hand has as many tries again
    print(
        f"ERROR: {MAX_IN_A_ROW} starts in a row were aborted, and none got past step "
        f"{step}: a lost machine is unlikely to be the cause. Fix: read the lines of the "
        f"ranks above, and the output of the other machines",
        file=sys.stderr,
        flush=True,
    )
    return EXIT_CRASH


def _last_step(run_dir: Path) -> int:
    """The last step in the run's log; 0 where there is none."""
    try:
        return max((int(row["step"]) for row in read_metrics(run_dir / FILE_NAME)), default=0)
    except (OSError, ValueError):
        return 0
