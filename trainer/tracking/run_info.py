"""What a backend knows about the run it reports on, and the ids under which trackers know that run."""

import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.tracking.files import atomic_write

logger = logging.getLogger(__name__)


class RunIds:
    """Tracker run ids, kept in `run.json` under `run_ids` so that a restart continues the same runs. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._ids: dict[str, str] = dict(self._read().get("run_ids", {}))

    def get(self, backend: str) -> str | None:
        with self._lock:
            return self._ids.get(backend)

    def set(self, backend: str, run_id: str) -> None:
        with self._lock:
            self._ids[backend] = run_id
            try:
                atomic_write(self._path, json.dumps(self._read() | {"run_ids": self._ids}, indent=2) + "\n")
            except OSError as error:
                logger.warning("cannot write %s: %s; a restart may start a new %s run", self._path, error, backend)

    def adopt(self, run_ids: Mapping[str, str]) -> None:
        """Take ids of a checkpoint for backends this run directory knows nothing of."""
        for backend, run_id in run_ids.items():
            if self.get(backend) is None:
                self.set(backend, run_id)

    def as_dict(self) -> dict[str, str]:
        with self._lock:
            return dict(self._ids)

    def _read(self) -> dict[str, Any]:
        """The file's content, {} without one; others may keep their own keys in it."""
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            logger.warning("cannot read %s: %s; trackers start new runs", self._path, error)
            return {}
        return content if isinstance(content, dict) else {}


@dataclass
class RunInfo:
    project_name: str
    experiment_name: str
    config: Mapping[str, Any]
    run_dir: Path
    total_steps: int
    attempt: int
    run_ids: RunIds
    resume_step: int = 0
    """Steps already done when this attempt starts, known with its first row, before a backend opens."""
