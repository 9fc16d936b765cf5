"""The functions that score the answers of a model to questions."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from trainer.errors import DataError
from trainer.runtime.evaluations import EXEC
from trainer.tools.evaluate.programs import run_tests

NUMBER = re.compile(
    r"((?:(?<![\w)])[-+])?)[$€£¥]?"  # a hyphen after a number or word is not a sign
    r"((?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+|[eE][-+]?\d{1,3}(?!\d))?)"
)
"""Sign and value of a number. Longer exponents do not match, because such numbers would not fit in
memory.
"""
FINAL = "####"
"""The mark that precedes the final answer in GSM8K."""
FENCED = re.compile(r"```[^`\n]*\n(.*?)(?:\n```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Question:
    """A question from one row of a file.

    `ids` are the tokens of `prompt`. `expected` is the value in the row's answer column; if the row
    has none, it is the answer that training would teach. `place` is `file:line`.
    """

    prompt: str
    ids: Sequence[int]
    expected: Any
    place: str


Judge = Callable[[str], str]
"""A function that returns the reason why an answer is wrong, or an empty string if it is right.
Each thread calls a separate judge.
"""
Scorer = Callable[[Question], Judge]
"""A function that returns the judge for a question. Raises `DataError` for a question that it
cannot score.
"""


def exact(question: Question) -> Judge:
    """Compare the answer with the expected text, ignoring differences in white space."""
    expected = _text(question)
    return lambda answer: "" if answer.split() == expected.split() else f"is not: {expected}"


def numeric(question: Question) -> Judge:
    """Compare the last numbers of the answer and the expected text.

    If a text contains `####`, only the part after the last `####` counts.
    """
    expected = _number(_text(question))
    if expected is None:
        raise DataError(f"{question.place}: its answer has no number")

    def judge(answer: str) -> str:
        found = _number(answer)
        return "" if found == expected else f"{found}, expected {expected}"

    return judge


def executed(question: Question) -> Judge:
    """Run the program in the answer against the tests of the question."""
    tests = [question.expected] if isinstance(question.expected, str) else question.expected
    is_usable = isinstance(tests, list) and all(isinstance(t, str) and t.strip() for t in tests)
    if not is_usable or not tests:
        raise DataError(
            f"{question.place}: {EXEC} needs tests: Python code, or a list of Python code.\n"
            f"Fix: pass the column with --answer"
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
            f"Fix: pass its column with --answer"
        )
    return str(question.expected)


def _number(text: str) -> Fraction | None:
    found = NUMBER.findall(text.rpartition(FINAL)[2].replace("\N{MINUS SIGN}", "-"))
    try:
        return Fraction("".join(found[-1]).replace(",", "")) if found else None
    except (ValueError, ZeroDivisionError):
        return None
