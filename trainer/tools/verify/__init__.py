"""Checks of a machine and of training on it: `doctor` and `doctor --run`."""
