"""Checks of a machine and of what was trained on it: `doctor`, `doctor --run`, `prove`."""
