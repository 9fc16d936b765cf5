"""Checkpoints beyond the machine: uploaded in the background, restored where a disk was lost."""

STATE = ".mirror.json"
"""A file in the run directory with the result of the last upload: `url`, `steps` that are whole in
the mirror, and `failed`, the last error.
"""
