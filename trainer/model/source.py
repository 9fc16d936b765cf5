"""Finds a model in a local directory, or downloads it from the Hub once.

Errors are raised before torch is imported.
"""

import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.config import QUICKSTART, ConfigError, ModelConfig
from trainer.model.adapter_names import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from trainer.model.weight_files import INDEX, SINGLE_FILE, weight_files
from trainer.quickstart import MODEL_DIR

HUB_TIMEOUT_S = 10.0
_ARCHITECTURE = ["*.json", "*.py"]
_WITHOUT_WEIGHTS = [*_ARCHITECTURE, "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_FILES = [*_WITHOUT_WEIGHTS, "*.safetensors"]
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "*.model", "*.tiktoken", "vocab.*")


def find_model(
    name: str, *, random_weights: bool, progress: Callable[[], None] = lambda: None
) -> str:
    """Return the local directory of `model.partial_pretrain`. Download a Hub id that is not cached.

    `progress` is called as bytes arrive. Raise `ConfigError` if there is no such model, or if files
    are missing.
    """
    return _find(name, _WITHOUT_WEIGHTS if random_weights else _FILES, progress)


def find_architecture(name: str) -> str:
    """Return the local directory of `model.partial_pretrain`, with at least its config.json."""
    return _find(name, _ARCHITECTURE, lambda: None)


def require_model(name: str, *, random_weights: bool) -> None:
    """Raise the errors of `find_model` that need no download."""
    patterns = _WITHOUT_WEIGHTS if random_weights else _FILES
    if (path := _local(name) or _cached(name, patterns)) is None:
        _ask_hub(name)
    else:
        _require(name, path, patterns)


def require_adapters(model: ModelConfig) -> None:
    """Raise `ConfigError` if adapters are configured but peft is not installed, or if files of the
    initial adapter are missing.
    """
    if model.has_adapters and importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "LoRA ('model.lora_rank', 'model.lora_adapter_path') needs peft: pip install "
            "'peft>=0.21'"
        )
    if (path := model.lora_adapter_path) is None:
        return
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (Path(path) / name).is_file():
            raise ConfigError(
                f"model.lora_adapter_path={path} is not the directory of an adapter: it has no "
                f"{name}"
            )


def _local(name: str) -> Path | None:
    """Return the local directory of this name, or None if the name may be a Hub id."""
    if name == QUICKSTART:
        return MODEL_DIR
    path = Path(name)
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(f"model.partial_pretrain={name} is a file.\nFix: give its directory")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(
            f"model.partial_pretrain={name}: there is no such directory.\nFix: give a directory "
            f"with config.json and weights, or a Hub id such as Qwen/Qwen2.5-0.5B"
        )
    return None


def _problem(path: Path, patterns: list[str]) -> str | None:
    """Describe which of these files a directory lacks; None if it has all of them."""
    problem = _config_problem(path)
    if problem is not None or patterns == _ARCHITECTURE:
        return problem
    if not any(any(path.glob(pattern)) for pattern in _TOKENIZER):
        return "has no tokenizer.\nFix: copy tokenizer.json, or the files it is made from, to that directory"
    if patterns != _FILES or path == MODEL_DIR:
        return None
    try:
        files = weight_files(path)
    except ConfigError as error:
        return f"lacks weights: {error}"
    if not files:
        return (
            f"has no weights ({SINGLE_FILE} or {INDEX}). Fix: convert a pytorch_model.bin with "
            f"transformers' save_pretrained, or start from random weights with "
            f"model.random_weights=true"
        )
    return None


def _config_problem(path: Path) -> str | None:
    try:
        config: Any = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "has no config.json: it is not a transformers model"
    except (OSError, ValueError) as error:
        return f"has no usable config.json: {error}"
    if not isinstance(config, dict) or not {"model_type", "auto_map"} & config.keys():
        return "has no usable config.json: it names no model_type"
    return None


def _find(name: str, patterns: list[str], progress: Callable[[], None]) -> str:
    path = _local(name) or _cached(name, patterns) or _download(name, patterns, progress)
    _require(name, path, patterns)
    return str(path)


def _require(name: str, path: Path, patterns: list[str]) -> None:
    if (problem := _problem(path, patterns)) is not None:
        raise ConfigError(f"model.partial_pretrain={name} {problem}")


def _cached(name: str, patterns: list[str]) -> Path | None:
    """Return the directory of a complete earlier download, or None."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        path = Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return path if _problem(path, patterns) is None else None


def _download(name: str, patterns: list[str], progress: Callable[[], None]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm

    class Telling(tqdm):
        """A progress bar that calls `progress` whenever bytes arrive."""

        def update(self, n: float | None = 1) -> bool | None:
            progress()
            return super().update(n)

    _ask_hub(name)
    with _asking(name):
        return Path(snapshot_download(name, allow_patterns=patterns, tqdm_class=Telling))


def _ask_hub(name: str) -> None:
    """Ask the Hub for the model, with a short timeout.

    Without a network, or for a mistyped id, the client would otherwise retry for half a minute.
    """
    from huggingface_hub import HfApi

    with _asking(name):
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)


@contextmanager
def _asking(name: str) -> Iterator[None]:
    """Raise any error of the Hub client, which has many error types, as a `ConfigError`."""
    from huggingface_hub import constants

    try:
        yield
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"model.partial_pretrain={name} is not a local directory, is not complete in the "
            f"Hub's cache ({constants.HF_HUB_CACHE}), and cannot be downloaded: {reason}\n"
            f"Fix: run `hf download {name}` on a machine with internet access and copy its cache "
            f"here, or give a local directory"
        ) from error
