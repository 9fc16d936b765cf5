"""Compose and check the configuration from defaults, recipe and command-line overrides.

Imports no torch.
"""

import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config import Config, ConfigError, assign, default_tree, did_you_mean, to_config
from trainer.model.losses import LOSSES
from trainer.optim import OPTIMIZERS
from trainer.optim.schedule import DECAYS
from trainer.runtime.environment import call
from trainer.runtime.files import read_regular
from trainer.tracking.facade import BACKENDS

CONF_DIR = Path(__file__).resolve().parents[2] / "conf"
"""`trainer/conf`: a link to the top-level `conf/`, or, in an installed package, the files."""
LOCAL_RECIPE = "sft.local.yaml"
RECIPE_BYTES = 2**16
MAX_RECIPE_DEPTH = 64
IMPLEMENTATIONS: dict[str, Mapping[str, object]] = {
    "model.loss": LOSSES,
    "optim.name": OPTIMIZERS,
    "optim.lr_scheduler": DECAYS,
    "trainer.logger": BACKENDS,
}
"""Keys whose values are names in a dictionary of implementations."""
NAME_OR_NUMBER = r"[+-]?\d[\d.]*_[\d._]*|0\d+|\d+(?::\d+)+"
"""Text that may be a name but that hydra or YAML would read as a number: 1_0 as 10, 010 as 8, 1:30
as 90. It stays text, and numeric keys convert it.
"""
HOME_PATH = r"""~/[^\s,\[\]{}'"=]*"""
"""Hydra refuses `~`, and the shell does not replace it after `key=`."""
UNQUOTED = re.compile(
    r"""('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")"""
    rf"""|(^[\w.]+=|[\[,]\s*|[{{,]\s*\w+:\s*)({NAME_OR_NUMBER}|{HOME_PATH})(?=\s*(?:[,\]}}]|$))"""
)
"""In an override: quoted text (1), or such a name (3) and what is before it (2)."""
USAGE = f"""usage: {call("train [N] [key=value ...]")}
  N                      ranks on this machine; default: the number of GPUs, else 2
  key=value              any key of conf/sft.yaml
  experiment=NAME        load conf/experiment/NAME.yaml over the defaults, from the working directory or the package
  experiment=FILE.yaml   load that file over the defaults; without this argument the recipe that SFT_EXPERIMENT
                         names, else sft.local.yaml of the working directory, if there is one
  --cfg job              print the resolved configuration and exit
  --help                 print this, the commands, and all keys with their defaults and meaning
several machines: NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, or one task per node under srun"""

SEE_HELP = f"; `{call('train --help')}` shows how to start a run"


def with_recipe(words: list[str]) -> list[str]:
    """Return the overrides, plus the default recipe if they name no recipe.

    The default recipe is the one that `SFT_EXPERIMENT` names, else `sft.local.yaml` if that file
    exists. Its name is printed on stderr.
    """
    if any(map(_is_recipe, words)):
        return words
    if recipe := os.environ.get("SFT_EXPERIMENT"):
        note = f"{recipe} (SFT_EXPERIMENT)"
    elif Path(LOCAL_RECIPE).is_file():
        recipe = note = LOCAL_RECIPE
    else:
        return words
    print(f"note: recipe {note}", file=sys.stderr, flush=True)
    return [f"experiment={recipe}", *words]


def load_config(words: list[str]) -> Config:
    """Merge defaults, recipe and overrides, check them, and return them as a `Config`.

    Raises a `ConfigError` that names every wrong override.
    """
    tree = default_tree()
    recipes = [find_recipe(word.partition("=")[2]) for word in words if _is_recipe(word)]
    if len(recipes) > 1:
        raise ConfigError(
            f"{len(recipes)} recipes are given ({', '.join(filter(_is_recipe, words))}), but a run "
            f"reads only one.\nFix: remove all but one, or merge them into one file"
        )
    if recipes and recipes[0] is not None:
        path = recipes[0]
        if problems := assign(tree, _read_recipe(path)):
            raise ConfigError("\n".join(f"recipe {path}: {problem}" for problem in problems))
    return _with_overrides(tree, [word for word in words if not _is_recipe(word)])


def with_words(config: Config, words: Iterable[str]) -> Config:
    """Return the configuration with further overrides. Raises `ConfigError` like `load_config`."""
    tree = default_tree()
    assign(tree, config.resolved)
    return _with_overrides(tree, words)


def _with_overrides(tree: DictConfig, words: Iterable[str]) -> Config:
    problems = []
    for word in words:
        try:
            problems += assign(tree, _parse_override(word))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return to_config(tree, IMPLEMENTATIONS)


