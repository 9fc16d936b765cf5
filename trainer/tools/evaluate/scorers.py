"""The questions for a model, and the functions that score its answers.

The functions that read questions import what is slow, so that the command line starts fast.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from trainer.config import ConfigError, parse_recorded
from trainer.data.rows import location
from trainer.errors import DataError
from trainer.runtime.evaluations import EXEC
from trainer.tools.evaluate.programs import run_tests

MESSAGES = "messages"
PROMPT = "prompt"
ANSWER = "answer"
TESTS = "tests"
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?")
FINAL = "####"
"""The mark that precedes the final answer in GSM8K."""
FENCED = re.compile(r"```[^`\n]*\n(.*?)(?:\n```|\Z)", re.DOTALL)

Turns = Sequence[Mapping[str, Any]]
"""Messages, the last of which the model answers."""


@dataclass(frozen=True)
class Question:
    """A question that was read from one row of a file.

    `expected` is the value in the row's answer column; if the row has none, it is the assistant
    turn that follows the question. `place` is `file:line`.
    """

    turns: Turns
    expected: Any
    place: str


Judge = Callable[[str], str]
"""Returns the reason why an answer is wrong, or an empty string if it is right. Each thread calls
a different one.
"""
Scorer = Callable[[Question], Judge]
"""Returns the judge of the answers to a question. Raises `DataError` for a question that it cannot
score.
"""


def read_questions(path: Path, *, answer_key: str) -> list[Question]:
    """Return a question for every row of a file.

    Raises `ConfigError` if the file is missing, `DataError` if it has no rows or an unusable row.
    """
    if not path.is_file():
        raise ConfigError(
            f"--prompts: there is no file '{path}'.\n"
            f"Fix: a file with rows of {MESSAGES} or {PROMPT} (.jsonl, .json, .parquet)"
        )
    questions = list(_questions(path, answer_key))
    if not questions:
        raise DataError(f"'{path}' has no rows")
    return questions


def held_out_questions(run_dir: Path, *, answer_key: str) -> list[Question]:
    """Return the validation rows of a run as questions.

    Raises `ConfigError` if the run has none, `DataError` for an unusable row.
    """
    from trainer.tracking.run_info import read_config
    from trainer.train.start.inputs import prepare_data_alone

    validation = prepare_data_alone(parse_recorded(read_config(run_dir))).validation
    if validation is None:
        raise ConfigError("the run holds out no rows for validation.\nFix: add --prompts FILE")
    places = dict.fromkeys(validation.location(index) for index in range(len(validation)))
    files = dict.fromkeys(place.rpartition(":")[0] for place in places)
    return [question for file in files for question in _questions(Path(file), answer_key, places)]


def _questions(
    path: Path, answer_key: str, wanted: Collection[str] | None = None
) -> Iterator[Question]:
    from trainer.data.readers import iter_rows

    for row in iter_rows(path, (MESSAGES, PROMPT, answer_key)):
        place = location(path, row.line)
        if wanted is not None and place not in wanted:
            continue
        if row.problem is not None:
            raise DataError(f"{place}: {row.problem}")
        yield _question(row.record, answer_key, place)


def _question(row: Any, answer_key: str, place: str) -> Question:
    turns = row.get(MESSAGES)
    if isinstance(row.get(PROMPT), str):
        turns = [{"role": "user", "content": row[PROMPT]}]
    is_chat = isinstance(turns, list) and all(
        isinstance(turn, dict) and "role" in turn for turn in turns
    )
    expected = row.get(answer_key)
    if is_chat and turns and turns[-1]["role"] == "assistant":
        if expected is None and answer_key == ANSWER:
            expected = turns[-1].get("content")
        turns = turns[:-1]
    if not is_chat or not turns:
        raise DataError(
            f"{place}: the row has no question.\n"
            f"Fix: give it {PROMPT} (text) or {MESSAGES} (a list of role and content)"
        )
    return Question(turns, expected, place)


def exact(question: Question) -> Judge:
    """Compare the answer with the expected text, ignoring differences in white space."""
    expected = _text(question)
    return lambda answer: "" if answer.split() == expected.split() else f"is not: {expected}"


def numeric(question: Question) -> Judge:
    """Compare the last numbers of the answer and the expected text.

    If a text contains `####`, only the part after the last one counts.
    """
    expected = _number(_text(question))
    if expected is None:
        raise DataError(f"{question.place}: its answer has no number")

    def judge(answer: str) -> str:
        found = _number(answer)
        return "" if found == expected else f"{found} is not {expected}"

    return judge


def executed(question: Question) -> Judge:
    """Run the program in the answer against the tests of the question."""
    tests = [question.expected] if isinstance(question.expected, str) else question.expected
    is_usable = isinstance(tests, list) and all(isinstance(t, str) and t.strip() for t in tests)
    if not is_usable or not tests:
        raise DataError(
            f"{question.place}: {EXEC} needs tests: a Python text, or a list of them.\n"
            f"Fix: name their column with --answer"
        )
    return lambda answer: run_tests(program_of(answer), tests)


SCORERS: dict[str, Scorer] = {"exact": exact, "numeric": numeric, EXEC: executed}


def program_of(answer: str) -> str:
    """Return the first fenced block of an answer, even if it is not closed. Without a fence, return
    the whole answer.
    """
    found = FENCED.search(answer)
    return found[1] if found else answer


def _text(question: Question) -> str:
    if not isinstance(question.expected, str | int | float):
        raise DataError(
            f"{question.place}: the row has no answer to compare with.\n"
            f"Fix: name its column with --answer"
        )
    return str(question.expected)


def _number(text: str) -> Fraction | None:
    found = NUMBER.findall(text.rpartition(FINAL)[2])
    try:
        return Fraction(found[-1].replace(",", "")) if found else None
    except (ValueError, ZeroDivisionError):
        return None
