"""Scoring checkpoints of a run beside its training, each once, whatever ends this; trackers are
shown it (floor 5).
"""

import hashlib
import json
import logging
import math
import os
import platform
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trainer.checkpoint import fsio, layout
from trainer.checkpoint.export import require_export
from trainer.checkpoint.layout import CheckpointInfo
from trainer.checkpoint.manifest import MANIFEST
from trainer.checkpoint.reading import pinned
from trainer.config import ConfigError
from trainer.errors import CannotWriteError
from trainer.evaluation.programs import ProgramLimits
from trainer.evaluation.scorers import Question, Score, Scorer, digest_of_questions
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
from trainer.runtime.processes import run_in
from trainer.serving.engines import VLLM, adapter_of, require_module, vllm_rank
from trainer.serving.generation import BATCH, Engine, Sampling
from trainer.tracking import Tracking, metrics_file, read_metrics, run_info

INSTALL = "lm-evaluation-harness: pip install lm-eval (with vLLM: pip install 'lm-eval[vllm]')"
NUM_LINES = 12


@dataclass(frozen=True)
class Result:
    """`name`: `task_metric`; `error`: its standard error or 0; `n`: samples, None where the
    harness does not say.
    """

    name: str
    value: float
    error: float
    n: int | None


def run_tasks(
    export: Path, tasks: str, *, engine: str, python: str, seed: int, words: Sequence[str] = ()
) -> list[Result]:
    """Every result; `words` are more options of lm_eval. Raises `ConfigError` where it fails or
    measures nothing.
    """
    require_module("lm_eval", python, INSTALL)
    model, adapter, rank = adapter_of(export)
    arguments = [f"pretrained={model}", "dtype=auto"]
    if adapter is not None:
        in_vllm = [f"lora_local_path={adapter}", f"max_lora_rank={vllm_rank(rank)}"]
        arguments += in_vllm if engine == VLLM else [f"peft={adapter}"]
        if (adapter / "tokenizer_config.json").exists():
            arguments.append(f"tokenizer={adapter}")
    with tempfile.TemporaryDirectory(prefix="sft-harness-") as work:
        # the last of two equal options counts: what says which model is scored comes behind the
        # user's words
        command = [
            "-m",
            "lm_eval",
            *words,
            "--model",
            "vllm" if engine == VLLM else "hf",
            "--tasks",
            tasks,
        ]
        command += ["--model_args", ",".join(arguments), "--output_path", work, "--seed", str(seed)]
        ended = run_in(python, *command)
        files = sorted(Path(work).rglob("results*.json"))
        tree = json.loads(files[-1].read_text(encoding="utf-8")) if files else {}
        found = list(_results(tree))
        if ended.returncode != 0 or not found:
            said = "\n".join(ended.stderr.splitlines()[-NUM_LINES:])
            raise ConfigError(
                f"lm_eval ended with {ended.returncode} and {len(found)} results:\n{said}"
            )
    return found


def _results(tree: Mapping[str, Any]) -> Iterator[Result]:
    for task, values in tree.get("results", {}).items():
        n = tree.get("n-samples", {}).get(task, {}).get("effective")
        for name, value in values.items():
            metric, _, choice = name.partition(",")
            if choice and not metric.endswith("_stderr") and isinstance(value, int | float):
                error = values.get(f"{metric}_stderr,{choice}")
                error = float(error) if isinstance(error, int | float) else 0.0
                yield Result(
                    f"{task}_{metric}{'' if choice == 'none' else f'_{choice}'}",
                    float(value),
                    error,
                    n,
                )


DIRECTORY = "evaluation"
MAX_SAMPLES = 64
"""Of one checkpoint in a tracker's table."""

logger = logging.getLogger(__name__)


class Publisher:
    """Hands on what trackers lack; opened with the first result."""

    def __init__(self, run_dir: Path, name: str) -> None:
        self._run_dir, self._name = run_dir, name
        self._directory = run_dir / DIRECTORY / name
        self._tracking: Tracking | None = None

    def publish(self) -> None:
        """Every summary of this name that was not sent yet, as kills leave some behind, by
        rising step.
        """
        log = self._directory / metrics_file.FILE_NAME
        metric = PREFIX + self._name
        sent = {row["step"]: row.get(metric) for row in read_metrics(log)} if log.exists() else {}
        for step, row in read_summaries(self._run_dir).get(metric, {}).items():
            if sent.get(step) == row["mean"]:
                continue
            if any(later > step for later in sent):
                logger.warning("step %d comes after later ones: trackers may not draw it", step)
            tracking = self._opened()
            values = {metric: row["mean"]} | (
                {SUCCESS_RATE: row["mean"]} if row.get("scorer") == EXEC else {}
            )
            bounds = {
                f"{metric}_{side}": row[side]
                for side in ("low", "high")
                if row.get(side) is not None
            }
            tracking.log(values | bounds, step)
            tracking.table(f"{metric}/samples", step, self._samples(row))
            sent[step] = row["mean"]

    def close(self) -> None:
        if self._tracking is not None:
            self._tracking.finish()

    def _opened(self) -> Tracking:
        if self._tracking is None:
            run = run_info.read_run_file(self._run_dir / run_info.FILE_NAME)
            config: dict[str, Any] = run.get("config") or {}
            chosen = config.get("trainer", {}).get("logger", ())  # a list, or one name
            names = (
                run.get("project_name", self._run_dir.parent.name),
                run.get("experiment_name", self._run_dir.name),
            )
            self._tracking = Tracking(
                str(names[0]),
                f"{names[1]}_{self._name}",
                [
                    name
                    for name in ([chosen] if isinstance(chosen, str) else chosen)
                    if name != "console"
                ],
                {"evaluation": self._name, "of": str(names[1])},
                run_dir=self._directory,
                group=str(run.get("group", names[1])),
            )
        return self._tracking

    def _samples(self, summary: Any) -> list[dict[str, str | float]]:
        rows = [row for row in read_evaluations(self._run_dir) if row["kind"] == SAMPLE]
        shown = [row for row in rows if row.get("key") == summary.get("key")][:MAX_SAMPLES]
        return [
            {
                "prompt": str(row["prompt"][-1].get("content", "")),
                "answer": str(row["answer"]),
                "completion": row["completion"],
                "score": row["score"],
                "reason": row["reason"],
            }
            for row in shown
        ]


