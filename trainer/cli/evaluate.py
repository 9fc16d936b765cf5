"""Score checkpoints by their answers: `bash run_sft.sh evaluate RUN_DIR --score NAME`.

It runs beside the training, never in its ranks; docs/evaluation.md. Exit codes: 0 done, 2 wrong
usage or nothing that can be served, 65 a question that cannot be asked or scored, 73 cannot write,
130 interrupted: the same command continues.
"""

import argparse
import logging
import math
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.checkpoint import layout
from trainer.checkpoint.layout import CheckpointInfo
from trainer.cli.arguments import Parser, as_command, at_least
from trainer.cli.listing import require_dir, require_run
from trainer.config import ConfigError
from trainer.errors import EXIT_BAD_DATA, EXIT_DONE, DataError
from trainer.runtime.evaluations import EXEC, PREFIX
from trainer.runtime.heartbeat import is_live

if TYPE_CHECKING:
    from trainer.tools.evaluate.scoring import Evaluation

POLL_S = 5.0
ENGINES = ("transformers", "vllm")
SCORERS = ("exact", "numeric", EXEC)
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def set_up(argv: list[str]) -> None:
    """Set up the process of this command."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)


@as_command({DataError: EXIT_BAD_DATA}, interrupted="interrupted: run it again to continue")
def main(argv: list[str]) -> int:
    arguments = _parsed(argv)
    path: Path = arguments.path
    is_checkpoint = layout.parse_step(path.name) is not None
    if is_checkpoint:
        require_dir(path)
    run_dir = path.resolve().parent if is_checkpoint else path
    require_run(run_dir)
    from trainer.tools.evaluate.scoring import publish

    publish(run_dir, arguments.name)  # what a killed command has left
    if arguments.attach:
        _attach(run_dir, arguments)
    else:
        _score(run_dir, arguments, checkpoint=path if is_checkpoint else None)
    return EXIT_DONE


def _parsed(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        "evaluate",
        description="Score checkpoints by their answers, beside the training.",
    )
    about = "a run directory for all its checkpoints, or one of them"
    parser.add_argument("path", metavar="PATH", type=Path, help=about)
    about = "also score new checkpoints until the run has ended"
    parser.add_argument("--watch", action="store_true", help=about)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--score", choices=SCORERS, help="how an answer is scored")
    what.add_argument(
        "--attach", nargs=3, metavar=("STEP", "NAME", "VALUE"), help="a result measured elsewhere"
    )
    about = "rows of `messages` or `prompt` with answers (default: the run's held-out rows)"
    parser.add_argument("--prompts", metavar="FILE", type=Path, help=about)
    about = f"column of the answers (default: answer; {EXEC}: tests)"
    parser.add_argument("--answer", metavar="COLUMN", help=about)
    about = "logged as eval/NAME (default: the file's name, else held_out)"
    parser.add_argument("--name", metavar="NAME", help=about)
    about = "transformers, vllm, or the address of an OpenAI-compatible server of the checkpoint"
    parser.add_argument("--engine", default=ENGINES[0], help=about)
    about = "an interpreter that has vLLM"
    parser.add_argument("--python", metavar="PYTHON", default=sys.executable, help=about)
    about = "longest answer (default: %(default)s)"
    parser.add_argument("--max-new-tokens", metavar="N", type=at_least(1), default=512, help=about)
    about = (
        f"{EXEC}: run the programs that the model writes, inside bubblewrap where it is installed"
    )
    parser.add_argument("--allow-code", action="store_true", help=about)
    arguments = parser.parse_args(argv)
    if arguments.attach:
        arguments.name = arguments.attach[1].removeprefix(PREFIX)
    elif arguments.name is None:
        arguments.name = arguments.prompts.stem if arguments.prompts else "held_out"
    if not NAME.fullmatch(arguments.name):
        raise ConfigError(
            f"'{arguments.name}' is no name. Fix: --name with letters, digits, '_', '.' and '-'"
        )
    if arguments.engine not in ENGINES and "://" not in arguments.engine:
        raise ConfigError(f"--engine is {', '.join(ENGINES)} or an address: http://HOST:8000/v1")
    is_one = "://" in arguments.engine or layout.parse_step(arguments.path.name) is not None
    if arguments.watch and is_one:
        raise ConfigError(
            "--watch scores all checkpoints of a run, and this is one. Fix: leave it out"
        )
    return arguments


def _score(run_dir: Path, arguments: argparse.Namespace, *, checkpoint: Path | None) -> None:
    asked = _asked(run_dir, arguments)
    from trainer.tools.evaluate.scoring import evaluate, publish

    if checkpoint is not None:
        found = iter([layout.inspect(checkpoint)])
    else:
        found = _checkpoints(run_dir, is_watching=arguments.watch)
    for info in found:
        row = evaluate(run_dir, info, asked)
        publish(run_dir, asked.name)
        if row is not None:
            print(
                f"step {info.step}: {PREFIX}{asked.name} {row['mean']:.4f} "
                f"[{row['low']:.4f}, {row['high']:.4f}], {row['n']} samples"
            )


def _asked(run_dir: Path, arguments: argparse.Namespace) -> "Evaluation":
    if arguments.score == EXEC and not arguments.allow_code:
        raise ConfigError(
            f"--score {EXEC} runs programs that the model wrote. Fix: add --allow-code to allow it"
        )
    from trainer.tools.evaluate import scorers
    from trainer.tools.evaluate.engines import make_generate
    from trainer.tools.evaluate.programs import require_isolation
    from trainer.tools.evaluate.scoring import Evaluation

    if arguments.score == EXEC:
        print(require_isolation())
    column = arguments.answer or (scorers.TESTS if arguments.score == EXEC else scorers.ANSWER)
    if arguments.prompts:
        questions = scorers.read_questions(arguments.prompts, answer_key=column)
    else:
        questions = scorers.held_out_questions(run_dir, answer_key=column)
    # a column that is missing shows before anything is written
    scorers.SCORERS[arguments.score](questions[0], "")
    return Evaluation(
        name=arguments.name,
        questions=questions,
        scorer=arguments.score,
        engine=arguments.engine,
        generate=make_generate(arguments.engine, arguments.python),
        max_new_tokens=arguments.max_new_tokens,
    )


def _checkpoints(run_dir: Path, *, is_watching: bool) -> Iterator[CheckpointInfo]:
    """Yield the checkpoints of a run, the oldest first: rotation deletes it first."""
    seen: set[str] = set()
    while True:
        was_live = is_live(run_dir)
        for info in layout.committed(run_dir):
            assert info.manifest is not None
            if info.manifest.nonce not in seen and info.path.is_dir():
                seen.add(info.manifest.nonce)
                yield info
        if not (is_watching and was_live):
            return
        time.sleep(POLL_S)


def _attach(run_dir: Path, arguments: argparse.Namespace) -> None:
    from trainer.tools.evaluate.scoring import append_result, publish

    step, _, text = arguments.attach
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not step.isdecimal() or not math.isfinite(value):
        raise ConfigError(f"--attach takes STEP NAME VALUE with two numbers, got {step} and {text}")
    append_result(run_dir, name=arguments.name, step=int(step), value=value)
    publish(run_dir, arguments.name)
    print(f"step {int(step)}: {PREFIX}{arguments.name} {value:g}, attached")


if __name__ == "__main__":
    set_up(sys.argv[1:])
    sys.exit(main(sys.argv[1:]))
