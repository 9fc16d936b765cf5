"""What a model is asked, and what is expected of it (floor 5)."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import ConfigError, parse_config
from trainer.data.readers import iter_rows
from trainer.data.rows import location
from trainer.errors import DataError
from trainer.run.inputs import prepare_data_alone
from trainer.serving.generation import Turns
from trainer.tracking.run_info import FILE_NAME, read_run_file

MESSAGES, PROMPT = "messages", "prompt"


@dataclass(frozen=True)
class Question:
    """`expected`: the column of answers; where a row has none, the assistant's turn behind the question, else None."""

    turns: Turns
    expected: Any
    row: Mapping[str, Any]
    place: str
    """`file:line`."""


def read_questions(path: Path, *, answer_key: str) -> list[Question]:
    """Of every row of a file. Raises `DataError` naming the row that cannot be asked."""
    if not path.is_file():
        raise ConfigError(f"no file '{path}': --prompts names rows of {MESSAGES} or {PROMPT} (.jsonl, .json, .parquet)")
    questions = list(_questions(path, answer_key, None))
    if not questions:
        raise DataError(f"'{path}' holds no row: nothing can be asked")
    return questions


def held_out_questions(run_dir: Path, *, answer_key: str) -> list[Question]:
    """The rows that the run keeps for validation. Raises `ConfigError` where it keeps none."""
    tree = read_run_file(run_dir / FILE_NAME).get("config")
    if not isinstance(tree, dict):
        raise ConfigError(f"'{run_dir / FILE_NAME}' does not hold the configuration of the run: name --prompts FILE")
    validation = prepare_data_alone(parse_config(tree)).validation
    if validation is None:
        raise ConfigError("the run keeps no rows for validation: name --prompts FILE")
    places = dict.fromkeys(validation.location(index) for index in range(len(validation)))
    files = dict.fromkeys(place.rpartition(":")[0] for place in places)
    return [question for file in files for question in _questions(Path(file), answer_key, places)]


def digest_of_questions(questions: list[Question]) -> str:
    """SHA-256 over their rows, in order."""
    rows = (json.dumps(dict(question.row), sort_keys=True, default=str) for question in questions)
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
    is_list = isinstance(messages, list) and all(isinstance(turn, dict) and "role" in turn for turn in messages)
    if not is_list or not messages:
        raise DataError(f"{place}: a row needs {PROMPT} (text) or {MESSAGES} (a list of role and content)")
    expected = row.get(answer_key)
    if messages[-1]["role"] == "assistant":
        expected = messages[-1].get("content") if expected is None else expected
        messages = messages[:-1]
    if not messages:
        raise DataError(f"{place}: its {MESSAGES} ask nothing")
    return Question(messages, expected, row, place)
