"""Questions for a model, and scorers of its answers."""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from trainer.config import ConfigError, parse_recorded
from trainer.data.readers import iter_rows
from trainer.data.rows import location
from trainer.errors import DataError
from trainer.runtime.evaluations import EXEC
from trainer.tools.evaluate.programs import run_tests
from trainer.tracking.run_info import read_config
from trainer.train.start.inputs import prepare_data_of_run

MESSAGES, PROMPT, ANSWER, TESTS = "messages", "prompt", "answer", "tests"
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?")
FINAL = "####"
"""Precedes the final answer in GSM8K."""
FENCED = re.compile(r"```[^`\n]*\n(.*?)(?:\n```|\Z)", re.DOTALL)

Turns = Sequence[Mapping[str, Any]]
"""Messages, the last of which is to be answered."""


@dataclass(frozen=True)
class Question:
    """A row to ask. `expected`: its column of answers; without an `answer`, the assistant turn
    that follows the question. `place`: `file:line`.
    """

    turns: Turns
    expected: Any
    place: str


Scorer = Callable[[Question, str], str]
"""Returns why an answer is wrong, or an empty string if it is right; called from several threads.
Raises `DataError` for a question that it cannot score.
"""


def read_questions(path: Path, *, answer_key: str) -> list[Question]:
    """Return a question for every row of a file. Raises `DataError` for a row without one."""
    if not path.is_file():
        raise ConfigError(
            f"no file '{path}'. Fix: give --prompts a file with rows of {MESSAGES} or {PROMPT} "
            "(.jsonl, .json, .parquet)"
        )
    questions = list(_questions(path, answer_key))
    if not questions:
        raise DataError(f"'{path}' has no rows: there is nothing to ask")
    return questions


def held_out_questions(run_dir: Path, *, answer_key: str) -> list[Question]:
    """Return the rows that the run holds out for validation. Raises `ConfigError` without any."""
    validation = prepare_data_of_run(parse_recorded(read_config(run_dir)), run_dir).validation
    if validation is None:
        raise ConfigError("the run holds out no rows for validation. Fix: add --prompts FILE")
    places = dict.fromkeys(validation.location(index) for index in range(len(validation)))
    files = dict.fromkeys(place.rpartition(":")[0] for place in places)
    return [question for file in files for question in _questions(Path(file), answer_key, places)]


def digest_of_questions(questions: Sequence[Question]) -> str:
    """Return the SHA-256 of all turns and expected answers, in order."""
    rows = [[question.turns, question.expected] for question in questions]
    return hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode()).hexdigest()


def _questions(
    path: Path, answer_key: str, wanted: Collection[str] | None = None
) -> Iterator[Question]:
    for row in iter_rows(path, (MESSAGES, PROMPT, answer_key)):
        place = location(path, row.line)
        if wanted is not None and place not in wanted:
            continue
        if row.problem is not None:
            raise DataError(f"{place}: {row.problem}")
        yield _question(row.record, answer_key, place)


def _question(row: Any, answer_key: str, place: str) -> Question:
    turns, prompt = row.get(MESSAGES), row.get(PROMPT)
    if isinstance(prompt, str):
        turns = [{"role": "user", "content": prompt}]
    expected = row.get(answer_key)
    is_chat = isinstance(turns, list) and all(
        isinstance(turn, dict) and "role" in turn for turn in turns
    )
    if is_chat and turns and turns[-1]["role"] == "assistant":
        if expected is None and answer_key == ANSWER:
            expected = turns[-1].get("content")
        turns = turns[:-1]
    if not is_chat or not turns:
        raise DataError(
            f"{place}: a row needs {PROMPT} (text) or {MESSAGES} (a list of role and content) that "
            "ask something"
        )
    return Question(turns, expected, place)


def exact(question: Question, answer: str) -> str:
    """Compare the texts, apart from white space."""
    expected = _text(question)
    return "" if answer.split() == expected.split() else f"is not: {expected}"


def numeric(question: Question, answer: str) -> str:
    """Compare the numbers: each is the last one after the last ####, or the last of the text."""
    expected, found = _number(_text(question)), _number(answer)
    if expected is None:
        raise DataError(f"{question.place}: its answer has no number")
    if found is None:
        return "has no number"
    return "" if found == expected else f"{found} is not {expected}"


def executed(question: Question, answer: str) -> str:
    """Run the first fenced block of the answer, or all of it, against the tests of the question."""
    tests = [question.expected] if isinstance(question.expected, str) else question.expected
    if not isinstance(tests, list) or not tests or not all(map(_is_test, tests)):
        raise DataError(
            f"{question.place}: {EXEC} needs tests, a Python text or a list of them (--answer KEY)"
        )
    return run_tests(program_of(answer), tests)


SCORERS: dict[str, Scorer] = {"exact": exact, "numeric": numeric, EXEC: executed}


def program_of(answer: str) -> str:
    """Return the first fenced block, even without its end, or the whole answer without a fence."""
    found = FENCED.search(answer)
    return found[1] if found else answer


def _is_test(test: Any) -> bool:
    return isinstance(test, str) and bool(test.strip())


def _text(question: Question) -> str:
    if not isinstance(question.expected, str | int | float):
        raise DataError(
            f"{question.place}: it has no answer to compare with (--answer KEY names its column)"
        )
    return str(question.expected)


def _number(text: str) -> Fraction | None:
    found = NUMBER.findall(text.rpartition(FINAL)[2])
    try:
        return Fraction(found[-1].replace(",", "")) if found else None
    except (ValueError, ZeroDivisionError):
        return None
