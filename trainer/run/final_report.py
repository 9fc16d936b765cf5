"""The report that a run leaves in its directory when it has ended."""

import logging
from pathlib import Path

from trainer.runtime.atomic_files import atomic_write

logger = logging.getLogger(__name__)
FILE = "report.html"


def write_final_report(run_dir: Path) -> None:
    """Write `report.html` and say its verdict. Whatever goes wrong here is only logged: the run is over and saved."""
    try:
        from trainer.report.analyse import analyse
        from trainer.report.page import as_page
        from trainer.report.readers import read_run

        log = read_run(run_dir)
        report = analyse(log)
        atomic_write(run_dir / FILE, as_page([(report, log)]))
    except Exception as error:  # a fault of the report must not look like one of the training
        logger.warning("no report: %s: %s; see python -m trainer.cli.report %s", type(error).__name__, error, run_dir)
        return
    logger.info("report: %s %s (%s)", report.verdict, report.headline, run_dir / FILE)
