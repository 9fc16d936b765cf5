"""Train steps of a run again without some of their rows: `bash run_sft.sh replay RUN_DIR ...` (floor 5).

Exit codes: 0 done, 1 the steps with the rows are not those of the run, 2 wrong usage or rows that these steps do not
have, 73 cannot write, 130 interrupted; that of the training where it fails.
"""

import sys
from functools import partial
from pathlib import Path

from trainer.cli.arguments import Parser, as_command, at_least
from trainer.resume_proof.proof import in_work_directory, interruptible


@as_command(interrupted="interrupted: no verdict")
def main(argv: list[str]) -> int:
    about = "Train steps of a run again, as they were and without some of their rows, and say what differs."
    parser = Parser("replay", description=about)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="checkpoints/<project_name>/<experiment_name>")
    begins = "the steps after it; begins at the newest whole checkpoint until then, without one at the start of the run"
    parser.add_argument("--from", dest="step", metavar="STEP", type=at_least(0), required=True, help=begins)
    parser.add_argument("--steps", metavar="N", type=at_least(1), required=True, help="how many")
    rows = "as evidence/ and 'data ledger --json' name them; a comma between two"
    parser.add_argument("--without", metavar="FILE:LINE", required=True, help=rows)
    parser.add_argument("--keep", action="store_true", help="leave the two runs where they are, to look into")
    arguments = parser.parse_args(argv)

    from trainer.resume_proof.counterfactual import plan, replay

    without = tuple(row.strip() for row in arguments.without.split(",") if row.strip())
    run_dir = arguments.run_dir.resolve()
    asked = plan(run_dir, from_step=arguments.step, num_steps=arguments.steps, rows=without)
    with interruptible():
        return in_work_directory(run_dir, "replay", partial(replay, asked), is_kept=arguments.keep)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
