"""`run.json`: a run's names and configuration, its ids in trackers, and the last steps sent."""

import json
import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.runtime.files import atomic_write, read_regular
from trainer.tracking import metrics_file
from trainer.tracking.metrics_file import MetricsRow

logger = logging.getLogger(__name__)

FILE_NAME = "run.json"
NOTHING_SENT = -1
"""The last step sent to a new tracker run. Step 0 is the state before training."""
ELSEWHERE = (
    "Fix: log into a different directory (run_dir, trainer.default_local_dir or "
    "trainer.experiment_name)"
)


class RunFile:
    """Reads and updates `run.json`. Thread-safe. If the file cannot be written, a warning is
    logged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.RLock()
        self._content = read_run_file(path)

    def require(self, project_name: str, experiment_name: str) -> None:
        """Raise `ConfigError` if the directory holds a different run, because two runs would
        discard each other's rows.
        """
        holder = (self._content.get("project_name"), self._content.get("experiment_name"))
        if None not in holder and holder != (project_name, experiment_name):
            raise ConfigError(
                f"'{self._path.parent}' holds the run '{holder[1]}' of project '{holder[0]}', not "
                f"'{experiment_name}' of '{project_name}'. {ELSEWHERE}, or keep its names"
            )

    def tracker(self, name: str) -> tuple[str | None, int]:
        """Return the id of a tracker's run, and the last step whose rows it certainly has."""
        run_id = self._entries("run_ids").get(name)
        last_step = self._entries("last_sent").get(name)
        if not isinstance(run_id, str) or not isinstance(last_step, int):  # edited by hand
            return None, NOTHING_SENT
        return run_id, last_step

    def set_tracker(
        self,
        name: str,
        run_id: str,
        last_step: int,
    ) -> None:
        with self._lock:  # other trackers write their entries at the same time
            self.update(
                run_ids=self._entries("run_ids") | {name: run_id},
                last_sent=self._entries("last_sent") | {name: last_step},
            )

    def update(self, **content: Any) -> None:
        """Replace entries. Values that JSON cannot express are stored as text."""
        with self._lock:
            self._content |= content
            text = json.dumps(self._content, indent=2, default=str)
            try:
                atomic_write(self._path, text + "\n")
            except OSError as error:
                logger.warning(
                    "cannot write %s: %s; a restart may start new tracker runs", self._path, error
                )

    def _entries(self, name: str) -> dict[str, Any]:
        entries = self._content.get(name)
        return entries if isinstance(entries, dict) else {}


def read_run_file(path: Path) -> dict[str, Any]:
    """Return the content, or {} without a readable file. Other code may store additional keys."""
    try:
        content = json.loads(read_regular(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("cannot read %s: %s; trackers start new runs", path, error)
        return {}
    return content if isinstance(content, dict) else {}


def read_config(run_dir: Path) -> dict[str, Any]:
    """Return the resolved configuration of the run's last attempt. Raises `ConfigError`."""
    tree = read_run_file(run_dir / FILE_NAME).get("config")
    if not isinstance(tree, dict):
        raise ConfigError(
            f"'{run_dir / FILE_NAME}' does not contain the configuration of the run. Fix: use the "
            f"original run directory, which has this file"
        )
    return tree


@dataclass
class RunInfo:
    """The facts about a run that trackers need."""

    project_name: str
    experiment_name: str
    config: Mapping[str, Any]
    run_dir: Path
    total_steps: int | None
    """The number of steps of the whole run, if known."""
    attempt: int
    run_file: RunFile
    group: str
    """The name of a group of runs that trackers show together, such as a training run and its
    evaluations.
    """
    log_every: int = 1
    """The number of steps between console lines."""
    resume_step: int = 0
    """The number of steps that are done when this attempt starts; -1 if its first row has step 0.
    It is set before a backend opens.
    """

    @property
    def metrics_path(self) -> Path:
        return self.run_dir / metrics_file.FILE_NAME

    def earlier_rows(self) -> Iterator[MetricsRow]:
        """Yield the rows of earlier attempts up to the step from which this attempt resumed."""
        return metrics_file.read_rows(self.metrics_path, before_attempt=self.attempt)

    def repeated_rows(self, last_step: int) -> set[tuple[int, str]]:
        """Return (step, kind) of the rows up to `last_step` that earlier attempts logged and this
        attempt logs again.
        """
        if last_step <= self.resume_step:
            return set()
        places = metrics_file.read_places(self.metrics_path, before_attempt=self.attempt)
        return {place for place in places if self.resume_step < place[0] <= last_step}
