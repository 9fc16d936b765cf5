"""Check a machine and the training on it: `doctor` and `doctor --run`."""
