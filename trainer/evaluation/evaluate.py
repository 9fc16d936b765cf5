"""Scoring checkpoints of a run beside its training: one after the other, each once, whatever ends this (floor 5)."""

import hashlib
import json
import math
import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint import fsio, layout, lease
from trainer.checkpoint.layout import CheckpointInfo
from trainer.checkpoint.manifest import MANIFEST
from trainer.config import ConfigError
from trainer.errors import CannotWriteError
from trainer.evaluation.questions import Question, digest_of_questions
from trainer.evaluation.sandbox import SandboxLimits
from trainer.evaluation.scorers import Score, Scorer
from trainer.runtime.evaluations import FILE_NAME, PREFIX, SAMPLE, SUMMARY, read_evaluations
from trainer.runtime.json_lines import AppendFile, strict
from trainer.serving.engines import PEFT_CONFIG
from trainer.serving.generation import BATCH, Engine, Sampling

Z = 1.959964
"""Of a 95 % interval."""


@dataclass(frozen=True)
class Evaluation:
    """What is asked of every checkpoint; `engine_word` and `scorer_word` as the command line has them."""

    name: str
    questions: Sequence[Question]
    scorer_word: str
    scorer: Scorer
    engine_word: str
    engine: Engine
    sampling: Sampling
    limits: SandboxLimits

    def key(self, nonce: str) -> str:
        """Equal for equal questions to the same checkpoint: what has it is not asked again."""
        asked = [nonce, self.name, digest_of_questions(list(self.questions)), self.scorer_word, self.engine_word]
        text = json.dumps([*asked, asdict(self.sampling), asdict(self.limits)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def interval(scores: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) at 95 %: Wilson's where scores are 0 or 1, else by the standard error."""
    n, mean = len(scores), math.fsum(scores) / len(scores)
    if set(scores) <= {0.0, 1.0}:
        middle, spread = mean + Z**2 / (2 * n), Z * math.sqrt(mean * (1 - mean) / n + Z**2 / (4 * n**2))
        return mean, max(0.0, (middle - spread) / (1 + Z**2 / n)), min(1.0, (middle + spread) / (1 + Z**2 / n))
    error = Z * math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / max(1, n - 1) / n)
    return mean, mean - error, mean + error


def evaluate(run_dir: Path, info: CheckpointInfo, asked: Evaluation, *, tell: Callable[[str], None]) -> bool:
    """Score one checkpoint, unless it is scored; whether there is a new summary.

    False too for one that went meanwhile. Raises `ConfigError` where it cannot be served, `DataError` for a question
    that cannot be scored, `CannotWriteError`.
    """
    if info.manifest is None:
        raise ConfigError(f"'{info.path}' cannot be scored: {info.reason or 'it was written by verl'}")
    nonce = info.manifest.nonce
    key = asked.key(nonce)
    rows = [row for row in read_evaluations(run_dir) if row.get("key") == key]
    if any(row["kind"] == SUMMARY for row in rows):
        return False
    with lease.reading(info.path) as is_there:
        if not is_there:
            tell(f"step {info.step}: was deleted before it could be scored")
            return False
        _require_export(info)
        digest = fsio.sha256_of(info.path / MANIFEST)
        file = AppendFile(run_dir / FILE_NAME)
        try:
            _ask(file, info, asked, key, {row["index"] for row in rows})
            found = layout.inspect(info.path).manifest
            if found is None or found.nonce != nonce:
                tell(f"step {info.step}: was replaced while it was read: not counted")
                return False
            summary = _summary(run_dir, info, asked, key)
            file.append(summary | {"nonce": nonce, "digest": digest})
        finally:
            file.close()
    return True


def append_result(run_dir: Path, *, name: str, step: int, value: float, **about: Any) -> None:
    """A summary of what was measured elsewhere."""
    file = AppendFile(run_dir / FILE_NAME)
    info = layout.inspect(run_dir / layout.step_dir_name(step))
    nonce = info.manifest.nonce if info.manifest else None
    row = {"kind": SUMMARY, "name": PREFIX + name, "step": step, "nonce": nonce, "mean": value}
    file.append(strict(row | {"low": None, "high": None, "n": None} | about | {"ts": time.time()}))
    file.close()


def _require_export(info: CheckpointInfo) -> None:
    export = info.path / layout.HUGGINGFACE
    if not (export / "config.json").exists() and not (export / PEFT_CONFIG).exists():
        raise ConfigError(
            f"'{export}' holds no model, because trainer.checkpoint.save_contents had no hf_model: make it with "
            f"bash run_sft.sh checkpoint export {info.path} DIRECTORY"
        )


def _ask(file: AppendFile, info: CheckpointInfo, asked: Evaluation, key: str, done: set[int]) -> None:
    """Append a sample for every question that has none; those that are continued together are asked together again."""
    missing = {index // BATCH for index in range(len(asked.questions)) if index not in done}
    prompts = {i: question.turns for i, question in enumerate(asked.questions) if i // BATCH in missing}
    if not prompts:
        return
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        written = asked.engine.generate(info.path / layout.HUGGINGFACE, prompts, asked.sampling)
        new = (pair for pair in written if pair[0] not in done)
        for index, completion, score in _scored(pool, asked, new):
            row = {"kind": SAMPLE, "name": asked.name, "step": info.step, "key": key, "index": index}
            question = asked.questions[index]
            row |= {"prompt": question.turns, "answer": question.expected, "completion": completion}
            file.append(strict(row | {"score": score.value, "reason": score.reason}))


def _scored(
    pool: ThreadPoolExecutor, asked: Evaluation, written: Iterable[tuple[int, str]]
) -> Iterator[tuple[int, str, Score]]:
    """In the order written, while more is written: scoring takes processes of its own."""
    waiting: deque[tuple[int, str, Future[Score]]] = deque()
    for index, completion in written:
        waiting.append((index, completion, pool.submit(asked.scorer, asked.questions[index], completion)))
        while waiting and waiting[0][2].done():
            yield _resolved(waiting)
    while waiting:
        yield _resolved(waiting)


def _resolved(waiting: deque[tuple[int, str, Future[Score]]]) -> tuple[int, str, Score]:
    index, completion, score = waiting.popleft()
    return index, completion, score.result()


def _summary(run_dir: Path, info: CheckpointInfo, asked: Evaluation, key: str) -> dict[str, Any]:
    """Of the samples as they stand in the file."""
    scores = {row["index"]: float(row["score"]) for row in read_evaluations(run_dir) if row.get("key") == key}
    if len(scores) != len(asked.questions):
        raise CannotWriteError(
            f"{run_dir / FILE_NAME} has {len(scores)} of {len(asked.questions)} samples of step {info.step}: free "
            f"space, then the same command goes on"
        )
    mean, low, high = interval(list(scores.values()))
    made = {"engine": asked.engine.name, "python": platform.python_version(), **asdict(asked.sampling)}
    return {
        "kind": SUMMARY,
        "name": PREFIX + asked.name,
        "step": info.step,
        "key": key,
        "checkpoint": info.path.name,
        "mean": mean,
        "low": low,
        "high": high,
        "n": len(scores),
        "scorer": asked.scorer_word,
        **made,
        "prompts_digest": digest_of_questions(list(asked.questions)),
        "ts": round(time.time(), 3),
    }
