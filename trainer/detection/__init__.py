"""What is abnormal in a training (floor 1), step by step, for the guard. No torch."""

from trainer.detection.anomaly import Anomaly, Level
from trainer.detection.detector import Detector
from trainer.detection.rules import RuleError, UserRule, parse_rule
from trainer.detection.steps import Limits

__all__ = ["Anomaly", "Detector", "Level", "Limits", "RuleError", "UserRule", "parse_rule"]
