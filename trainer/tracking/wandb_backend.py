"""Weights & Biases, online or offline (WANDB_MODE): one run continued over all attempts."""

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
"""More than any attempt logs."""


def require_login() -> None:
    """Raise `RuntimeError` if wandb would prompt for an API key, or wandb's own error if the key is
    invalid.
    """
    import wandb

    if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
        raise RuntimeError("no API key. Fix: run `wandb login`, or set WANDB_MODE=offline")


class WandbBackend(ContinuedBackend):
    """Steps are sent as the metric `trainer/step`: wandb's own step counts rows, because it must
    never decrease. After a rollback the repeated steps appear twice: wandb cannot remove rows.
    """

    close_timeout_s = 60.0
    modules = ("wandb",)
    install = "'wandb>=0.31'"
    environment: ClassVar[Mapping[str, str]] = {"WANDB_ERROR_REPORTING": "false"}
    _run: Any = None
    _next_row = 0

    def where(self) -> str:
        if os.environ.get("WANDB_MODE") in ("offline", "dryrun"):
            run_dir = self.info.run_dir
            return f"wandb offline, to upload: wandb sync {run_dir}/wandb/offline-run-*"
        return f"wandb project {self._project}, its address follows"

    def connect(self, run_id: str | None) -> str:
        import wandb

        require_login()
        run_id = run_id or uuid.uuid4().hex[:12]
        # WANDB_NAME is the name of the training, not of its evaluations
        name = None if "evaluation" in self.info.config else os.environ.get("WANDB_NAME")
        self._run = wandb.init(
            project=self._project,
            name=name or self.info.experiment_name,
            group=self.info.group,
            config=dict(self.info.config),
            dir=str(self.info.run_dir),
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
            # All attempts are uploaded one after the other as one run, whose own step must rise. An
            # offline attempt does not know how far earlier ones counted.
            self._next_row = (self.info.attempt - 1) * ROWS_PER_ATTEMPT
        else:
            logger.info("wandb: %s", self._run.url)
            self._next_row = self._run.step
        return run_id

    @property
    def _project(self) -> str:
        """WANDB_PROJECT puts training and evaluation runs of several configurations into one
        project.
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
        # finish() returns before wandb's service has written its file; a container that ends now
        # would cut it.
        wandb.teardown(exit_code=exit_code)
