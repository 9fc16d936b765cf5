"""The words of a command line as a checked configuration: defaults, recipe, overrides. Imports no torch."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config import Config, ConfigError, find_foreign, own_words, parse_config, problem_with_key
from trainer.losses import LOSSES
from trainer.optim import OPTIMIZERS
from trainer.optim.schedule import DECAYS
from trainer.tracking.facade import BACKENDS

CONF_DIR = Path(__file__).resolve().parents[1] / "conf"
"""`trainer/conf`, a link to the top-level `conf/`; in an installed package the files themselves."""
PARTS: dict[str, Mapping[str, object]] = {
    "model.loss": LOSSES,
    "optim.name": OPTIMIZERS,
    "optim.lr_scheduler": DECAYS,
    "trainer.logger": BACKENDS,
}
"""Keys whose values are names of parts: an entry in a dictionary is a value."""
USAGE = """usage: python -m trainer [key=value ...]          (several ranks: bash run_sft.sh N [key=value ...])
  experiment=NAME        load conf/experiment/NAME.yaml over the defaults
  --cfg job              print the resolved configuration and exit
  --help                 print this, the tools, and all keys with their defaults and meaning"""


def load_config(words: list[str]) -> Config:
    """Defaults, experiment and overrides as a checked `Config`. Raises `ConfigError` for what the user got wrong."""
    words = own_words(words)
    if problems := [problem for word in words if (problem := _problem_with(word))]:
        raise ConfigError("\n".join(problems))
    return parse_config(_compose(words), PARTS)


def with_words(config: Config, words: Iterable[str]) -> Config:
    """The same configuration with further `key=value`. Raises `ConfigError` as `load_config`."""
    merged = OmegaConf.merge(OmegaConf.create(config.resolved), OmegaConf.from_dotlist(list(words)))
    return parse_config(OmegaConf.to_container(merged), PARTS)  # type: ignore[arg-type]  # a mapping, as what it is of


def as_words(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The words that a resolved configuration comes from."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from as_words(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={as_word(value)}"


def as_word(value: Any) -> str:
    """A value as an override is written."""
    if isinstance(value, str):
        return "'" + re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + found[2].replace("'", "\\'"), value) + "'"
    if isinstance(value, list):
        return f"[{','.join(map(as_word, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{as_word(item)}" for name, item in value.items()) + "}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _compose(words: list[str]) -> dict[str, Any]:
    # hydra need not know what is a key: a name inside data.apply_chat_template_kwargs is the user's own
    words = [word if word.startswith("experiment=") else f"++{word.lstrip('+')}" for word in words]
    try:
        for override in OverridesParser.create().parse_overrides(words):
            if override.is_sweep_override():
                raise _several_values(override.input_line)
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            tree: Any = OmegaConf.to_container(compose("sft", overrides=words), resolve=True)
    except OverrideParseException as error:
        raise ConfigError(f"cannot read '{error.override.lstrip('+')}': quote its value, key='\"value\"'") from error
    except (HydraException, OmegaConfBaseException) as error:
        lines = (line for line in str(error).splitlines() if line.strip())
        useful = [line for line in lines if "full_key" not in line and "object_type" not in line]
        raise ConfigError("\n".join(useful[:6])) from error
    return dict(tree)


def _several_values(word: str | None) -> ConfigError:
    key, _, value = (word or "").lstrip("+").partition("=")
    return ConfigError(
        f"'{key}={value}' has several values, and one run takes one: start a run for each, with its own "
        f"trainer.experiment_name; a list is written {key}=[A,B], a text with a comma {key}='\"A,B\"'"
    )


def _problem_with(word: str) -> str | None:
    """What is no key, with what to write instead; hydra would only say that it is not in the struct."""
    key, equals, value = word.lstrip("+~-").partition("=")
    key = key.split("@")[0]
    if word.startswith("-"):
        key = key.replace("-", "_")
        return problem_with_key(key, value or None) if find_foreign(key) else f"unknown flag '{word}'\n{USAGE}"
    if word.startswith("~"):
        return f"'{word}' would remove a key, and each needs a value: leave the word out for the default"
    if not equals:
        return f"'{word}' is not of the form key=value\n{USAGE}"
    if key == "experiment":
        experiments = sorted(path.stem for path in (CONF_DIR / "experiment").glob("*.yaml"))
        known = f"no recipe '{value}' in conf/experiment: known are {', '.join(experiments)}"
        return None if value in (*experiments, "null") else known
    return problem_with_key(key, value)
