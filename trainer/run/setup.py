"""What a run is built from (floor 4)."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from trainer.checkpoint.start import Start
from trainer.config import Config
from trainer.data.batch_plan import Schedule
from trainer.progress import Position
from trainer.run.inputs import Inputs
from trainer.runtime.distributed import World


@dataclass(frozen=True)
class RunSetup:
    """A run's configuration, inputs, ranks and start, from which its parts are built."""

    config: Config
    inputs: Inputs
    world: World
    start: Start

    @property
    def run_dir(self) -> Path:
        return Path(self.config.trainer.default_local_dir)

    @cached_property
    def schedule(self) -> Schedule:
        return schedule_from(self.config, self.inputs, self.start.position)

    @cached_property
    def total_steps(self) -> int:
        return total_steps_from(self.config, self.inputs, self.start.position)


def schedule_from(config: Config, inputs: Inputs, start: Position) -> Schedule:
    return Schedule(inputs.train.shares, config.data.train_batch_size, config.trainer.seed, start)


def total_steps_from(config: Config, inputs: Inputs, start: Position) -> int:
    """Steps of the whole run, of which those up to `start` are done."""
    epochs = config.trainer.total_epochs
    steps = config.trainer.total_training_steps
    return steps or schedule_from(config, inputs, start).steps_until(epochs)
