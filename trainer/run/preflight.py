"""What is wrong with a run as far as it can be known without torch: the launcher asks before it starts a rank."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import trainer.data
from trainer.checkpoint.choice import candidates_of, cannot_use
from trainer.config import QUICKSTART, Config, ConfigError, ModelConfig, Source, sources_of
from trainer.data.files import resolve_files
from trainer.detection import parse_rules
from trainer.model.source import find_model, require_adapters, require_model
from trainer.quickstart import MODEL_DIR, TRAIN_FILE
from trainer.tracking.facade import require_installed

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
    parse_rules(config.trainer.guard.rules)
    require_installed(config.trainer.logger)
    read_chat_template(config.data.chat_template)
    require_adapters(config.model)
    if config.model.partial_pretrain != QUICKSTART:
        require_model(config.model.partial_pretrain, random_weights=config.model.random_weights)
    for source in sources_of(config.data, "train_files") + sources_of(config.data, "val_files"):
        read_chat_template(source.chat_template)
    files = find_files(config)
    try:
        candidates_of(config.trainer)
    except OSError as error:
        raise cannot_use(Path(config.trainer.default_local_dir), error) from error
    return files


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
