"""Logs to Weights & Biases, online or offline (WANDB_MODE). All attempts form one run."""

import logging
import os
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar

from trainer.tracking.backend import ContinuedBackend
from trainer.tracking.events_file import Event
from trainer.tracking.metrics_file import MetricsRow

logger = logging.getLogger(__name__)

INIT_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 50.0
MAX_TITLE_CHARS = 63
STEP = "trainer/step"
ROWS_PER_ATTEMPT = 10**9
"""More rows than any attempt logs."""


def require_login() -> None:
    """Raise `RuntimeError` if wandb would prompt for an API key, or wandb's own error if the key is
    invalid.
    """
    import wandb

    if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
        raise RuntimeError("no API key. Fix: run `wandb login`, or set WANDB_MODE=offline")


class WandbBackend(ContinuedBackend):
    """Sends the step as the metric `trainer/step`. Wandb's internal step must never decrease, so it
    counts rows. After a rollback, the repeated steps appear twice, because wandb cannot remove
    rows.
    """

    close_timeout_s = 60.0
    modules = ("wandb",)
    install = "'wandb>=0.31'"
    environment: ClassVar[Mapping[str, str]] = {"WANDB_ERROR_REPORTING": "false"}
    _run: Any = None
    _next_row = 0

    def where(self) -> str:
        mode = os.environ.get("WANDB_MODE")
        if mode in ("offline", "dryrun"):
            run_dir = self.info.run_dir
            return f"wandb offline; upload with: wandb sync {run_dir}/wandb/offline-run-*"
        if mode == "disabled":
            return "wandb disabled by WANDB_MODE"
        return f"wandb project {self._project} (wandb prints the URL)"

    def connect(self, run_id: str | None) -> str:
        import wandb

        require_login()
        run_id = run_id or uuid.uuid4().hex[:12]
        has_files = any((self.info.run_dir / "wandb").glob(f"*run-*-{run_id}"))
        # WANDB_NAME names the training run, not its evaluations
        name = None if "evaluation" in self.info.config else os.environ.get("WANDB_NAME")
        self._run = wandb.init(
            project=self._project,
            name=name or self.info.experiment_name,
            group=self.info.group,
            config=dict(self.info.config),
            dir=str(self.info.run_dir),
            id=run_id,
            resume="allow",
            # The finish timeout also limits wandb's exit hook, so that a dead network cannot keep
            # the process alive.
            settings=wandb.Settings(
                console="off",
                quiet=True,
                init_timeout=INIT_TIMEOUT_S,
                finish_timeout=FINISH_TIMEOUT_S,
            ),
        )
        # A mirror does not restore wandb's files, and an offline attempt cannot ask the server. A
        # disabled wandb never has rows.
        self._is_empty = not (has_files or self._run.step or self._run.disabled)
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        self._next_row = self._run.step
        if self._run.offline:
            # All attempts are uploaded one after the other as one run, whose own step must rise. An
            # offline attempt does not know how many rows earlier attempts logged.
            self._next_row = (self.info.attempt - 1) * ROWS_PER_ATTEMPT
        elif not self._run.disabled:
            logger.info("wandb: %s", self._run.url)
        return run_id

    @property
    def _project(self) -> str:
        """The W&B project. WANDB_PROJECT overrides the configured name, so that the runs of several
        configurations can share a project.
        """
        return os.environ.get("WANDB_PROJECT") or self.info.project_name

    def send(self, row: MetricsRow) -> None:
        data = {**row.data, STEP: row.step, "_timestamp": row.ts}
        self._run.log(data, step=self._next_row, commit=True)
        self._next_row += 1

    def alert(self, event: Event) -> None:
        title = f"{event.kind} at step {event.step}"[:MAX_TITLE_CHARS]
        self._run.alert(title, event.message, level="ERROR")

    def disconnect(self, exit_code: int) -> None:
        import wandb

        self._run.finish(exit_code=exit_code)
        # finish() returns before wandb's service has written its file. If the container ended now,
        # the file would be incomplete.
        wandb.teardown(exit_code=exit_code)