Z = 1.959964
"""Of a 95 % interval."""


@dataclass(frozen=True)
class Evaluation:
    """What is asked of every checkpoint; `engine_word` and `scorer_word` as the command line
    has them.
    """

    name: str
    questions: Sequence[Question]
    scorer_word: str
    scorer: Scorer
    engine_word: str
    engine: Engine
    sampling: Sampling
    limits: ProgramLimits

    def key(self, nonce: str) -> str:
        """Equal for equal questions to the same checkpoint: what has it is not asked again."""
        asked = [
            nonce,
            self.name,
            digest_of_questions(list(self.questions)),
            self.scorer_word,
            self.engine_word,
        ]
        text = json.dumps([*asked, asdict(self.sampling), asdict(self.limits)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def interval(scores: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) at 95 %: Wilson's where scores are 0 or 1, else by the standard error."""
    n, mean = len(scores), math.fsum(scores) / len(scores)
    if set(scores) <= {0.0, 1.0}:
        middle, spread = (
            mean + Z**2 / (2 * n),
            Z * math.sqrt(mean * (1 - mean) / n + Z**2 / (4 * n**2)),
        )
        return (
            mean,
            max(0.0, (middle - spread) / (1 + Z**2 / n)),
            min(1.0, (middle + spread) / (1 + Z**2 / n)),
        )
    error = Z * math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / max(1, n - 1) / n)
    return mean, mean - error, mean + error


def evaluate(
    run_dir: Path, info: CheckpointInfo, asked: Evaluation, *, tell: Callable[[str], None]
) -> bool:
    """Score one checkpoint, unless it is scored; whether there is a new summary.

    False too for one that went meanwhile. Raises `ConfigError` where it cannot be served,
    `DataError` for a question that cannot be scored, `CannotWriteError`.
    """
    if info.manifest is None:
        raise ConfigError(f"'{info.path}' cannot be scored: {info.reason}")
    nonce = info.manifest.nonce
    key = asked.key(nonce)
    rows = [row for row in read_evaluations(run_dir) if row.get("key") == key]
    if any(row["kind"] == SUMMARY for row in rows):
        return False
    with pinned(info, layout.HUGGINGFACE) as directory:
        if directory is None:
            tell(f"step {info.step}: was deleted before it could be scored")
            return False
        linked = replace(info, path=directory)
        require_export(linked)
        digest = fsio.sha256_of(directory / MANIFEST)
        file = AppendFile(run_dir / FILE_NAME)
        try:
            _ask(file, linked, asked, key, {row["index"] for row in rows})
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


def _ask(
    file: AppendFile, info: CheckpointInfo, asked: Evaluation, key: str, done: set[int]
) -> None:
    """Append a sample for every question that has none; those that are continued together are
    asked together again.
    """
    missing = {index // BATCH for index in range(len(asked.questions)) if index not in done}
    prompts = {
        i: question.turns for i, question in enumerate(asked.questions) if i // BATCH in missing
    }
    if not prompts:
        return
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        written = asked.engine.generate(info.path / layout.HUGGINGFACE, prompts, asked.sampling)
        new = (pair for pair in written if pair[0] not in done)
        for index, completion, score in _scored(pool, asked, new):
            row = {
                "kind": SAMPLE,
                "name": asked.name,
                "step": info.step,
                "key": key,
                "index": index,
            }
            question = asked.questions[index]
            row |= {"prompt": question.turns, "answer": question.expected, "completion": completion}
            file.append(strict(row | {"score": score.value, "reason": score.reason}))


def _scored(
    pool: ThreadPoolExecutor, asked: Evaluation, written: Iterable[tuple[int, str]]
) -> Iterator[tuple[int, str, Score]]:
    """In the order written, while more is written: scoring takes processes of its own."""
    waiting: deque[tuple[int, str, Future[Score]]] = deque()
    for index, completion in written:
        waiting.append(
            (index, completion, pool.submit(asked.scorer, asked.questions[index], completion))
        )
        while waiting and waiting[0][2].done():
            yield _resolved(waiting)
    while waiting:
        yield _resolved(waiting)


def _resolved(waiting: deque[tuple[int, str, Future[Score]]]) -> tuple[int, str, Score]:
    index, completion, score = waiting.popleft()
    return index, completion, score.result()


def _summary(run_dir: Path, info: CheckpointInfo, asked: Evaluation, key: str) -> dict[str, Any]:
    """Of the samples as they stand in the file."""
    scores = {
        row["index"]: float(row["score"])
        for row in read_evaluations(run_dir)
        if row.get("key") == key
    }
    if len(scores) != len(asked.questions):
        raise CannotWriteError(
            f"{run_dir / FILE_NAME} has {len(scores)} of {len(asked.questions)} samples of step "
            f"{info.step}: free space, then the same command goes on"
        )
    mean, low, high = interval(list(scores.values()))
    made = {
        "engine": asked.engine.name,
        "python": platform.python_version(),
        **asdict(asked.sampling),
    }
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
