"""Score the answers of checkpoints: `bash run_sft.sh evaluate RUN_DIR --score NAME`.

It runs in its own process, even while the run trains (docs/evaluation.md). Exit codes: 0 done, 2
wrong usage or nothing that can be served, 65 a question that cannot be asked or scored, 73 cannot
write, 130 interrupted (the same command continues with the interrupted checkpoint).
"""

import argparse
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.checkpoint import layout
from trainer.checkpoint.layout import CheckpointInfo
from trainer.cli.arguments import Parser, add_engine, as_command, at_least, named_path
from trainer.cli.listing import require_dir, require_run
from trainer.config import ConfigError
from trainer.errors import EXIT_DONE
from trainer.runtime.evaluations import EXEC, PREFIX
from trainer.runtime.heartbeat import is_live
from trainer.tools.evaluate import scorers

if TYPE_CHECKING:
    from trainer.tools.evaluate.scoring import Evaluation

POLL_S = 5.0
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


@as_command()
def main(argv: list[str]) -> int:
    arguments = _parsed(argv)
    path: Path = arguments.path
    is_checkpoint = layout.parse_step(path.name) is not None
    if is_checkpoint:
        require_dir(path)
    run_dir = path.resolve().parent if is_checkpoint else path
    require_run(run_dir)
    from trainer.tools.evaluate.scoring import evaluate, publish

    if arguments.attach:
        _attach(run_dir, arguments)
        return EXIT_DONE
    asked = _asked(run_dir, arguments)
    watched = _checkpoints(run_dir, is_watching=arguments.watch)
    for info in [layout.inspect(path)] if is_checkpoint else watched:
        row = evaluate(run_dir, info, asked)
        publish(run_dir, asked.name)  # including results that a killed command did not send
        if row is not None:
            print(
                f"step {info.step}: {PREFIX}{asked.name} {row['mean']:.4f} "
                f"[{row['low']:.4f}, {row['high']:.4f}], {row['n']} samples"
            )
    return EXIT_DONE


def _parsed(argv: list[str]) -> argparse.Namespace:
    parser = Parser("evaluate")
    parser.add_argument(
        "path",
        metavar="PATH",
        type=named_path,
        help="a run directory, or one of its checkpoints",
    )
    parser.add_argument(
        "--watch", action="store_true", help="also score new checkpoints until the run has ended"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--score", choices=scorers.SCORERS, help="how to score an answer")
    what.add_argument(
        "--attach",
        nargs=3,
        metavar=("STEP", "NAME", "VALUE"),
        help="record a result that was measured elsewhere",
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        type=Path,
        help="rows of `messages` or `prompt` with answers (default: the run's validation rows)",
    )
    parser.add_argument(
        "--answer",
        metavar="COLUMN",
        help=f"column with the answers (default: answer; {EXEC}: tests)",
    )
    parser.add_argument(
        "--name", help="logged as eval/NAME (default: the name of FILE, else held_out)"
    )
    add_engine(parser)
    parser.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=at_least(1),
        default=512,
        help="length limit of an answer (default: %(default)s)",
    )
    parser.add_argument(
        "--allow-code",
        action="store_true",
        help=f"{EXEC}: run the programs that the model writes, inside bubblewrap if it is installed",
    )
    arguments = parser.parse_args(argv)
    if arguments.attach:
        arguments.name = arguments.attach[1].removeprefix(PREFIX)
    elif arguments.name is None:
        arguments.name = arguments.prompts.stem if arguments.prompts else "held_out"
    if not NAME.fullmatch(arguments.name):
        raise ConfigError(
            f"'{arguments.name}' is not a valid name for an evaluation.\n"
            f"Fix: use letters, digits, '_', '.' and '-' in --name"
        )
    return arguments


def _asked(run_dir: Path, arguments: argparse.Namespace) -> "Evaluation":
    """Return the questions, and the function that scores the answers. Raises `ConfigError`,
    `DataError`.
    """
    is_exec = arguments.score == EXEC
    if is_exec and not arguments.allow_code:
        raise ConfigError(
            f"--score {EXEC} runs programs that the model wrote.\nFix: add --allow-code to allow it"
        )
    from trainer.tools.evaluate.engines import make_generate
    from trainer.tools.evaluate.programs import require_isolation
    from trainer.tools.evaluate.questions import ANSWER, read_questions
    from trainer.tools.evaluate.scoring import Evaluation

    if is_exec:
        print(require_isolation())
    column = arguments.answer or ("tests" if is_exec else ANSWER)
    questions = read_questions(run_dir, arguments.prompts, answer_key=column)
    return Evaluation(
        name=arguments.name,
        questions=questions,
        # fails for a question that cannot be scored before anything is written
        judges=[scorers.SCORERS[arguments.score](question) for question in questions],
        scorer=arguments.score,
        engine=arguments.engine,
        generate=make_generate(arguments.engine, arguments.python),
        max_new_tokens=arguments.max_new_tokens,
    )


def _checkpoints(run_dir: Path, *, is_watching: bool) -> Iterator[CheckpointInfo]:
    """Yield the checkpoints of a run, oldest first, because rotation deletes them in this order."""
    seen: set[str | None] = set()
    while True:
        was_live = is_live(run_dir)
        for info in layout.committed(run_dir):
            if info.nonce not in seen and info.path.is_dir():
                seen.add(info.nonce)
                yield info
        if not (is_watching and was_live):
            return
        time.sleep(POLL_S)


def _attach(run_dir: Path, arguments: argparse.Namespace) -> None:
    """Record a result that was measured elsewhere, and send it to the trackers."""
    from trainer.tools.evaluate.scoring import append_result, publish

    try:
        step = int(arguments.attach[0])
        value = float(arguments.attach[2])
    except ValueError:
        step = -1
        value = math.nan
    if step < 0 or not math.isfinite(value):
        raise ConfigError(
            f"--attach {' '.join(arguments.attach)}: STEP and VALUE must be finite numbers"
        )
    append_result(
        run_dir,
        name=arguments.name,
        step=step,
        value=value,
    )
    publish(run_dir, arguments.name)
    print(f"step {step}: {PREFIX}{arguments.name} {value:g}, attached")
