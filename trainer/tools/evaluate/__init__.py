"""Exports in inference engines: `evaluate` scores their answers, `prove` their loss."""
