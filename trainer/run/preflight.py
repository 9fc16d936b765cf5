"""What is wrong with a run as far as it can be known without torch: the launcher asks before it starts a rank."""

from pathlib import Path

import trainer.data
from trainer.checkpoint.choice import candidates_of, cannot_use
from trainer.config import QUICKSTART, Config, ConfigError, sources_of
from trainer.data.files import resolve_files
from trainer.detection import parse_rules
from trainer.model.source import require_adapters, require_model
from trainer.tracking.facade import require_installed

TEMPLATES = Path(trainer.data.__file__).parent / "templates"
TEMPLATE_NAMES = ("chatml", "llama3", "plain")


def require_ready(config: Config) -> None:
    """Raises what the run itself would raise seconds or, once data is prepared, hours later: `ConfigError`,
    `DataError`, `CannotWriteError`.
    """
    parse_rules(config.trainer.guard.rules)
    require_installed(config.trainer.logger)
    read_chat_template(config.data.chat_template)
    require_adapters(config.model)
    if config.model.partial_pretrain != QUICKSTART:
        require_model(config.model.partial_pretrain, random_weights=config.model.random_weights)
    for source in sources_of(config.data, "train_files") + sources_of(config.data, "val_files"):
        read_chat_template(source.chat_template)
        if source.files != QUICKSTART:
            resolve_files(source.files)
    try:
        candidates_of(config.trainer)
    except OSError as error:
        raise cannot_use(Path(config.trainer.default_local_dir), error) from error


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
