"""Weights & Biases, online or offline (WANDB_MODE): one run continued over all attempts."""

import logging
import uuid
from collections.abc import Mapping
from typing import Any

from trainer.tracking.run_info import RunInfo

logger = logging.getLogger(__name__)

INIT_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 50.0


class WandbBackend:
    """Steps are sent as the metric `trainer/step`, never as wandb's own step: that one drops what a resume repeats."""

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._run: Any = None

    def open(self) -> None:
        import wandb

        # Without a key wandb would ask for one on the terminal.
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
            raise RuntimeError("no API key: run `wandb login`, or set WANDB_MODE=offline")
        run_id = self._info.run_ids.get("wandb")
        if run_id is None:
            run_id = uuid.uuid4().hex[:12]
            self._info.run_ids.set("wandb", run_id)
        self._run = wandb.init(
            project=self._info.project_name,
            name=self._info.experiment_name,
            config=dict(self._info.config),
            dir=str(self._info.run_dir),
            id=run_id,
            resume="allow",
            # The finish timeout also bounds wandb's exit hook: a dead network must not hold the process.
            settings=wandb.Settings(
                console="off", quiet=True, init_timeout=INIT_TIMEOUT_S, finish_timeout=FINISH_TIMEOUT_S
            ),
        )
        self._run.define_metric("trainer/step")
        self._run.define_metric("*", step_metric="trainer/step")
        if not self._run.offline and self._run.url:
            logger.info("wandb: %s", self._run.url)

    def log(self, data: Mapping[str, float], step: int) -> None:
        self._run.log({**data, "trainer/step": step})

    def close(self, exit_code: int) -> None:
        import wandb

        self._run.finish(exit_code=exit_code)
        # finish() returns before wandb's service has written its file; a container that ends now would cut it.
        wandb.teardown(exit_code=exit_code)
