"""What can be known of a run without torch: the launcher asks before it starts a rank (floor 4).

What is wrong with it; and what a finished run remembers that it ended with, so that a start with
nothing to do says so.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import trainer.data
from trainer import mirror
from trainer.checkpoint.choice import NoUsableCheckpointError, Selection, candidates_of, cannot_use
from trainer.checkpoint.layout import READING_PREFIX
from trainer.checkpoint.retention import existing_parent
from trainer.config import QUICKSTART, Config, ConfigError, ModelConfig, Source, sources_of
from trainer.data.files import resolve_files
from trainer.detection import require_usable_rules
from trainer.model.source import find_model, require_adapters, require_model
from trainer.quickstart import MODEL_DIR, TRAIN_FILE
from trainer.runtime.files import atomic_write, read_regular
from trainer.tracking.facade import require_installed
from trainer.tracking.run_info import FILE_NAME, RunFile

TEMPLATES = Path(trainer.data.__file__).parent / "templates"
TEMPLATE_NAMES = ("chatml", "llama3", "plain")
Files = list[tuple[Source, list[Path]]]


@dataclass(frozen=True)
class DataFiles:
    """The sources of `data.train_files` and `data.val_files` with their files."""

    train: Files
    validation: Files


def require_usable(config: Config) -> None:
    """Raise what the run would raise about its directory: `ConfigError`, `CannotWriteError`."""
    try:
        # a run that goes on has its data prepared, or is complete
        if find_candidates(config).chosen is None:
            _require_writable(Path(config.trainer.default_local_dir))
    except NoUsableCheckpointError:
        if config.trainer.checkpoint.mirror is None:
            raise  # else there may be one there


def find_candidates(config: Config) -> Selection:
    """What the run would continue from. Raises `ConfigError`, `CannotWriteError`."""
    try:
        return candidates_of(config.trainer)
    except OSError as error:
        raise cannot_use(Path(config.trainer.default_local_dir), error) from error


def _require_writable(run_dir: Path) -> None:
    """Nothing is made to find out. Raises `CannotWriteError`."""
    nearest = existing_parent(run_dir)
    if not os.access(nearest, os.W_OK | os.X_OK):
        is_read_only = os.statvfs(nearest).f_flag & os.ST_RDONLY
        reason = (
            "its file system is read-only"
            if is_read_only
            else f"user {os.geteuid()} may not write in '{nearest}'"
        )
        raise cannot_use(run_dir, OSError(reason))


def find_files(config: Config) -> DataFiles:
    """Raises `DataError` for what is missing or no data file."""

    def found(key: str) -> Files:
        sources = sources_of(config.data, key)
        return [
            (s, [TRAIN_FILE] if s.files == QUICKSTART else resolve_files(s.files)) for s in sources
        ]

    return DataFiles(found("train_files"), found("val_files"))


def find_model_dir(model: ModelConfig, *, progress: Callable[[], None] = lambda: None) -> str:
    """Where the model lies, downloaded if need be; `progress` is called as bytes arrive. Raises
    `ConfigError`.
    """
    if model.partial_pretrain == QUICKSTART:
        return str(MODEL_DIR)
    return find_model(
        model.partial_pretrain, random_weights=model.random_weights, progress=progress
    )


def read_chat_template(name: str | None) -> str | None:
    """The text of a `chat_template` of `data` or of a source: one of ours, or a file. Raises
    `ConfigError`.
    """
    if name is None:
        return None
    try:
        return (TEMPLATES / f"{name}.jinja" if name in TEMPLATE_NAMES else Path(name)).read_text(
            encoding="utf-8"
        )
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        ours = (
            f"; those with names are {', '.join(TEMPLATE_NAMES)}"
            if isinstance(error, FileNotFoundError)
            else ""
        )
        raise ConfigError(f"data.chat_template={name}: {reason}{ours}") from error


def _require_templates(config: Config) -> None:
    read_chat_template(config.data.chat_template)
    for source in sources_of(config.data, "train_files") + sources_of(config.data, "val_files"):
        read_chat_template(source.chat_template)


def _require_model(config: Config) -> None:
    if config.model.partial_pretrain != QUICKSTART:
        require_model(config.model.partial_pretrain, random_weights=config.model.random_weights)


def _require_own_directory(config: Config) -> None:
    trainer = config.trainer
    RunFile(Path(trainer.default_local_dir, FILE_NAME)).require(
        trainer.project_name, trainer.experiment_name
    )


def _require_mirror(config: Config) -> None:
    if (url := config.trainer.checkpoint.mirror) is not None:
        from trainer.mirror.storage import require_usable  # fsspec takes a moment to import

        require_usable(url)


CHECKS: dict[str, Callable[[Config], object]] = {
    "guard": lambda config: require_usable_rules(config.trainer.guard.rules),
    "trackers": lambda config: require_installed(config.trainer.logger),
    "template": _require_templates,
    "adapters": lambda config: require_adapters(config.model),
    "model": _require_model,
    "run directory": _require_own_directory,
    "mirror": _require_mirror,
}
"""What is asked before files and checkpoints are looked at; each raises `ConfigError`."""


RECORD = ".finished"
OUTSIDE = (RECORD, mirror.STATE, READING_PREFIX)
"""What is written after the end: this record, where no kill came before it, and what a mirror
and readers leave.
"""


def stamp_of(config: Config, files: DataFiles, model_dir: str, *, num_ranks: int) -> str:
    """What a run is made from; to be taken before any of it is read. Files as `_states` sees
    them.
    """
    sources = sources_of(config.data, "train_files") + sources_of(config.data, "val_files")
    templates = [
        read_chat_template(name)
        for name in (config.data.chat_template, *(s.chat_template for s in sources))
    ]
    data = [path for _, paths in (*files.train, *files.validation) for path in paths]
    versions = [version(name) for name in ("torch", "transformers")]
    states = [_states(data), _states(Path(model_dir).rglob("*"))]
    return _digest(config.resolved, num_ranks, versions, templates, states)


def remember(run_dir: Path, stamp: str, message: str) -> None:
    """At the very end of the run. What cannot be written is left out: the next start then looks
    itself.
    """
    with suppress(OSError):
        record = {"stamp": _digest(stamp, _states_below(run_dir)), "message": message}
        atomic_write(run_dir / RECORD, json.dumps(record))


def already_said(config: Config, files: DataFiles, *, num_ranks: int) -> str | None:
    """What a run said at its end that is complete, and of which nothing has changed. Raises
    `ConfigError`.
    """
    run_dir = Path(config.trainer.default_local_dir)
    if not (run_dir / RECORD).exists():
        return None
    return recall(
        run_dir, stamp_of(config, files, find_model_dir(config.model), num_ranks=num_ranks)
    )


def recall(run_dir: Path, stamp: str) -> str | None:
    """What a run of this stamp ended with; None if there is none, or if anything in its
    directory has changed since.
    """
    try:
        record: dict[str, str] = json.loads(read_regular(run_dir / RECORD))
        return (
            record["message"] if record["stamp"] == _digest(stamp, _states_below(run_dir)) else None
        )
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def _states_below(run_dir: Path) -> list[tuple[str, int, int]]:
    return _states(path for path in run_dir.rglob("*") if not path.name.startswith(OUTSIDE))


def _states(paths: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Of each file its size and when it last changed: unlike `st_mtime`, `st_ctime` cannot be
    set to what it was.
    """
    found = [(str(path.absolute()), path.stat()) for path in sorted(paths) if path.is_file()]
    return [(name, state.st_size, state.st_ctime_ns) for name, state in found]


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
