"""Check without torch whether a run can start, and whether it has already ended.

The launcher runs these checks before it starts ranks.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import trainer.data
from trainer.checkpoint import finished
from trainer.checkpoint.choice import NoUsableCheckpointError, Selection, candidates_of, cannot_use
from trainer.checkpoint.lock import has_ended_in_order
from trainer.checkpoint.retention import existing_parent
from trainer.config import QUICKSTART, Config, ConfigError, Source, sources_of
from trainer.data.files import resolve_files
from trainer.errors import DataError
from trainer.model.source import require_adapters, require_model
from trainer.quickstart import TRAIN_FILE
from trainer.tracking.facade import require_backends
from trainer.tracking.run_info import FILE_NAME, RunFile
from trainer.train.detection import require_usable_rules

TEMPLATES = Path(trainer.data.__file__).parent / "templates"
TEMPLATE_NAMES = ("chatml", "llama3", "plain")
Files = list[tuple[Source, list[Path]]]


@dataclass(frozen=True)
class DataFiles:
    """The sources of `data.train_files` and `data.val_files` with their files."""

    train: Files
    validation: Files


def require_usable(config: Config) -> None:
    """Check the run directory in the same way as the ranks do at startup.

    Raises `ConfigError` if the directory belongs to a different run or none of its checkpoints is
    usable, and `CannotWriteError` if the directory cannot be written.
    """
    trainer = config.trainer
    RunFile(Path(trainer.default_local_dir, FILE_NAME)).require(
        trainer.project_name, trainer.experiment_name
    )
    try:
        # A run that continues may already be complete. It then writes nothing.
        if find_candidates(config).chosen is None:
            _require_writable(Path(trainer.default_local_dir))
    except NoUsableCheckpointError:
        if trainer.checkpoint.mirror is None:
            raise  # a mirror may have a usable one


def find_candidates(config: Config) -> Selection:
    """Return the checkpoints from which the run could resume.

    Raises `ConfigError`, `CannotWriteError`.
    """
    try:
        return candidates_of(config.trainer)
    except OSError as error:
        raise cannot_use(Path(config.trainer.default_local_dir), error) from error


def _require_writable(run_dir: Path) -> None:
    """Raise `CannotWriteError` if `run_dir` is not writable. Creates nothing."""
    nearest = existing_parent(run_dir)
    if run_dir.is_symlink() and not run_dir.exists():  # such as a disk that is not mounted
        reason = f"it links to '{run_dir.readlink()}', which does not exist"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        reason = f"user {os.geteuid()} cannot write to '{nearest}'"
    else:
        return
    raise cannot_use(run_dir, OSError(reason))


def find_files(config: Config) -> DataFiles:
    """Return the files of all sources. Raises `DataError` for a missing or unsuitable file."""
    return DataFiles(_files(config, "train_files"), _files(config, "val_files"))


def _files(config: Config, key: str) -> Files:
    found = []
    for source in sources_of(config.data, key):
        try:
            is_quickstart = source.files == QUICKSTART
            found.append((source, [TRAIN_FILE] if is_quickstart else resolve_files(source.files)))
        except DataError as error:
            raise DataError(f"data.{key}: {error}") from error
    return found


def read_chat_template(name: str | None) -> str | None:
    """Return the text of a chat template, by its name or path. Raises `ConfigError` if it is
    missing or empty.
    """
    if name is None:
        return None
    path = TEMPLATES / f"{name}.jinja" if name in TEMPLATE_NAMES else Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"data.chat_template={name}: {reason}.\nFix: give the path of a jinja file, or one of "
            f"{', '.join(TEMPLATE_NAMES)}"
        ) from error
    if not text.strip():
        raise ConfigError(
            f"data.chat_template={name}: the file is empty.\nFix: write a template to it, or leave "
            f"out data.chat_template to use the template of the model"
        )
    return text


def _require_templates(config: Config) -> None:
    sources = sources_of(config.data, "train_files") + sources_of(config.data, "val_files")
    for template in {config.data.chat_template, *(source.chat_template for source in sources)}:
        read_chat_template(template)


def _require_mirror(config: Config) -> None:
    if (url := config.trainer.checkpoint.mirror) is not None:
        from trainer.checkpoint.storage import require_usable  # fsspec is slow to import

        require_usable(url)


CHECKS: dict[str, Callable[[Config], object]] = {
    "guard": lambda config: require_usable_rules(config.trainer.guard.rules),
    "trackers": lambda config: require_backends(config.trainer.logger),
    "template": _require_templates,
    "adapters": lambda config: require_adapters(config.model),
    "model": lambda config: require_model(
        config.model.partial_pretrain, random_weights=config.model.random_weights
    ),
    "mirror": _require_mirror,
    "files": find_files,
    "run directory": require_usable,
}
"""Checks of the configuration and of the paths that it names. Each one raises an error that has an
exit code.
"""


def already_complete(config: Config) -> str | None:
    """Return the message of a run that has ended, if running it again with `config` would change nothing.

    Returns None if the ranks must decide. Raises `ConfigError`, `DataError`, `CannotWriteError`.
    """
    try:
        last = find_candidates(config).chosen
    except NoUsableCheckpointError:  # the mirror may have one
        return None
    end = finished.read(last.path) if last is not None else None
    if last is None or end is None or end.config != config.resolved:
        return None
    run_dir = Path(config.trainer.default_local_dir)
    is_in_order = has_ended_in_order(run_dir, last)
    has_same_data = end.data_files == file_states(find_files(config))
    return end.message if is_in_order and has_same_data else None


def file_states(files: DataFiles) -> dict[str, list[int]]:
    """Return the size and modification time (ns) of each data file, by path."""
    states = {}
    for _, paths in (*files.train, *files.validation):
        for path in paths:
            state = path.stat()
            states[str(path)] = [state.st_size, state.st_mtime_ns]
    return states
