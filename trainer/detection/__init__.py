"""What is abnormal in a training (floor 1), step by step, for the guard. No torch."""

from trainer.detection.anomaly import Level, StepAnomaly
from trainer.detection.detector import Detector
from trainer.detection.rules import require_usable_rules, skip_limits
from trainer.detection.steps import StepLimits

__all__ = ["Detector", "Level", "StepAnomaly", "StepLimits", "require_usable_rules", "skip_limits"]
