"""Score checkpoints by what they write: `bash run_sft.sh evaluate RUN_DIR --score NAME` (floor 5).

Beside the training and never in its ranks; docs/evaluation.md. Exit codes: 0 done, 2 wrong usage or
nothing that can be served, 65 a question that cannot be asked or scored, 73 cannot write, 130
interrupted: the same command goes on.
"""

import argparse
import logging
import math
import re
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint import layout
from trainer.checkpoint.layout import CheckpointInfo
from trainer.checkpoint_tools.listing import require_dir, require_run
from trainer.cli.arguments import Parser, as_command, at_least
from trainer.config import ConfigError
from trainer.errors import EXIT_BAD_DATA, EXIT_DONE, DataError
from trainer.runtime.evaluations import EXEC, PREFIX, read_evaluations, read_summaries
from trainer.runtime.heartbeat import is_live

if TYPE_CHECKING:
    from trainer.evaluation.evaluate import Evaluation, Publisher

POLL_S = 5.0
ENGINES = ("transformers", "vllm")
TEMPLATE_WORD = "--apply_chat_template"
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def set_up(argv: list[str]) -> None:
    """Of the process whose command this is."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)


@as_command({DataError: EXIT_BAD_DATA}, interrupted="interrupted: run it again to go on")
def main(argv: list[str]) -> int:
    from trainer.evaluation.evaluate import Publisher

    arguments = _parsed(argv)
    path: Path = arguments.run_dir
    step, run_dir = layout.parse_step(path.name), path
    if step is not None:
        require_dir(path)
        arguments.step, run_dir = step, path.resolve().parent
    require_run(run_dir)
    with closing(Publisher(run_dir, arguments.name)) as publisher:
        publisher.publish()
        if arguments.attach:
            _attach(run_dir, arguments)
        elif arguments.tasks:
            for name in _run_tasks(run_dir, arguments):
                with closing(Publisher(run_dir, name)) as own:
                    own.publish()
        else:
            _score(run_dir, arguments, publisher)
        publisher.publish()
    return EXIT_DONE


def _parsed(argv: list[str]) -> argparse.Namespace:
    about = "Score checkpoints by what they write, beside the training. Without --step: all that are there."
    parser = Parser("evaluate", description=about)
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", type=Path, help="a run directory, or one of its checkpoints"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", metavar="N", type=int, help="the checkpoint of this step")
    which.add_argument(
        "--watch", action="store_true", help="also those to come, until the run has ended"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--score",
        metavar="SCORER",
        help="exact, regex, numeric, exec or python:module.function(row, completion)",
    )
    about = "benchmarks of lm-evaluation-harness, as gsm8k,ifeval or mine.yaml; behind -- more of its options"
    what.add_argument("--tasks", metavar="TASKS", help=about)
    what.add_argument(
        "--attach", nargs=3, metavar=("STEP", "NAME", "VALUE"), help="a result measured elsewhere"
    )
    about = "rows of `messages` or `prompt`, and answers (default: the rows that the run holds out for validation)"
    parser.add_argument("--prompts", metavar="FILE", type=Path, help=about)
    about = "column of the answers (default: answer; exec: tests)"
    parser.add_argument("--answer", metavar="COLUMN", help=about)
    parser.add_argument(
        "--name", metavar="NAME", help="logged as eval/NAME (default: of the file, else held_out)"
    )
    about = "transformers, vllm, or the address of an OpenAI-compatible server that serves the checkpoint"
    parser.add_argument("--engine", default=ENGINES[0], help=about)
    parser.add_argument(
        "--python",
        metavar="PYTHON",
        default=sys.executable,
        help="an interpreter with vLLM or lm_eval",
    )
    about = "longest answer (default: %(default)s)"
    parser.add_argument("--max-new-tokens", metavar="N", type=at_least(1), default=512, help=about)
    parser.add_argument(
        "--temperature", metavar="T", type=float, default=0.0, help="0: greedy (default)"
    )
    parser.add_argument(
        "--seed",
        metavar="N",
        type=at_least(0),
        default=0,
        help="of sampling (default: %(default)s)",
    )
    about = "exec: let programs run that the model wrote (docs/evaluation.md says what they can do)"
    parser.add_argument("--allow-code", action="store_true", help=about)
    about = "exec: seconds for one program (default: %(default)s)"
    parser.add_argument("--time-limit", metavar="S", type=float, default=10.0, help=about)
    about = "exec: memory of each of its processes (default: %(default)s)"
    parser.add_argument("--memory-mib", metavar="N", type=at_least(1), default=512, help=about)
    end = argv.index("--") if "--" in argv else len(argv)
    arguments = parser.parse_args(argv[:end])
    arguments.words = argv[end + 1 :]
    if arguments.words and not arguments.tasks:
        raise ConfigError("words behind -- are options of lm_eval: they need --tasks")
    arguments.name = arguments.name or (arguments.prompts.stem if arguments.prompts else "held_out")
    if arguments.attach:
        arguments.name = arguments.attach[1].removeprefix(PREFIX)
    if not NAME.fullmatch(arguments.name):
        raise ConfigError(
            f"--name '{arguments.name}' is no name: letters, digits, '_', '.' and '-'"
        )
    if not 0 <= arguments.temperature < math.inf or not 0 < arguments.time_limit < math.inf:
        raise ConfigError("--temperature must be at least 0, --time-limit more than 0")
    if arguments.engine not in ENGINES and "://" not in arguments.engine:
        raise ConfigError(f"--engine is {', '.join(ENGINES)} or an address as http://HOST:8000/v1")
    if "://" in arguments.engine and (arguments.watch or arguments.tasks):
        raise ConfigError(
            "a server serves one checkpoint: --step names it; --watch and --tasks need another"
        )
    return arguments


def _score(run_dir: Path, arguments: argparse.Namespace, publisher: "Publisher") -> None:
    from trainer.evaluation.evaluate import evaluate

    asked = _asked(run_dir, arguments)
    metric = PREFIX + asked.name
    for info in _checkpoints(run_dir, arguments):
        if evaluate(run_dir, info, asked, tell=print):
            publisher.publish()
        elif not read_summaries(run_dir).get(metric, {}).get(info.step):
            continue
        row = read_summaries(run_dir)[metric][info.step]
        print(
            f"step {info.step}: {metric} {row['mean']:.4f} [{row['low']:.4f}, {row['high']:.4f}], "
            f"{row['n']} samples"
        )
    rows, there = (
        read_summaries(run_dir).get(metric, {}),
        {info.step for info in layout.committed(run_dir)},
    )
    if kept := [step for step in rows if step in there]:
        best = max(kept, key=lambda step: (rows[step]["mean"], step))
        print(f"best of the checkpoints that are there: step {best}, {rows[best]['mean']:.4f}")


def _asked(run_dir: Path, arguments: argparse.Namespace) -> "Evaluation":
    from trainer.evaluation.evaluate import Evaluation
    from trainer.evaluation.programs import ProgramLimits, require_isolation
    from trainer.evaluation.scorers import (
        PYTHON,
        answer_column,
        held_out_questions,
        make_scorer,
        read_questions,
    )
    from trainer.serving.generation import Sampling, make_engine

    limits = ProgramLimits(arguments.time_limit, arguments.memory_mib)
    scorer = make_scorer(arguments.score, limits, allow_code=arguments.allow_code)
    if arguments.score == EXEC:
        print(require_isolation())
    column = arguments.answer or answer_column(arguments.score)
    file = arguments.prompts
    questions = (
        read_questions(file, answer_key=column)
        if file
        else held_out_questions(run_dir, answer_key=column)
    )
    if not arguments.score.startswith(PYTHON):  # whose own functions see answers alone
        scorer(questions[0], "")  # a column that is missing shows before anything is written
    return Evaluation(
        name=arguments.name,
        questions=questions,
        scorer_word=arguments.score,
        scorer=scorer,
        engine_word=arguments.engine,
        engine=make_engine(arguments.engine, arguments.python),
        sampling=Sampling(arguments.max_new_tokens, arguments.temperature, arguments.seed),
        limits=limits,
    )


def _checkpoints(run_dir: Path, arguments: argparse.Namespace) -> Iterator[CheckpointInfo]:
    """Those asked for, the oldest first: it is the next to be deleted."""
    if arguments.step is not None:
        info = layout.inspect(run_dir / layout.step_dir_name(arguments.step))
        if info.status != "committed":
            there = ", ".join(str(known.step) for known in layout.committed(run_dir)) or "none"
            raise ConfigError(
                f"'{info.path}' is no checkpoint that can be scored: {info.reason}; there are: "
                f"{there}"
            )
        yield info
        return
    seen: set[str] = set()
    while True:
        was_live = is_live(run_dir)
        for info in layout.committed(run_dir):
            assert info.manifest is not None
            if info.manifest.nonce not in seen and info.path.is_dir():
                seen.add(info.manifest.nonce)
                yield info
        if not (arguments.watch and was_live):
            return
        time.sleep(POLL_S)


def _attach(run_dir: Path, arguments: argparse.Namespace) -> None:
    from trainer.evaluation.evaluate import append_result

    step, name, value = arguments.attach
    try:
        number = float(value)
        is_right = step.isdecimal() and math.isfinite(number)
    except ValueError:
        is_right = False
    if not is_right:
        raise ConfigError(
            f"--attach takes STEP NAME VALUE, numbers the first and the last; got {step} {name} "
            f"{value}"
        )
    append_result(run_dir, name=arguments.name, step=int(step), value=number, scorer="attached")
    print(f"step {int(step)}: {PREFIX}{arguments.name} {number:g}, attached")


def _run_tasks(run_dir: Path, arguments: argparse.Namespace) -> Iterator[str]:
    """Names of what was found, each written down; a checkpoint is asked the same only once."""
    from trainer.checkpoint.export import require_export
    from trainer.checkpoint.reading import pinned
    from trainer.evaluation.evaluate import Z, append_result, run_tasks

    asked = {
        "tasks": arguments.tasks,
        "engine": arguments.engine,
        "seed": arguments.seed,
        "words": arguments.words,
    }
    for info in _checkpoints(run_dir, arguments):
        assert info.manifest is not None
        about: dict[str, Any] = {"scorer": "lm_eval", "asked": asked, "nonce": info.manifest.nonce}
        if any(
            row.get("is_whole") and about.items() <= row.items()
            for row in read_evaluations(run_dir)
        ):
            print(
                f"step {info.step}: {arguments.tasks} was measured before; another --seed measures "
                f"again"
            )
            continue
        with pinned(info, layout.HUGGINGFACE) as directory:
            if directory is None:
                print(f"step {info.step}: was deleted before it could be scored")
                continue
            require_export(replace(info, path=directory))
            export = directory / layout.HUGGINGFACE
            if TEMPLATE_WORD not in arguments.words and (export / "chat_template.jinja").exists():
                print(
                    f"step {info.step}: asked without the chat template; with it: --tasks … -- "
                    f"{TEMPLATE_WORD}"
                )
            found = run_tasks(export, python=arguments.python, **asked)
        for number, result in enumerate(found, start=1):
            row = about | {"n": result.n, "is_whole": number == len(found)}
            if spread := Z * result.error:
                row |= {"low": result.value - spread, "high": result.value + spread}
            append_result(run_dir, name=result.name, step=info.step, value=result.value, **row)
            print(f"step {info.step}: {PREFIX}{result.name} {result.value:.4f}")
            yield result.name


if __name__ == "__main__":
    set_up(sys.argv[1:])
    sys.exit(main(sys.argv[1:]))
