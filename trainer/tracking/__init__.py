"""Writes metrics to `metrics.jsonl` and sends them to the chosen trackers. No tracker can stop or
delay a run.
"""

from trainer.tracking.facade import Tracking
from trainer.tracking.metrics_file import read_metrics

__all__ = ["Tracking", "read_metrics"]
