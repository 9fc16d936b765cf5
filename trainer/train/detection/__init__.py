"""Find abnormal steps of a training, online, for the guard. No torch."""

from trainer.train.detection.anomaly import Anomaly, Level
from trainer.train.detection.detector import Detector
from trainer.train.detection.rules import require_usable_rules, skip_limits
from trainer.train.detection.steps import StepLimits

__all__ = ["Anomaly", "Detector", "Level", "StepLimits", "require_usable_rules", "skip_limits"]
