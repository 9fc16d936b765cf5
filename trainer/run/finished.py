"""A finished run remembers what it ended with: a start that has nothing to do says so without torch (floor 4)."""

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from trainer.config import Config, sources_of
from trainer.run.preflight import DataFiles, read_chat_template
from trainer.runtime.atomic_files import atomic_write

RECORD = ".finished"


def stamp_of(config: Config, files: DataFiles, model_dir: str, *, num_ranks: int) -> str:
    """What a run is made from; to be taken before any of it is read. Files as `_states` sees them."""
    sources = sources_of(config.data, "train_files") + sources_of(config.data, "val_files")
    templates = [read_chat_template(name) for name in (config.data.chat_template, *(s.chat_template for s in sources))]
    data = [path for _, paths in (*files.train, *files.validation) for path in paths]
    versions = [version(name) for name in ("torch", "transformers")]
    states = [_states(data), _states(Path(model_dir).rglob("*"))]
    return _digest(config.resolved, num_ranks, versions, templates, states)


def remember(run_dir: Path, stamp: str, message: str) -> None:
    """At the very end of the run. What cannot be written is left out: the next start then looks itself."""
    with suppress(OSError):
        record = {"stamp": _digest(stamp, _states_below(run_dir)), "message": message}
        atomic_write(run_dir / RECORD, json.dumps(record))


def recall(run_dir: Path, stamp: str) -> str | None:
    """What a run of this stamp ended with; None if there is none, or if anything in its directory has changed since."""
    try:
        record: dict[str, str] = json.loads((run_dir / RECORD).read_text())
        return record["message"] if record["stamp"] == _digest(stamp, _states_below(run_dir)) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _states_below(run_dir: Path) -> list[tuple[str, int, int]]:
    return _states(path for path in run_dir.rglob("*") if path.name != RECORD)


def _states(paths: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Of each file its size and when it last changed: unlike `st_mtime`, `st_ctime` cannot be set to what it was."""
    found = [(str(path.absolute()), path.stat()) for path in sorted(paths) if path.is_file()]
    return [(name, state.st_size, state.st_ctime_ns) for name, state in found]


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
