"""What a model is asked, and how an answer is scored: a number from 0 to 1, and in words why it
is not 1 (floor 5).
"""

import hashlib
import importlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

from trainer.config import ConfigError, parse_config
from trainer.data.readers import iter_rows
from trainer.data.rows import location
from trainer.errors import DataError
from trainer.evaluation.programs import ProgramLimits, run_tests
from trainer.run.inputs import prepare_data_of_run
from trainer.runtime.evaluations import EXEC
from trainer.serving.generation import Turns
from trainer.tracking.run_info import read_config

MESSAGES, PROMPT, ANSWER = "messages", "prompt", "answer"


@dataclass(frozen=True)
class Question:
    """`expected`: the column of answers; where a row has no `answer`, the assistant's turn
    behind the question.
    """

    turns: Turns
    expected: Any
    row: Mapping[str, Any]
    place: str
    """`file:line`."""


def read_questions(path: Path, *, answer_key: str) -> list[Question]:
    """Of every row of a file. Raises `DataError` naming the row that cannot be asked."""
    if not path.is_file():
        raise ConfigError(
            f"no file '{path}': --prompts names rows of {MESSAGES} or {PROMPT} (.jsonl, .json, "
            f".parquet)"
        )
    questions = list(_questions(path, answer_key, None))
    if not questions:
        raise DataError(f"'{path}' holds no row: nothing can be asked")
    return questions


def held_out_questions(run_dir: Path, *, answer_key: str) -> list[Question]:
    """The rows that the run keeps for validation. Raises `ConfigError` where it keeps none."""
    validation = prepare_data_of_run(parse_config(read_config(run_dir)), run_dir).validation
    if validation is None:
        raise ConfigError("the run keeps no rows for validation: name --prompts FILE")
    places = dict.fromkeys(validation.location(index) for index in range(len(validation)))
    files = dict.fromkeys(place.rpartition(":")[0] for place in places)
    return [question for file in files for question in _questions(Path(file), answer_key, places)]


def digest_of_questions(questions: list[Question]) -> str:
    """SHA-256 over their rows and what is expected, in order."""
    asked = ([dict(question.row), question.expected] for question in questions)
    rows = (json.dumps(row, sort_keys=True, default=str) for row in asked)
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def _questions(path: Path, answer_key: str, wanted: Mapping[str, Any] | None) -> Iterator[Question]:
    for row in iter_rows(path, (MESSAGES, PROMPT, answer_key)):
        place = location(path, row.line)
        if wanted is not None and place not in wanted:
            continue
        if row.problem is not None:
            raise DataError(f"{place}: {row.problem}")
        yield _question(row.record, answer_key, place)


def _question(row: Any, answer_key: str, place: str) -> Question:
    messages, prompt = row.get(MESSAGES), row.get(PROMPT)
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    is_list = isinstance(messages, list) and all(
        isinstance(turn, dict) and "role" in turn for turn in messages
    )
    if not is_list or not messages:
        raise DataError(
            f"{place}: a row needs {PROMPT} (text) or {MESSAGES} (a list of role and content)"
        )
    expected = row.get(answer_key)
    if messages[-1]["role"] == "assistant":
        if expected is None and answer_key == ANSWER:
            expected = messages[-1].get("content")
        messages = messages[:-1]
    if not messages:
        raise DataError(f"{place}: its {MESSAGES} ask nothing")
    return Question(messages, expected, row, place)


PYTHON = "python:"
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?")
FINAL = "####"
"""In front of GSM8K's final answer."""
FENCED = re.compile(r"```[^`\n]*\n(.*?)(?:\n```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Score:
    value: float
    reason: str = ""


class Scorer(Protocol):
    def __call__(self, question: Question, completion: str) -> Score:
        """May be called from several threads. Raises `DataError` for a row that cannot be
        scored.
        """


class OwnScorer(Protocol):
    """What `python:module.function` names."""

    def __call__(self, row: Mapping[str, Any], completion: str) -> float: ...


def answer_column(word: str) -> str:
    return "tests" if word == EXEC else ANSWER


def make_scorer(word: str, limits: ProgramLimits, *, allow_code: bool = False) -> Scorer:
    """Raises `ConfigError` for an unknown name, and for `exec` without `allow_code`."""
    if word.startswith(PYTHON):
        return _own(word.removeprefix(PYTHON))
    if word == EXEC:
        if not allow_code:
            raise ConfigError(
                f"--score {EXEC} runs programs that the model wrote. Fix: add --allow-code to "
                f"allow it"
            )
        return lambda question, completion: _executed(question, completion, limits)
    if word not in SCORERS:
        raise ConfigError(
            f"--score is any of {', '.join(SCORERS)}, {EXEC}, {PYTHON}module.function; got '{word}'"
        )
    return SCORERS[word]


def exact(question: Question, completion: str) -> Score:
    """White space apart."""
    expected = _text(question)
    return _judged(completion.split() == expected.split(), f"is not: {expected}")


def regex(question: Question, completion: str) -> Score:
    """The answer is a pattern that is searched in the completion."""
    pattern = _text(question)
    try:
        return _judged(re.search(pattern, completion) is not None, f"has no {pattern}")
    except re.error as error:
        raise DataError(
            f"{question.place}: '{pattern}' is no regular expression: {error}"
        ) from error


def numeric(question: Question, completion: str) -> Score:
    """The number behind the last ####, else the last number, must be that of the answer."""
    expected, found = _number(_text(question)), _number(completion)
    if expected is None:
        raise DataError(f"{question.place}: its answer holds no number")
    return _judged(
        found == expected, "holds no number" if found is None else f"{found} is not {expected}"
    )


SCORERS: dict[str, Scorer] = {"exact": exact, "regex": regex, "numeric": numeric}


def program_of(completion: str) -> str:
    """The first fenced block, also one without its end; without any fence all of it."""
    found = FENCED.search(completion)
    return found[1] if found else completion


def _executed(question: Question, completion: str, limits: ProgramLimits) -> Score:
    tests = [question.expected] if isinstance(question.expected, str) else question.expected
    if (
        not isinstance(tests, list)
        or not tests
        or not all(isinstance(test, str) and test.strip() for test in tests)
    ):
        raise DataError(
            f"{question.place}: {EXEC} needs tests, a Python text or a list of them (--answer KEY)"
        )
    found = run_tests(program_of(completion), tests, limits)
    return _judged(found.is_passed, found.reason)


def _own(name: str) -> Scorer:
    module, _, function = name.rpartition(".")
    try:
        score: OwnScorer = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        path = os.environ.get("PYTHONPATH", "")
        raise ConfigError(
            f"--score {PYTHON}{name} cannot be imported ({error}); PYTHONPATH is '{path}'"
        ) from error

    def own(question: Question, completion: str) -> Score:
        value = score(question.row, completion)
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ConfigError(
                f"{name} gave {value!r:.80} for {question.place}: a score is a number from 0 to 1"
            )
        return Score(float(value))

    return own


def _judged(is_right: bool, reason: str) -> Score:
    return Score(1.0) if is_right else Score(0.0, reason[:200])


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
