"""Find abnormal steps of a training, online, for the guard (floor 1). No torch."""

from trainer.detection.anomaly import Anomaly, Level
from trainer.detection.detector import Detector
from trainer.detection.rules import require_usable_rules, skip_limits
from trainer.detection.steps import StepLimits

__all__ = ["Anomaly", "Detector", "Level", "StepLimits", "require_usable_rules", "skip_limits"]
