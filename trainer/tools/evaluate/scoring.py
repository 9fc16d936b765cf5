"""Score checkpoints of a run by their answers, each once, also while the run trains."""

import hashlib
import json
import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.checkpoint import fsio, layout
from trainer.checkpoint.export import require_export
from trainer.checkpoint.layout import CheckpointInfo
from trainer.checkpoint.manifest import MANIFEST
from trainer.checkpoint.reading import pinned
from trainer.config import ConfigError
from trainer.errors import CannotWriteError
from trainer.runtime.evaluations import (
    EXEC,
    FILE_NAME,
    PREFIX,
    SAMPLE,
    SUCCESS_RATE,
    SUMMARY,
    read_evaluations,
    read_summaries,
)
from trainer.runtime.json_lines import AppendFile, strict
from trainer.tools.evaluate.engines import Generate
from trainer.tools.evaluate.scorers import SCORERS, Question
from trainer.tracking import Tracking, metrics_file, read_metrics, run_info

DIRECTORY = "evaluation"
Z = 1.959964
"""Half the width of a 95 % interval, in standard deviations."""


@dataclass(frozen=True)
class Evaluation:
    """The questions that every checkpoint is asked, and how its answers are scored."""

    name: str
    questions: Sequence[Question]
    scorer: str
    engine: str
    generate: Generate
    max_new_tokens: int

    def key(self, nonce: str) -> str:
        """Return a name for this evaluation of one checkpoint; no other evaluation has it."""
        questions = [[question.turns, question.expected] for question in self.questions]
        parts = [nonce, self.name, questions, self.scorer, self.engine, self.max_new_tokens]
        text = json.dumps(parts, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def interval(num_right: int, n: int) -> tuple[float, float, float]:
    """Return (share, low, high): the share of right answers and its 95 % interval (Wilson)."""
    share = num_right / n
    middle = share + Z**2 / (2 * n)
    spread = Z * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    scale = 1 + Z**2 / n
    return share, max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def evaluate(run_dir: Path, info: CheckpointInfo, asked: Evaluation) -> dict[str, Any] | None:
    """Score one checkpoint and return its summary, or the summary that it already has.

    Returns None for a checkpoint that rotation has deleted. Raises `ConfigError` if it cannot be
    served, `DataError` for a question that cannot be scored, `CannotWriteError`.
    """
    if info.manifest is None:
        raise ConfigError(f"'{info.path}' cannot be scored: {info.reason}")
    key = asked.key(info.manifest.nonce)
    rows = _rows_of(run_dir, key)
    for row in rows:
        if row["kind"] == SUMMARY:
            return row
    with pinned(info, layout.HUGGINGFACE) as directory:
        if directory is None:
            print(f"step {info.step}: deleted before it could be scored")
            return None
        require_export(replace(info, path=directory))
        checkpoint = {
            "nonce": info.manifest.nonce,
            "digest": fsio.sha256_of(directory / MANIFEST),
            "checkpoint": info.path.name,
        }
        file = AppendFile(run_dir / FILE_NAME)
        try:
            done = {row["index"] for row in rows}
            missing = [index for index in range(len(asked.questions)) if index not in done]
            if missing:
                about = {"step": info.step, "key": key}
                _ask(file, directory / layout.HUGGINGFACE, asked, missing, about)
            summary = _summary(run_dir, asked, key) | {"step": info.step} | checkpoint
            file.append(summary)
        finally:
            file.close()
    return summary


def append_result(run_dir: Path, *, name: str, step: int, value: float) -> None:
    """Record a result that was measured elsewhere."""
    info = layout.inspect(run_dir / layout.step_dir_name(step))
    row = {
        "kind": SUMMARY,
        "name": PREFIX + name,
        "step": step,
        "nonce": info.manifest.nonce if info.manifest else None,
        "mean": value,
        "scorer": "attached",
        "ts": time.time(),
    }
    file = AppendFile(run_dir / FILE_NAME)
    file.append(strict(row))
    file.close()


def _rows_of(run_dir: Path, key: str) -> list[dict[str, Any]]:
    return [row for row in read_evaluations(run_dir) if row.get("key") == key]


def _ask(
    file: AppendFile, export: Path, asked: Evaluation, missing: list[int], about: dict[str, Any]
) -> None:
    """Ask the questions `missing`, and append a sample for each."""
    prompts = [asked.questions[index].turns for index in missing]
    indices = iter(missing)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for answers in asked.generate(export, prompts, asked.max_new_tokens):
            batch = [next(indices) for _ in answers]
            questions = [asked.questions[index] for index in batch]
            reasons = pool.map(SCORERS[asked.scorer], questions, answers)
            for index, question, answer, reason in zip(
                batch, questions, answers, reasons, strict=True
            ):
                row = {
                    "kind": SAMPLE,
                    "name": asked.name,
                    **about,
                    "index": index,
                    "prompt": question.turns,
                    "answer": question.expected,
                    "completion": answer,
                    "score": 0.0 if reason else 1.0,
                    "reason": reason,
                }
                file.append(strict(row))


def _summary(run_dir: Path, asked: Evaluation, key: str) -> dict[str, Any]:
    """Summarise the samples in the file. Raises `CannotWriteError` if one is missing."""
    scores = {row["index"]: row["score"] for row in _rows_of(run_dir, key)}
    if len(scores) != len(asked.questions):
        raise CannotWriteError(
            f"{run_dir / FILE_NAME} has {len(scores)} of {len(asked.questions)} samples.\n"
            f"Fix: free space on its disk, and run the same command again"
        )
    mean, low, high = interval(sum(score > 0 for score in scores.values()), len(scores))
    return {
        "kind": SUMMARY,
        "name": PREFIX + asked.name,
        "key": key,
        "mean": mean,
        "low": low,
        "high": high,
        "n": len(scores),
        "scorer": asked.scorer,
        "engine": asked.engine,
        "max_new_tokens": asked.max_new_tokens,
        "ts": round(time.time(), 3),
    }


def publish(run_dir: Path, name: str) -> None:
    """Send the run's trackers every summary of this name that they lack, by rising step."""
    metric, directory = PREFIX + name, run_dir / DIRECTORY / name
    log = directory / metrics_file.FILE_NAME
    sent = {row["step"]: row.get(metric) for row in read_metrics(log)} if log.exists() else {}
    summaries = read_summaries(run_dir).get(metric, {})
    missing = {step: row for step, row in summaries.items() if sent.get(step) != row["mean"]}
    if not missing:
        return
    tracking = _tracking(run_dir, name, directory)
    try:
        for step, row in missing.items():
            values = {metric: row["mean"]}
            for side in ("low", "high"):
                if row.get(side) is not None:
                    values[f"{metric}_{side}"] = row[side]
            if row.get("scorer") == EXEC:
                values[SUCCESS_RATE] = row["mean"]
            tracking.log(values, step)
    finally:
        tracking.finish()


def _tracking(run_dir: Path, name: str, directory: Path) -> Tracking:
    """Return another tracker run in the project and group of the training, with its trackers."""
    run = run_info.read_run_file(run_dir / run_info.FILE_NAME)
    logger = (run.get("config") or {}).get("trainer", {}).get("logger", ())
    backends = [logger] if isinstance(logger, str) else list(logger)
    experiment = str(run.get("experiment_name", run_dir.name))
    return Tracking(
        str(run.get("project_name", run_dir.parent.name)),
        f"{experiment}_{name}",
        [backend for backend in backends if backend != "console"],
        {"evaluation": name, "of": experiment},
        run_dir=directory,
        group=str(run.get("group", experiment)),
    )
