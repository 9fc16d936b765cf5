"""A copy of the checkpoints outside the machine.

Checkpoints are uploaded in the background, and restored if the disk is lost.
"""

STATE = ".mirror.json"
"""A file in the run directory with the result of the last upload: the mirror's `url`, the `steps`
that are complete there, a digest of the uploaded `results`, the last error (`failed`), and the `id`
of the run in the mirror.
"""
