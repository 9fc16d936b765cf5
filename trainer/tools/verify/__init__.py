"""Check a machine, and what was trained on it: `doctor` and `doctor --run`."""
