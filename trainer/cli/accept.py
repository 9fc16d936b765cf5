"""Accept a machine: `bash run_sft.sh accept [N] [key=value ...]`, a verdict for each line (floor 5).

Exit codes: 0 nothing failed, 1 a line failed, 2 wrong usage, 73 cannot write, 130 interrupted.
"""

import json
import sys
import time
from pathlib import Path

from trainer.acceptance.accept import accept, shareable, summary
from trainer.acceptance.lines import FAIL, LINES
from trainer.cli.arguments import Parser, add_words, as_command, read_words, write_file
from trainer.cli.verify_resume import trial_of
from trainer.errors import EXIT_CRASH, EXIT_DONE
from trainer.resume_proof.proof import interruptible
from trainer.runtime.environment import call

NUM_STEPS = 8


@as_command(interrupted="interrupted: no verdict")
def main(argv: list[str]) -> int:
    parser = _parser()
    options = parser.parse_intermixed_args(argv)
    device = [f"trainer.device={options.device}"] if options.device else []
    trial, started = trial_of(*read_words(parser, [*options.words, *device]), steps=NUM_STEPS), time.monotonic()
    with interruptible():
        found = accept(trial, only=options.only, keep=options.keep)
    wall_s = time.monotonic() - started
    print(f"{summary(found)}; {wall_s:.0f} s")
    if options.json is not None:
        write_file(options.json, json.dumps(shareable(trial, found, wall_s=wall_s), indent=1) + "\n")
    return EXIT_CRASH if any(judgement.verdict == FAIL for judgement in found.values()) else EXIT_DONE


def _parser() -> Parser:
    width = max(map(len, LINES))
    lines = "\n".join(f"  {name:{width}}  {about}" for name, (about, _) in LINES.items())
    usage = f"{call('accept')} [N] [--device cpu] [--only LINE] [--json FILE] [--keep DIR] [key=value ...]"
    text = "Judge this machine, and a recipe on it (default: the quickstart), in some minutes. The lines:\n" + lines
    parser = Parser("accept", usage=usage, description=text)
    add_words(parser)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), help="short for trainer.device=...")
    about = "this line alone; may be given several times"
    parser.add_argument("--only", metavar="LINE", choices=list(LINES), action="append", default=[], help=about)
    parser.add_argument("--json", metavar="FILE", type=Path, help="the verdicts, without names and paths, to share")
    about = "runs and logs go into this new directory and stay (default: among the temporary files, removed)"
    parser.add_argument("--keep", metavar="DIR", type=Path, help=about)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
