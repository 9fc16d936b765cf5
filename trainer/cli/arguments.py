"""What the command line tools share (floor 5)."""

import argparse
import signal
from typing import NoReturn

from trainer.config import ConfigError

EXIT_INTERRUPTED = 128 + signal.SIGINT


class Parser(argparse.ArgumentParser):
    """Raises `ConfigError` with the usage where argparse would end the process, so that one place reports errors."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}\n{self.format_usage().rstrip()}")
