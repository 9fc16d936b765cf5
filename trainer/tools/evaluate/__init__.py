"""Runs exports in inference engines: `evaluate` scores their answers, `prove` checks their loss."""
