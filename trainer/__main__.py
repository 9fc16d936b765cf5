"""`python -m trainer [overrides]`: compose the configuration, run, leave with the documented exit code (floor 5).

Nothing here imports torch before the configuration is known to be right.
"""

import logging
import math
import sys
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.cli.__main__ import listing
from trainer.config import (
    Config,
    ConfigError,
    find_foreign,
    known_keys,
    own_words,
    parse_config,
    parse_duration_s,
    unknown_key_error,
)
from trainer.errors import EXIT_USAGE
from trainer.run.choices import require_known_parts

CONF_DIR = Path(__file__).resolve().parent.parent / "conf"
_FREE_KEY = "data.apply_chat_template_kwargs"
USAGE = """usage: python -m trainer [key=value ...]          (several ranks: bash run_sft.sh N [key=value ...])
  experiment=NAME        load conf/experiment/NAME.yaml over the defaults
  --cfg job              print the resolved configuration and exit
  --help                 print this, the tools, and all keys with their defaults and meaning"""


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print(f"{USAGE}\n\n{listing()}\n\n{(CONF_DIR / 'sft.yaml').read_text()}")
        return 0
    try:
        if "--cfg" in argv:
            overrides = [word for word in argv if word not in ("--cfg", "job")]
            print(OmegaConf.to_yaml(OmegaConf.create(load_config(overrides).resolved)), end="")
            return 0
        return _run(load_config(argv))
    except ConfigError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return EXIT_USAGE


def load_config(words: list[str]) -> Config:
    """Defaults, experiment and overrides as a checked `Config`. Raises `ConfigError` for what the user got wrong."""
    words = own_words(words)
    _check_keys(words)
    # a dictionary with keys of the user's choice: hydra wants to be told that these may be new
    words = [f"++{word}" if word.startswith(_FREE_KEY) else word for word in words]
    try:
        for override in OverridesParser.create().parse_overrides(words):
            if override.is_sweep_override():
                raise _several_values(override.input_line)
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            composed = compose("sft", overrides=words)
        tree: Any = OmegaConf.to_container(composed, resolve=True)
    except OverrideParseException as error:
        raise ConfigError(f"cannot read '{error.override}': quote its value, key='\"value\"'") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_plain(error)) from error
    config = parse_config(tree)
    require_known_parts(config)
    return config


def _several_values(word: str | None) -> ConfigError:
    key, _, value = (word or "").lstrip("+").partition("=")
    return ConfigError(
        f"'{key}={value}' has several values, and one run takes one: start a run for each, with its own "
        f"trainer.experiment_name; a list is written {key}=[A,B], a text with a comma {key}='\"A,B\"'"
    )


def _check_keys(words: list[str]) -> None:
    """Name what is no key, each with what to write instead; hydra would only say that it is not in the struct."""
    problems = [problem for word in words if (problem := _problem_with(word)) is not None]
    if problems:
        raise ConfigError("\n".join(problems))


def _problem_with(word: str) -> str | None:
    key, equals, value = word.lstrip("+~-").partition("=")
    key = key.split("@")[0]
    if word.startswith("-"):
        key = key.replace("-", "_")
        is_foreign = find_foreign(key) is not None
        return str(unknown_key_error(key, value or None)) if is_foreign else f"unknown flag '{word}'\n{USAGE}"
    if word.startswith("~"):
        return f"'{word}' would remove a key, and each needs a value: leave the word out for the default"
    if not equals:
        return f"'{word}' is not of the form key=value\n{USAGE}"
    if key == "experiment":
        experiments = sorted(path.stem for path in (CONF_DIR / "experiment").glob("*.yaml"))
        known = f"no recipe '{value}' in conf/experiment: known are {', '.join(experiments)}"
        return None if value in (*experiments, "null") else known
    groups = {own.rsplit(".", depth)[0] for own in known_keys() for depth in range(1, own.count(".") + 1)}
    is_known = key in known_keys() or key in groups or key.startswith(f"{_FREE_KEY}.")
    return None if is_known else str(unknown_key_error(key, value))


def _plain(error: Exception) -> str:
    """The lines of a hydra error a user can act on."""
    lines = [
        line
        for line in str(error).splitlines()
        if line.strip() and "full_key" not in line and "object_type" not in line
    ]
    return "\n".join(lines[:6])


def _run(config: Config) -> int:
    from trainer.runtime import log, signals
    from trainer.runtime.environment import grow_cuda_segments, let_waiting_threads_sleep, rank_and_size, uncollected
    from trainer.runtime.exit_codes import explain
    from trainer.runtime.heartbeat import Heartbeat

    grow_cuda_segments()
    let_waiting_threads_sleep()
    log.configure(rank_and_size()[0])
    logger = logging.getLogger("trainer")
    max_time = config.trainer.max_time
    stop = signals.StopRequest(max_time_s=parse_duration_s(max_time) if max_time else math.inf)
    stop.install()
    signals.join_launcher()
    heartbeat = Heartbeat()
    heartbeat.enter("start", limit_s=config.trainer.dist_timeout_s)
    try:
        with uncollected():
            from trainer.run.main import run

        return run(config, stop, heartbeat)
    except Exception as error:
        code, message = explain(error, stop)
    if signals.report_exit_code(code):
        logger.error("%s", message)
    return code


if __name__ == "__main__":
    from trainer.runtime.log import keep_streams_safe
    from trainer.runtime.signals import leave

    keep_streams_safe()
    leave(main(sys.argv[1:]))
