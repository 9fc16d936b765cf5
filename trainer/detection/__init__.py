"""What is abnormal in a training (floor 1), step by step, for the guard. No torch."""

from trainer.detection.detector import Detector, Settings
from trainer.detection.events import Event, Level
from trainer.detection.rules import Rule, RuleError, parse_rule
from trainer.detection.steps import Limits

__all__ = ["Detector", "Event", "Level", "Limits", "Rule", "RuleError", "Settings", "parse_rule"]
