"""`RunSetup`, the value from which the parts of a run are built."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from trainer.checkpoint.start import Start
from trainer.config import Config
from trainer.data.batch_plan import Schedule
from trainer.runtime.distributed import World
from trainer.train.start.inputs import Inputs


@dataclass(frozen=True)
class RunSetup:
    """The configuration, inputs, ranks and start of a run."""

    inputs: Inputs
    world: World
    start: Start

    @property
    def config(self) -> Config:
        return self.inputs.config

    @property
    def run_dir(self) -> Path:
        return Path(self.config.trainer.default_local_dir)

    @cached_property
    def schedule(self) -> Schedule:
        return self.inputs.schedule_from(self.start.position)

    @cached_property
    def total_steps(self) -> int:
        return self.inputs.total_steps_from(self.start.position)
