"""Turn the overrides of a command line into a checked configuration: defaults, recipe, overrides.
Imports no torch.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config import Config, ConfigError, did_you_mean, parse_config, problem_with_key
from trainer.model.losses import LOSSES
from trainer.optim import OPTIMIZERS
from trainer.optim.schedule import DECAYS
from trainer.runtime.environment import call
from trainer.runtime.files import read_regular
from trainer.runtime.json_lines import flat
from trainer.tracking.facade import BACKENDS

CONF_DIR = Path(__file__).resolve().parents[2] / "conf"
"""`trainer/conf`, a link to the top-level `conf/`; in an installed package the files themselves."""
LOCAL_RECIPE = "sft.local.yaml"
RECIPE_BYTES = 2**20
MAX_RECIPE_DEPTH = 64
MAX_RECIPE_VALUES = 10_000
PARTS: dict[str, Mapping[str, object]] = {
    "model.loss": LOSSES,
    "optim.name": OPTIMIZERS,
    "optim.lr_scheduler": DECAYS,
    "trainer.logger": BACKENDS,
}
"""Keys whose values are names of parts: an entry in a dictionary is a value."""
USAGE = f"""usage: {call("train [N] [key=value ...]")}
  N                      ranks on this machine; default: the number of GPUs, else 2
  key=value              any key of conf/sft.yaml
  experiment=NAME        load conf/experiment/NAME.yaml, of the working directory or ours, over the defaults
  experiment=FILE.yaml   load that file over the defaults; without the word what SFT_EXPERIMENT names, else
                         sft.local.yaml of the working directory, if there is one
  --cfg job              print the resolved configuration and exit
  --help                 print this, the commands, and all keys with their defaults and meaning
