"""What is wrong with a run as far as it can be known without torch: the launcher asks before it starts a rank."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import trainer.data
from trainer.checkpoint.choice import Selection, candidates_of, cannot_use
from trainer.config import QUICKSTART, Config, ConfigError, ModelConfig, Source, sources_of
from trainer.data.files import resolve_files
from trainer.detection import parse_rules
from trainer.model.source import find_model, require_adapters, require_model
from trainer.quickstart import MODEL_DIR, TRAIN_FILE
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


def require_ready(config: Config) -> DataFiles:
    """Raises what the run itself would raise seconds or, once data is prepared, hours later: `ConfigError`,
    `DataError`, `CannotWriteError`. The files it will read.
    """
    for check in CHECKS.values():
        check(config)
    files = find_files(config)
    find_candidates(config)
    return files


def find_candidates(config: Config) -> Selection:
    """What the run would continue from. Raises `ConfigError`, `CannotWriteError`."""
    try:
        return candidates_of(config.trainer)
    except OSError as error:
        raise cannot_use(Path(config.trainer.default_local_dir), error) from error


def find_files(config: Config) -> DataFiles:
    """Raises `DataError` for what is missing or no data file."""

    def found(key: str) -> Files:
        sources = sources_of(config.data, key)
        return [(s, [TRAIN_FILE] if s.files == QUICKSTART else resolve_files(s.files)) for s in sources]

    return DataFiles(found("train_files"), found("val_files"))


def find_model_dir(model: ModelConfig, *, progress: Callable[[], None] = lambda: None) -> str:
    """Where the model lies, downloaded if need be; `progress` is called as bytes arrive. Raises `ConfigError`."""
    if model.partial_pretrain == QUICKSTART:
        return str(MODEL_DIR)
    return find_model(model.partial_pretrain, random_weights=model.random_weights, progress=progress)


def read_chat_template(name: str | None) -> str | None:
    """The text of a `chat_template` of `data` or of a source: one of ours, or a file. Raises `ConfigError`."""
    if name is None:
        return None
    try:
        return (TEMPLATES / f"{name}.jinja" if name in TEMPLATE_NAMES else Path(name)).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        ours = f"; those with names are {', '.join(TEMPLATE_NAMES)}" if isinstance(error, FileNotFoundError) else ""
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
    RunFile(Path(trainer.default_local_dir, FILE_NAME)).require(trainer.project_name, trainer.experiment_name)


CHECKS: dict[str, Callable[[Config], object]] = {
    "guard": lambda config: parse_rules(config.trainer.guard.rules),
    "trackers": lambda config: require_installed(config.trainer.logger),
    "template": _require_templates,
    "adapters": lambda config: require_adapters(config.model),
    "model": _require_model,
    "run directory": _require_own_directory,
}
"""What is asked before files and checkpoints are looked at; each raises `ConfigError`."""
