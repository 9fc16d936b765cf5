"""Scores the answers of each checkpoint of a run once, even while the run is still training."""

import hashlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.checkpoint import fsio, layout
from trainer.checkpoint.export import require_export
from trainer.checkpoint.layout import Checkpoint
from trainer.checkpoint.manifest import MANIFEST
from trainer.checkpoint.reading import pinned
from trainer.config import ConfigError, parse_recorded
from trainer.runtime.environment import call
from trainer.runtime.evaluations import (
    ATTACHED,
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
from trainer.tools.evaluate.scorers import Judge, Question
from trainer.tracking import Tracking, events_file, metrics_file, read_metrics, run_info
from trainer.tracking.events_file import read_events

DIRECTORY = "evaluation"
Z = 1.959964
"""Half the width of a 95 % interval, in standard deviations."""


@dataclass(frozen=True)
class Evaluation:
    """The questions for every checkpoint, each with a judge for its answers."""

    name: str
    questions: Sequence[Question]
    judges: Sequence[Judge]
    scorer: str
    engine: str
    generate: Generate
    max_new_tokens: int

    def key(self, nonce: str | None) -> str:
        """Return an identifier that is unique to this evaluation of the checkpoint with `nonce`."""
        questions = [[question.ids, question.expected] for question in self.questions]
        parts = [nonce, self.name, questions, self.scorer, self.engine, self.max_new_tokens]
        text = json.dumps(parts, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def interval(num_right: int, n: int) -> tuple[float, float, float]:
    """Return (share, low, high): the share of right answers and its 95 % Wilson interval."""
    share = num_right / n
    middle = share + Z**2 / (2 * n)
    spread = Z * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    scale = 1 + Z**2 / n
    return share, max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def evaluate(run_dir: Path, info: Checkpoint, asked: Evaluation) -> dict[str, Any] | None:
    """Score one checkpoint and return its summary, or the summary that it already has.

    The samples and the summary are written once all questions have been answered.

    Returns None if rotation has deleted the checkpoint. Raises `ConfigError` if the checkpoint
    cannot be served, `DataError` for a question that cannot be scored, and `CannotWriteError` if
    the results cannot be written.
    """
    if info.manifest is None:
        raise ConfigError(f"'{info.path}' cannot be scored: {info.reason}")
    key = asked.key(info.nonce)
    for row in read_evaluations(run_dir):
        if row["kind"] == SUMMARY and row.get("key") == key:
            return row
    with pinned(info, layout.HUGGINGFACE) as directory:
        if directory is None:
            print(f"step {info.step}: deleted before it could be scored")
            return None
        require_export(replace(info, path=directory))
        try:
            samples = _samples(directory / layout.HUGGINGFACE, asked)
        except ConfigError as error:  # it names the links, which are deleted now
            raise ConfigError(str(error).replace(str(directory), str(info.path))) from error
        digest = fsio.sha256_of(directory / MANIFEST)
    mean, low, high = interval(sum(row["score"] > 0 for row in samples), len(samples))
    summary = {
        "kind": SUMMARY,
        "name": PREFIX + asked.name,
        "mean": mean,
        "low": low,
        "high": high,
        "n": len(samples),
        "scorer": asked.scorer,
        "engine": asked.engine,
        "max_new_tokens": asked.max_new_tokens,
        "nonce": info.nonce,
        "digest": digest,
        "checkpoint": info.path.name,
        "ts": time.time(),
    }
    rows = [row | {"step": info.step, "key": key} for row in [*samples, summary]]
    _append(run_dir, rows)
    return rows[-1]


def append_result(
    run_dir: Path,
    *,
    name: str,
    step: int,
    value: float,
) -> None:
    """Record a result that another program measured.

    Raises `ConfigError` if the run has not saved a checkpoint at this step.
    """
    info = layout.inspect(run_dir / layout.step_dir_name(step))
    events = read_events(run_dir / events_file.FILE_NAME)
    saved = {row["step"] for row in events if row["kind"] == "checkpoint"}
    if step not in saved and not info.path.is_dir():
        raise ConfigError(
            f"the run in '{run_dir}' has not saved a checkpoint at step {step}.\n"
            f"Fix: use one of the steps that `{call(f'checkpoint ls {run_dir}')}` lists"
        )
    row = {
        "kind": SUMMARY,
        "name": PREFIX + name,
        "step": step,
        "nonce": info.nonce,
        "mean": value,
        "scorer": ATTACHED,
        "ts": time.time(),
    }
    _append(run_dir, [row])


def _append(run_dir: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    file = AppendFile(run_dir / FILE_NAME)
    for row in rows:
        file.append(strict(row))
    file.close()


def _samples(export: Path, asked: Evaluation) -> list[dict[str, Any]]:
    """Ask all questions, and return a scored row for each."""
    prompts = [question.ids for question in asked.questions]
    answers = asked.generate(export, prompts, asked.max_new_tokens)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        reasons = pool.map(lambda judge, answer: judge(answer), asked.judges, answers)
    scored = zip(asked.questions, answers, reasons, strict=True)
    return [
        {
            "kind": SAMPLE,
            "name": asked.name,
            "index": index,
            "prompt": question.prompt,
            "answer": question.expected,
            "completion": answer,
            "score": 0.0 if reason else 1.0,
            "reason": reason,
        }
        for index, (question, answer, reason) in enumerate(scored)
    ]


def publish(run_dir: Path, name: str) -> None:
    """Send every summary with this name that the run's trackers lack, in order of steps."""
    metric = PREFIX + name
    directory = run_dir / DIRECTORY / name
    log = directory / metrics_file.FILE_NAME
    sent = {row["step"]: row.get(metric) for row in read_metrics(log)} if log.exists() else {}
    summaries = read_summaries(run_dir).get(metric, {})
    missing = {step: row for step, row in summaries.items() if sent.get(step) != row["mean"]}
    if not missing:
        return
    trainer = parse_recorded(run_info.read_config(run_dir)).trainer
    run = run_info.read_run_file(run_dir / run_info.FILE_NAME)
    experiment = trainer.experiment_name
    # a separate tracker run, with the project, the group and the trackers of the training run
    tracking = Tracking(
        trainer.project_name,
        f"{experiment}_{name}",
        [backend for backend in trainer.logger if backend != "console"],
        {"evaluation": name, "of": experiment},
        run_dir=directory,
        group=str(run.get("group", experiment)),
    )
    try:
        for step, row in missing.items():
            values = {metric: row["mean"]}
            if row.get("scorer") == EXEC:
                values[SUCCESS_RATE] = row["mean"]
            tracking.log(values, step)
    finally:
        tracking.finish()
