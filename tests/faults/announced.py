"""A toy run on real ranks that remembers which checkpoints it announced as saved."""

import logging
import os
from pathlib import Path
from typing import Any

from toy_runs import Recipe, run

from trainer.checkpoint import layout
from trainer.runtime.distributed import World
from trainer.runtime.signals import StopRequest

ACKS = "acks.txt"


class Acks(logging.Handler):
    """Remembers on disk which checkpoints were announced as saved, before anybody can be killed
    again.
    """

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self._file = os.open(run_dir / ACKS, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("saved "):
            step = layout.parse_step(Path(str(record.args[0])).name)  # type: ignore[index]
            os.write(self._file, f"{step}\n".encode())


def train(world: World, run_dir: Path, source: Any, recipe: Recipe) -> int:
    """One rank of one start of the run; its exit code."""
    logger = logging.getLogger("trainer.checkpoint.manager")
    logger.setLevel(logging.INFO)
    if world.is_main:
        logger.addHandler(Acks(run_dir))
    stop = StopRequest()
    stop.install()
    return run(world, run_dir, source, recipe, stop=stop).exit_code
