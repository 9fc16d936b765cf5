"""Checkpoints beyond the machine: uploaded in the background, restored where a disk was lost."""

STATE = ".mirror.json"
"""A file in the run directory that says how the last upload left the mirror: `url`, `pointer`,
`steps` that are whole there, and `failed`, the last error.
"""
