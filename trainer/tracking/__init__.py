"""Where metrics go: `metrics.jsonl` always, the chosen trackers beside it; none of them can
stop or delay a run.
"""

from trainer.tracking.facade import Tracking
from trainer.tracking.metrics_file import read_metrics

__all__ = ["Tracking", "read_metrics"]
