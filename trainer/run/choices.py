"""Keys whose values are names of parts: an entry in a dictionary is a value (imports no torch)."""

from trainer.config import Config
from trainer.config.checks import one_of
from trainer.losses import LOSSES
from trainer.optim import OPTIMIZERS


def require_known_parts(config: Config) -> None:
    """Raises `ConfigError` for a name that no part has."""
    one_of("model.loss", config.model.loss, LOSSES)
    one_of("optim.name", config.optim.name, OPTIMIZERS)
