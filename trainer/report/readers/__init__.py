"""Readers of training logs: one `RunLog` from whatever a trainer wrote."""

from trainer.report.readers.detect import read_run
from trainer.report.run_log import UnreadableLogError

__all__ = ["UnreadableLogError", "read_run"]
