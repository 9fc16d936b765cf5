"""`python -m trainer [overrides]`: run one rank.

It composes the configuration, trains, and exits with the documented code. This module does not
import torch before the configuration is validated.
"""

import logging
import sys

from omegaconf import OmegaConf

from trainer.cli.__main__ import listing
from trainer.config import Config, ConfigError, parse_duration_s
from trainer.errors import EXIT_USAGE
from trainer.train.start.compose import CONF_DIR, USAGE, load_config, with_recipe


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print(f"{USAGE}\n\n{listing()}\n\n{(CONF_DIR / 'sft.yaml').read_text(encoding='utf-8')}")
        return 0
    try:
        words = [word for word in argv if word not in ("--cfg", "job")] if "--cfg" in argv else argv
        config = load_config(with_recipe(words))
    except ConfigError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return EXIT_USAGE
    if "--cfg" in argv:
        print(OmegaConf.to_yaml(OmegaConf.create(config.resolved)), end="")
        return 0
    return _run(config)


def _run(config: Config) -> int:
    from trainer.runtime import log, signals
    from trainer.runtime.environment import (
        call,
        grow_cuda_segments,
        let_waiting_threads_sleep,
        rank_and_size,
        uncollected,
    )
    from trainer.runtime.exit_codes import explain
    from trainer.runtime.heartbeat import Heartbeat
    from trainer.runtime.status import launcher_status

    grow_cuda_segments()
    let_waiting_threads_sleep()
    log.configure(rank_and_size()[0])
    logger = logging.getLogger("trainer")
    stop = signals.StopRequest(max_time_s=parse_duration_s(config.trainer.max_time))
    stop.install()
    signals.join_launcher()
    heartbeat = Heartbeat()
    heartbeat.enter("start", limit_s=config.trainer.dist_timeout_s)
    try:
        if config.trainer.checkpoint.mirror is not None and launcher_status() is None:
            raise ConfigError(
                f"trainer.checkpoint.mirror needs the launcher. Fix: start with "
                f"{call('train 1 …')}, or set it to null"
            )
        with uncollected():
            from trainer.train.start.main import run

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
