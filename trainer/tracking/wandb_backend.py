"""Weights & Biases, online or offline (WANDB_MODE): one run continued over all attempts."""

import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.tracking.backend import Backend
from trainer.tracking.events_file import Event
from trainer.tracking.metrics_file import MetricsRow
from trainer.tracking.run_info import RunInfo

logger = logging.getLogger(__name__)

INIT_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 50.0
MAX_TITLE_CHARS = 63
STEP = "trainer/step"
ROWS_PER_ATTEMPT = 10**9
"""More than any attempt logs."""


def project(info: RunInfo) -> str:
    """WANDB_PROJECT puts training and evaluation runs of several configurations into one
    project.
    """
    return os.environ.get("WANDB_PROJECT") or info.project_name


def where(info: RunInfo) -> str:
    if os.environ.get("WANDB_MODE") in ("offline", "dryrun"):
        return f"offline, to upload: wandb sync {info.run_dir}/wandb/offline-run-*"
    return f"project {project(info)}, its address follows"


def require_login() -> None:
    """Without a key wandb would ask for one on the terminal. Raises `RuntimeError`, or wandb's
    error of a bad one.
    """
    import wandb

    if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
        raise RuntimeError("no API key: run `wandb login`, or set WANDB_MODE=offline")


class WandbBackend(Backend):
    """Steps are sent as the metric `trainer/step`: wandb's own step counts rows, as it must never
    go back.

    After a rollback the repeated steps appear a second time: wandb cannot take rows back.
    """

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._run: Any = None
        self._next_step = 0

    def open(self) -> None:
        import wandb

        require_login()
        run_id = self._info.run_file.get("wandb")
        if run_id is None:
            run_id = uuid.uuid4().hex[:12]
            self._info.run_file.set("wandb", run_id)
        self._run = wandb.init(
            project=project(self._info),
            name=self._name(),
            group=self._info.group,
            config=dict(self._info.config),
            dir=str(self._info.run_dir),
            id=run_id,
            resume="allow",
            # The finish timeout also bounds wandb's exit hook: a dead network must not hold the
            # process.
            settings=wandb.Settings(
                console="off",
                quiet=True,
                init_timeout=INIT_TIMEOUT_S,
                finish_timeout=FINISH_TIMEOUT_S,
            ),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        if self._run.offline:
            # Nobody says how far earlier attempts counted; their files are uploaded one after the
            # other as one run.
            self._next_step = (self._info.attempt - 1) * ROWS_PER_ATTEMPT
        else:
            logger.info("wandb: %s", self._run.url)
            self._next_step = self._run.step

    def log(self, row: MetricsRow) -> None:
        self._run.log(
            {**row.data, STEP: row.step, "_timestamp": row.ts}, step=self._next_step, commit=True
        )
        self._next_step += 1

    def _name(self) -> str:
        """WANDB_NAME is that of the training, not of its evaluations."""
        given = None if "evaluation" in self._info.config else os.environ.get("WANDB_NAME")
        return given or self._info.experiment_name

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, str | float]]) -> None:
        import wandb

        columns: list[str | int] = list(rows[0])
        shown = wandb.Table(columns=columns, data=[list(row.values()) for row in rows])
        self._run.log({name: shown, STEP: step}, step=self._next_step, commit=True)
        self._next_step += 1

    def alert(self, event: Event) -> None:
        self._run.alert(
            f"{event.kind} at step {event.step}"[:MAX_TITLE_CHARS], event.message, level="ERROR"
        )

    def close(self, exit_code: int) -> None:
        import wandb

        self._run.finish(exit_code=exit_code)
        # finish() returns before wandb's service has written its file; a container that ends now
        # would cut it.
        wandb.teardown(exit_code=exit_code)
