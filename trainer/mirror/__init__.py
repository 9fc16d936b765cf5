"""Checkpoints beyond the machine: uploaded behind training, taken back where a disk was lost."""

STATE = ".mirror.json"
"""In the run directory, for those who look: `url`, `pointer` of the run as it was brought up,
`steps` whole there, `failed`: why the last try did.
"""
