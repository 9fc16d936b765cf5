"""Detects abnormal training steps for the guard while a run trains. Imports no torch."""

from trainer.train.detection.detector import Anomaly, Detector, Level, StepLimits
from trainer.train.detection.rules import require_usable_rules

__all__ = ["Anomaly", "Detector", "Level", "StepLimits", "require_usable_rules"]
