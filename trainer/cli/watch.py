"""How a run stands: step, loss, time left, alerts, validation, checkpoints, silent ranks (floor 5, no torch).

On a terminal it looks again every few seconds until it is interrupted; otherwise, and with --once, it prints once.
Exit codes: 0, 2 wrong usage.
"""

import sys
import time
from contextlib import suppress
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live

from trainer.checkpoint_tools.listing import require_dir
from trainer.cli.arguments import Parser, as_command
from trainer.cli.report_options import CODES
from trainer.config import ConfigError
from trainer.errors import EXIT_DONE
from trainer.watch.screen import NUM_ROWS, RunStatus, lines

REFRESH_S = 3.0


@as_command(CODES)
def main(argv: list[str]) -> int:
    parser = Parser("watch")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    parser.add_argument("--once", action="store_true", help="print once, also on a terminal")
    parser.add_argument("--rows", action="store_true", help=f"also print the last {NUM_ROWS} rows")
    arguments = parser.parse_args(argv)
    require_dir(arguments.run_dir)
    status, console = RunStatus(arguments.run_dir), Console()
    status.read()
    if not status.rows and not status.alerts and status.checkpoints() is None:
        raise ConfigError(f"'{arguments.run_dir}' is no run directory, or its first step is still to come")
    if arguments.once or not console.is_terminal:
        console.print(*lines(status, has_rows=arguments.rows), sep="\n", highlight=False, markup=False, soft_wrap=True)
        return EXIT_DONE
    with Live(console=console, auto_refresh=False) as live, suppress(KeyboardInterrupt):
        while True:
            live.update(Group(*lines(status, has_rows=arguments.rows)), refresh=True)
            time.sleep(REFRESH_S)
            status.read()
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