def _parse_override(word: str) -> dict[str, Any]:
    """Return `a.b=value` as {a: {b: value}}. Raises `ConfigError` if `word` is not an override."""
    written = word.encode(errors="backslashreplace").decode()
    if written != word:  # Python reads bytes that are not UTF-8 as lone surrogates
        raise ConfigError(
            f"'{written}' is not valid UTF-8, but torch and safetensors need valid UTF-8. "
            f"Fix: rename the directory or file, or choose a different one"
        )
    if "=" not in word or word.startswith(("-", "~")):
        raise ConfigError(f"'{word}' is not of the form key=value{SEE_HELP}")
    quoted = UNQUOTED.sub(lambda found: found[1] or f"{found[2]}'{found[3]}'", word.lstrip("+"))
    try:
        (override,) = OverridesParser.create().parse_overrides([quoted])
    except OverrideParseException as error:
        raise ConfigError(f"cannot read '{word}'. Fix: quote its value, key='\"value\"'") from error
    except HydraException as error:
        raise ConfigError(f"{word}: {str(error).splitlines()[0]}") from error
    key = override.key_or_group
    if override.is_sweep_override():
        raise ConfigError(
            f"'{word}' has several values, but a run needs one.\nFix: write a list as "
            f"{key}=[A,B] and a string with a comma as {key}='\"A,B\"', or start one run for each "
            f"value, with different values of trainer.experiment_name"
        )
    value: Any = override.value()
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def as_word(text: str) -> str:
    """Return a string in the form in which an override must contain it."""
    return QuotedString(text, Quote.single).with_quotes()


def _is_recipe(word: str) -> bool:
    return word.lstrip("+").startswith("experiment=")


def find_recipe(name: str) -> Path | None:
    """Return the recipe file that `experiment=name` names; None for an empty name or null.

    Raises `ConfigError` if the file does not exist.
    """
    if name in ("", "null"):
        return None
    if name.endswith((".yaml", ".yml")):
        # Path.expanduser raises an error for an unknown user
        path = Path(os.path.expanduser(name))
        if path.is_file():
            return path
        raise ConfigError(
            f"experiment={name}: there is no such file (current directory: {Path.cwd()}).\n"
            f"Fix: give the path of an existing recipe"
        )
    places = Path("conf", "experiment"), CONF_DIR / "experiment"
    for place in places:
        if (path := place / f"{name}.yaml").is_file():
            return path
    known = sorted({path.stem for place in places for path in place.glob("*.yaml")})
    raise ConfigError(
        f"no recipe '{name}' in conf/experiment: {did_you_mean(name, known)}\n"
        f"Fix: choose one of {', '.join(known)}, or give a file, experiment=path/to/it.yaml"
    )


def _read_recipe(path: Path) -> dict[str, Any]:
    """Return the keys and values of a recipe.

    Raises `ConfigError` for a file that is not a recipe, and for a recipe that could read the
    environment.
    """
    try:
        text = read_regular(path, limit_bytes=RECIPE_BYTES).decode()
        tree = OmegaConf.create(_harmless(text))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"recipe {path}, line {line}: {error.problem}") from error
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"recipe {path}: {error}") from error
    if not isinstance(tree, DictConfig) or not tree:
        raise ConfigError(
            f"recipe {path} contains no keys.\nFix: write it like the examples in conf/experiment"
        )
    values: Any = OmegaConf.to_container(tree)
    return values


def _harmless(text: str) -> str:
    """Return a recipe in which text that may be a name is quoted (`NAME_OR_NUMBER`). Refuse a recipe
    that could exhaust the machine or reveal a secret.

    Aliases of aliases grow without bound, and the parser takes minutes for deep nesting.
    Interpolations other than `${group.key}` are refused, because a recipe from elsewhere could read
    a secret from the environment, and the run would log it with its configuration.

    The check looks at the parser's events before anything is built. Raises `ConfigError`,
    `yaml.YAMLError`.
    """
    depth = 0
    pieces = []
    copied = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        place = f"line {event.start_mark.line + 1}"
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(
                f"{place}: '*{event.anchor}' is a YAML alias, but recipes cannot contain aliases.\n"
                f"Fix: write the value out, or refer to its key as ${{group.key}}"
            )
        if depth > MAX_RECIPE_DEPTH:
            raise ConfigError(f"{place}: more than {MAX_RECIPE_DEPTH} levels of nesting")
        is_text = isinstance(event, yaml.ScalarEvent)
        if is_text and event.implicit[0] and re.fullmatch(NAME_OR_NUMBER, event.value):
            start = event.start_mark.index
            pieces.append(text[copied:start])
            pieces.append(f"'{event.value}'")
            copied = event.end_mark.index
        if is_text and "${" in re.sub(r"\$\{[\w.]+\}", "", event.value):
            raise ConfigError(
                f"{place}: {event.value!r:.200} is not a reference to a key (${{group.key}}). A run "
                f"would log values of the environment.\nFix: remove it from the recipe, and pass the "
                f"key on the command line"
            )
    return "".join([*pieces, text[copied:]])
