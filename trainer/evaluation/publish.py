"""Results of evaluations in the trackers: project and group of their run, a tracker run for each name (floor 5).

Beside `evaluations.jsonl`, which has all, `evaluation/<name>/` in the run directory holds what the trackers need.
"""

import logging
from pathlib import Path
from typing import Any

from trainer.runtime.evaluations import EXEC, PREFIX, SAMPLE, SUCCESS_RATE, read_evaluations, read_summaries
from trainer.tracking import Tracking, metrics_file, read_metrics
from trainer.tracking.run_info import FILE_NAME, read_run_file

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
        """Every summary of this name that was not sent yet, as kills leave some behind, by rising step."""
        log = self._directory / metrics_file.FILE_NAME
        metric = PREFIX + self._name
        sent = {row["step"]: row.get(metric) for row in read_metrics(log)} if log.exists() else {}
        for step, row in read_summaries(self._run_dir).get(metric, {}).items():
            if sent.get(step) == row["mean"]:
                continue
            if any(later > step for later in sent):
                logger.warning(
                    "step %d comes after later ones, which trackers do not draw: a clean run of all is made by "
                    "bash run_sft.sh resend %s --to wandb",
                    *(step, self._directory),
                )
            tracking = self._opened()
            values = {metric: row["mean"]} | ({SUCCESS_RATE: row["mean"]} if row.get("scorer") == EXEC else {})
            bounds = {f"{metric}_{side}": row[side] for side in ("low", "high") if row.get(side) is not None}
            tracking.log(values | bounds, step)
            tracking.table(f"{metric}/samples", step, self._samples(row))
            sent[step] = row["mean"]

    def close(self) -> None:
        if self._tracking is not None:
            self._tracking.finish()

    def _opened(self) -> Tracking:
        if self._tracking is None:
            run = read_run_file(self._run_dir / FILE_NAME)
            config: dict[str, Any] = run.get("config") or {}
            names = (run.get("project_name", self._run_dir.parent.name), run.get("experiment_name", self._run_dir.name))
            self._tracking = Tracking(
                str(names[0]),
                f"{names[1]}_{self._name}",
                [name for name in config.get("trainer", {}).get("logger", ()) if name != "console"],
                {"evaluation": self._name, "of": str(names[1])},
                run_dir=self._directory,
                group=str(names[1]),
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
