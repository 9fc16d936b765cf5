"""The words of a command line as a checked configuration: defaults, recipe, overrides. Imports
no torch.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config import Config, ConfigError, parse_config, problem_with_key
from trainer.losses import LOSSES
from trainer.optim import OPTIMIZERS
from trainer.optim.schedule import DECAYS
from trainer.runtime.environment import call
from trainer.runtime.files import read_regular
from trainer.tracking.facade import BACKENDS

CONF_DIR = Path(__file__).resolve().parents[1] / "conf"
"""`trainer/conf`, a link to the top-level `conf/`; in an installed package the files themselves."""
LOCAL_RECIPE = "sft.local.yaml"
RECIPE_BYTES = 2**20
MAX_RECIPE_DEPTH = 64
MAX_RECIPE_VALUES = 10_000
"""No recipe comes near; a file made to exhaust the memory does at once."""
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


def with_recipe(words: list[str], env: Mapping[str, str]) -> list[str]:
    """The words with the recipe that is meant where none names one, which is said in a line on
    stderr.
    """
    if any(map(_is_recipe, words)):
        return words
    asked = env.get("SFT_EXPERIMENT")
    if not asked and not Path(LOCAL_RECIPE).is_file():
        return words
    print(
        f"note: recipe {asked or LOCAL_RECIPE}{' (SFT_EXPERIMENT)' if asked else ''}",
        file=sys.stderr,
        flush=True,
    )
    return [f"experiment={asked or Path(LOCAL_RECIPE).absolute()}", *words]


def load_config(words: list[str]) -> Config:
    """Defaults, experiment and overrides as a checked `Config`. Raises `ConfigError` for what
    the user got wrong.
    """
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
        return (
            "'"
            + re.sub(
                r"(\\*)('|$)", lambda found: found[1] * 2 + found[2].replace("'", "\\'"), value
            )
            + "'"
        )
    if isinstance(value, list):
        return f"[{','.join(map(as_word, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{as_word(item)}" for name, item in value.items()) + "}"
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def _compose(words: list[str]) -> dict[str, Any]:
    names = [word.partition("=")[2] for word in words if _is_recipe(word)]
    # hydra need not know what is a key: a name inside data.apply_chat_template_kwargs is the user's
    # own
    words = [f"++{word.lstrip('+')}" for word in words if not _is_recipe(word)]
    with _where_hydra_finds(find_recipe(names[-1]) if names else None) as recipe_words:
        words = [*recipe_words, *words]
        try:
            for override in OverridesParser.create().parse_overrides(words):
                if override.is_sweep_override():
                    key, _, value = (override.input_line or "").lstrip("+").partition("=")
                    raise ConfigError(
                        f"'{key}={value}' has several values, and one run takes one: start a run "
                        f"for each, with its own trainer.experiment_name; a list is written "
                        f"{key}=[A,B], a text with a comma {key}='\"A,B\"'"
                    )
            with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
                tree: Any = OmegaConf.to_container(compose("sft", overrides=words), resolve=True)
        except OverrideParseException as error:
            raise ConfigError(
                f"cannot read '{error.override.lstrip('+')}': quote its value, key='\"value\"'"
            ) from error
        except (HydraException, OmegaConfBaseException) as error:
            lines = (line for line in str(error).splitlines() if line.strip())
            useful = [
                line for line in lines if "full_key" not in line and "object_type" not in line
            ]
            raise ConfigError("\n".join(useful[:6])) from error
    return dict(tree)


@contextmanager
def _where_hydra_finds(recipe: Path | None) -> Iterator[list[str]]:
    """The words for hydra to take a file from anywhere, beginning as it must, as a recipe."""
    if recipe is None:
        yield []
        return
    with TemporaryDirectory() as place:
        Path(place, "experiment").mkdir()
        Path(place, "experiment", "asked.yaml").write_text(
            f"# @package _global_\n{_read_recipe(recipe)}", encoding="utf-8"
        )
        yield [f"hydra.searchpath=[file://{place}]", "experiment=asked"]


def _is_recipe(word: str) -> bool:
    return word.lstrip("+").startswith("experiment=")


def find_recipe(name: str) -> Path | None:
    """The file that `experiment=name` means; None for null. Raises `ConfigError` where there is
    none.
    """
    if name in ("", "null"):
        return None
    if name.endswith((".yaml", ".yml")):
        path = Path(name).expanduser()
        if not path.is_file():
            raise ConfigError(f"experiment={name}: there is no such file")
        return path
    places = Path("conf", "experiment"), CONF_DIR / "experiment"
    if found := [place / f"{name}.yaml" for place in places if (place / f"{name}.yaml").is_file()]:
        return found[0]
    known = sorted({path.stem for place in places for path in place.glob("*.yaml")})
    raise ConfigError(
        f"no recipe '{name}' in conf/experiment: known are {', '.join(known)}; "
        f"or give a file, experiment=path/to/it.yaml"
    )


def _read_recipe(path: Path) -> str:
    """Raises `ConfigError` for what is no YAML and for what is no key, with its place."""
    try:
        text = read_regular(path, limit_bytes=RECIPE_BYTES).decode()
        _require_small(path, text)
        tree = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"recipe {path}: {error}") from error
    _require_no_environment(path, tree)
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError(f"recipe {path} holds no keys: write it as those in conf/experiment")
    words = as_words(
        {name: value for name, value in (tree or {}).items() if name not in ("defaults", "hydra")}
    )
    if problems := [
        problem for word in words if (problem := problem_with_key(word.partition("=")[0]))
    ]:
        raise ConfigError("\n".join(f"recipe {path}: {problem}" for problem in problems))
    return text


def _require_small(path: Path, text: str) -> None:
    """Refuse what grows without bound when it is loaded: aliases of aliases, deep nesting, an
    anchor inside itself.

    Counted from the parser's events, before anything is built. Raises `ConfigError`,
    `yaml.YAMLError`.
    """
    num_values: dict[str, int] = {}
    """Values under each anchor, those of aliases included."""
    open_collections: list[tuple[str | None, int]] = []
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.CollectionStartEvent):
            open_collections.append((event.anchor, 1))
            if len(open_collections) > MAX_RECIPE_DEPTH:
                raise ConfigError(
                    f"recipe {path}, line {line}: more than {MAX_RECIPE_DEPTH} levels of nesting"
                )
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, count = open_collections.pop()
        elif isinstance(event, yaml.ScalarEvent):
            anchor, count = event.anchor, 1
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in [anchor for anchor, _ in open_collections]:
                raise ConfigError(
                    f"recipe {path}, line {line}: '*{event.anchor}' holds itself; write its values "
                    f"out"
                )
            anchor, count = None, num_values.get(event.anchor, 1)
        else:
            continue
        if anchor is not None:
            num_values[anchor] = count
        if open_collections:
            around, count_around = open_collections[-1]
            count += count_around
            open_collections[-1] = (around, count)
        if count > MAX_RECIPE_VALUES:
            raise ConfigError(
                f"recipe {path}, line {line}: more than {MAX_RECIPE_VALUES} values, those of "
                f"aliases (*name) included"
            )


def _require_no_environment(path: Path, value: Any, key: str = "") -> None:
    """Refuse interpolations of the environment: what somebody else's recipe reads there would be
    logged.

    A resolver whose name is itself put together could be any. Raises `ConfigError`.
    """
    if isinstance(value, dict):
        for name, item in value.items():
            _require_no_environment(path, item, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for item in value:
            _require_no_environment(path, item, key)
    elif isinstance(value, str):
        for name in _resolvers_in(value):
            if name == "oc.env" or "$" in name:
                raise ConfigError(
                    f"recipe {path}: {key}: {value!r:.200} reads the environment, and its value "
                    f"would be logged with the configuration. Fix: remove it from the recipe; to "
                    f"use it, pass {key}=… on the command line"
                )


def _resolvers_in(text: str) -> Iterator[str]:
    """Names of the resolvers that are called in a text, as `oc.env` in `${oc.env:HOME}`."""
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
    """What is no key, with what to write instead; hydra would only say that it is not in the
    struct.
    """
    written = word.encode(errors="backslashreplace").decode()
    if written != word:  # Python reads bytes that are not UTF-8 as lone surrogates
        return (
            f"'{written}' is not valid UTF-8, and torch and safetensors accept no such path. "
            f"Fix: rename the directory or file, or choose another one"
        )
    key, equals, _ = word.lstrip("+~-").partition("=")
    key = key.split("@")[0]
    if word.startswith("-"):
        return f"unknown flag '{word}'\n{USAGE}"
    if word.startswith("~"):
        return f"'{word}' would remove a key, and each needs a value: leave the word out for the default"
    if not equals:
        return f"'{word}' is not of the form key=value\n{USAGE}"
    if key == "experiment":
        return None  # found or refused when it is read
    return problem_with_key(key)
