"""Where a model comes from: a local directory, or the Hub once."""

from collections.abc import Callable
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.utils import tqdm

from trainer.config import ConfigError

_FILES = ["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt", "*.tiktoken", "*.py"]


def find_model(name: str, *, random_weights: bool, progress: Callable[[], None] = lambda: None) -> str:
    """The local directory of `model.partial_pretrain`, downloaded if it is a Hub id that is not cached yet.

    `progress` is called as bytes arrive. Raises `ConfigError` when there is none, or when it lacks weights that are
    asked for.
    """
    path = Path(name).expanduser()
    if not path.is_dir():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise ConfigError(f"model.partial_pretrain={name}: there is no such directory")
        try:
            path = Path(snapshot_download(name, allow_patterns=_FILES, tqdm_class=_telling(progress)))
        except Exception as error:  # the Hub client raises many kinds
            raise ConfigError(
                f"model.partial_pretrain={name} is no local directory and could not be had from the Hub: {error}"
            ) from error
    has_weights = any(path.glob("*.safetensors")) or any(path.glob("pytorch_model*.bin"))
    if not random_weights and not has_weights:
        raise ConfigError(
            f"model.partial_pretrain={name} has no weights (*.safetensors); "
            f"model.random_weights=true starts from random ones"
        )
    return str(path)


def _telling(progress: Callable[[], None]) -> type[tqdm]:
    """A progress bar that passes on that something has arrived."""

    class Telling(tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            progress()
            return super().update(n)

    return Telling
