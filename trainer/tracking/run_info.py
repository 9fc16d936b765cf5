"""What a backend knows about the run it reports on, and `run.json`: names, configuration,
tracker ids, steps sent.
"""

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
"""As the last step sent: step 0 is that before training."""
ELSEWHERE = "log into a directory of its own (run_dir, trainer.default_local_dir or trainer.experiment_name)"


class RunFile:
    """`run.json`: what a run is, its ids in trackers and what they have of it, so that a restart
    continues there.

    Thread-safe.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._content = read_run_file(path)
        ids, sent = self._content.get("run_ids"), self._content.get("last_sent")
        self._ids: dict[str, str] = dict(ids) if isinstance(ids, dict) else {}
        self._sent: dict[str, int] = dict(sent) if isinstance(sent, dict) else {}

    def require(self, project_name: str, experiment_name: str) -> None:
        """Two runs in one directory would take back each other's rows: raises `ConfigError`
        where it holds another.
        """
        holder = (self._content.get("project_name"), self._content.get("experiment_name"))
        if None not in holder and holder != (project_name, experiment_name):
            raise ConfigError(
                f"'{self._path.parent}' holds the run '{holder[1]}' of project '{holder[0]}', not "
                f"'{experiment_name}' of '{project_name}': keep its names, or {ELSEWHERE}"
            )

    def get(self, backend: str) -> str | None:
        with self._lock:
            return self._ids.get(backend)

    def set(self, backend: str, run_id: str) -> None:
        """Keep the id of a tracker run; nothing has been sent to one with another id than
        before.
        """
        with self._lock:
            if self._ids.get(backend) != run_id:
                self._ids[backend] = run_id
                self._sent[backend] = NOTHING_SENT
                self._update({"run_ids": self._ids, "last_sent": self._sent})

    def last_sent(self, backend: str) -> int | None:
        """The last step whose rows the tracker surely has; None if that was never recorded."""
        with self._lock:
            return self._sent.get(backend)

    def set_last_sent(self, backend: str, step: int) -> None:
        with self._lock:
            if self._sent.get(backend) != step:
                self._sent[backend] = step
                self._update({"last_sent": self._sent})

    def describe(self, description: Mapping[str, Any]) -> None:
        """Keep what a run is beside the ids, such as its configuration; values that JSON lacks
        are kept as text.
        """
        with self._lock:
            self._update(description)

    def adopt(self, run_ids: Mapping[str, str]) -> None:
        """Take ids of a checkpoint for backends this run directory knows nothing of."""
        with self._lock:
            self._ids = {**run_ids, **self._ids}
            self._update({"run_ids": self._ids})

    def as_dict(self) -> dict[str, str]:
        with self._lock:
            return dict(self._ids)

    def _update(self, content: Mapping[str, Any]) -> None:
        try:
            merged = read_run_file(self._path) | dict(content)
            atomic_write(self._path, json.dumps(merged, indent=2, default=str) + "\n")
        except OSError as error:
            logger.warning(
                "cannot write %s: %s; a restart may start new tracker runs", self._path, error
            )


def read_run_file(path: Path) -> dict[str, Any]:
    """The content, {} without one; others may keep their own keys in it."""
    try:
        content = json.loads(read_regular(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("cannot read %s: %s; trackers start new runs", path, error)
        return {}
    return content if isinstance(content, dict) else {}


def read_config(run_dir: Path) -> dict[str, Any]:
    """The resolved configuration of the run's last attempt. Raises `ConfigError`."""
    tree = read_run_file(run_dir / FILE_NAME).get("config")
    if not isinstance(tree, dict):
        text = f"'{run_dir / FILE_NAME}' does not hold the configuration of the run"
        raise ConfigError(f"{text}: give the directory in which it was trained, with that file")
    return tree


@dataclass
class RunInfo:
    project_name: str
    experiment_name: str
    config: Mapping[str, Any]
    run_dir: Path
    """Where backends write."""
    metrics_path: Path
    """Where the rows of earlier attempts are."""
    total_steps: int | None
    """Of the whole run; None where nobody said."""
    attempt: int
    run_file: RunFile
    group: str
    """Runs that trackers show together: a training and its evaluations."""
    resume_step: int = 0
    """Steps already done when this attempt starts, known before a backend opens; -1 if the
    first row is of step 0.
    """

    def earlier_rows(self) -> Iterator[MetricsRow]:
        """Rows of earlier attempts that count, which are those up to the resume step; complete
        when a backend opens.
        """
        return metrics_file.read_rows(self.metrics_path, before_attempt=self.attempt)

    def description(self) -> dict[str, Any]:
        """What `run.json` says of the run, for those who read its directory."""
        total_steps = {} if self.total_steps is None else {"total_steps": self.total_steps}
        return {**self.identity, "group": self.group, **total_steps, "config": self.config}

    @property
    def identity(self) -> dict[str, str]:
        return {"project_name": self.project_name, "experiment_name": self.experiment_name}