several machines: NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, or one task per node under srun"""

SEE_HELP = f"; `{call('train --help')}` shows how to start a run"


def with_recipe(words: list[str], env: Mapping[str, str]) -> list[str]:
    """Return the words with the default recipe if none names one, and print its name on stderr."""
    if any(map(_is_recipe, words)):
        return words
    if recipe := env.get("SFT_EXPERIMENT"):
        note = f"{recipe} (SFT_EXPERIMENT)"
    elif Path(LOCAL_RECIPE).is_file():
        recipe, note = str(Path(LOCAL_RECIPE).absolute()), LOCAL_RECIPE
    else:
        return words
    print(f"note: recipe {note}", file=sys.stderr, flush=True)
    return [f"experiment={recipe}", *words]


def load_config(words: list[str]) -> Config:
    """Defaults, experiment and overrides as a checked `Config`. Raises `ConfigError` for what
    the user got wrong.
    """
    if problems := [problem for word in words if (problem := _problem_with(word))]:
        raise ConfigError("\n".join(problems))
    tree = OmegaConf.load(CONF_DIR / "sft.yaml")
    recipes = [find_recipe(word.partition("=")[2]) for word in words if _is_recipe(word)]
    if recipes and recipes[-1] is not None:
        tree = OmegaConf.merge(tree, _read_recipe(recipes[-1]))
    return _configure(tree, (word for word in words if not _is_recipe(word)))


def with_words(config: Config, words: Iterable[str]) -> Config:
    """Return the configuration with further `key=value`. Raises `ConfigError` as `load_config`."""
    return _configure(OmegaConf.create(config.resolved), words)


def _configure(tree: Any, words: Iterable[str]) -> Config:
    word = ""
    try:
        for word in words:
            # the keys are known: a name in data.apply_chat_template_kwargs is the user's own
            (override,) = OverridesParser.create().parse_overrides([word.lstrip("+")])
            key = override.key_or_group
            if override.is_sweep_override():
                raise ConfigError(
                    f"'{word}' has several values, and one run takes one: start a run for each, "
                    f"with its own trainer.experiment_name; a list is written {key}=[A,B], a text "
                    f"with a comma {key}='\"A,B\"'"
                )
            OmegaConf.update(tree, key, override.value(), merge=True, force_add=True)
        word = "the configuration"
        resolved: Any = OmegaConf.to_container(tree, resolve=True)
    except OverrideParseException as error:
        raise ConfigError(f"cannot read '{word}': quote its value, key='\"value\"'") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{word}: {str(error).splitlines()[0]}") from error
    return parse_config(resolved, PARTS)


def as_word(value: Any) -> str:
    """A value as an override is written."""
    if isinstance(value, str):
        # a quote, and backslashes before a quote or the end, are escaped by backslashes
        escaped = re.sub(r"(\\*)'", r"\1\1\\'", value)
        escaped = re.sub(r"(\\+)\Z", r"\1\1", escaped)
        return f"'{escaped}'"
    if isinstance(value, list):
        return f"[{','.join(map(as_word, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{as_word(item)}" for name, item in value.items()) + "}"
    return json.dumps(value)


def _is_recipe(word: str) -> bool:
    return word.lstrip("+").startswith("experiment=")


def find_recipe(name: str) -> Path | None:
    """Return the file that `experiment=name` means; None for null. Raises `ConfigError` where there
    is none.
    """
    if name in ("", "null"):
        return None
    if name.endswith((".yaml", ".yml")):
        path = Path(name).expanduser()
        if not path.is_file():
            raise ConfigError(
                f"experiment={name}: there is no such file (current directory: {Path.cwd()})"
            )
        return path
    places = Path("conf", "experiment"), CONF_DIR / "experiment"
    for place in places:
        if (path := place / f"{name}.yaml").is_file():
            return path
    known = sorted({path.stem for place in places for path in place.glob("*.yaml")})
    hint = did_you_mean(name, known)
    raise ConfigError(
        f"no recipe '{name}' in conf/experiment: {hint and f'{hint} '}known are "
        f"{', '.join(known)}; or give a file, experiment=path/to/it.yaml"
    )


def _read_recipe(path: Path) -> DictConfig:
    """Raises `ConfigError` for a file that is no YAML, an unknown key, and a value that would be
    read from the environment.
    """
    try:
        text = read_regular(path, limit_bytes=RECIPE_BYTES).decode()
        _require_small(path, text)
        tree = OmegaConf.create(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        fix = "; indent with spaces, not tabs" if "'\\t'" in str(error.problem) else ""
        raise ConfigError(f"recipe {path}, line {line}: {error.problem}{fix}") from error
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"recipe {path}: {error}") from error
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"recipe {path} holds no keys: write it as those in conf/experiment")
    values: Any = OmegaConf.to_container(tree)
    _require_no_environment(path, values)
    keys = flat(values)
    if problems := [problem for key in keys if (problem := problem_with_key(key))]:
        raise ConfigError("\n".join(f"recipe {path}: {problem}" for problem in problems))
    return tree


def _require_small(path: Path, text: str) -> None:
    """Refuse a recipe that is deep, has many values, or would grow without bound when it is loaded:
    aliases can repeat aliases.

    The parser's events are counted before anything is built. Raises `ConfigError`,
    `yaml.YAMLError`.
    """
    depth = num_values = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        place = f"recipe {path}, line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(
                f"{place}: '*{event.anchor}' is a YAML alias, and recipes have none. Fix: write the "
                f"value out, or refer to its key as ${{group.key}}"
            )
        if isinstance(event, yaml.NodeEvent):
            num_values += 1
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_RECIPE_DEPTH:
            raise ConfigError(f"{place}: more than {MAX_RECIPE_DEPTH} levels of nesting")
        if num_values > MAX_RECIPE_VALUES:
            raise ConfigError(f"{place}: more than {MAX_RECIPE_VALUES} values")


def _require_no_environment(path: Path, value: Any, key: str = "") -> None:
    """Refuse interpolations of the environment: the run would log the values that somebody else's
    recipe reads there.

    A resolver's name that contains an interpolation could become any name. Raises `ConfigError`.
    """
    if isinstance(value, dict):
        for name, item in value.items():
            _require_no_environment(path, item, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for item in value:
            _require_no_environment(path, item, key)
    elif isinstance(value, str) and any(
        name == "oc.env" or "$" in name for name in _resolvers_in(value)
    ):
        raise ConfigError(
            f"recipe {path}: {key}: {value!r:.200} reads the environment, and its value would be "
            f"logged with the configuration. Fix: remove it from the recipe; to use it, pass "
            f"{key}=… on the command line"
        )


def _resolvers_in(text: str) -> Iterator[str]:
    """Yield the names of the resolvers that a text calls, such as `oc.env` in `${oc.env:HOME}`."""
    for found in re.finditer(r"\$\{", text):
        depth = 0
        for position in range(found.end(), len(text)):
            if text[position] == "{":
                depth += 1
            elif text[position] == "}":
                depth -= 1
            if depth < 0:
                break
            if text[position] == ":" and depth == 0:
                yield text[found.end() : position].strip()
                break


def _problem_with(word: str) -> str | None:
    """Say what is wrong with an override that names no key."""
    written = word.encode(errors="backslashreplace").decode()
    if written != word:  # Python reads bytes that are not UTF-8 as lone surrogates
        return (
            f"'{written}' is not valid UTF-8, and torch and safetensors accept no such path. "
            f"Fix: rename the directory or file, or choose another one"
        )
    if word.startswith("-"):
        name = word.lstrip("-").partition("=")[0]
        fix = "; write experiment=NAME" if name == "experiment" else SEE_HELP
        return f"unknown flag '{word}'{fix}"
    key, equals, _ = word.lstrip("+").partition("=")
    if not equals or word.startswith("~"):
        return f"'{word}' is not of the form key=value{SEE_HELP}"
    return None if key == "experiment" else problem_with_key(key)
