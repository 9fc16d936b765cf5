"""A copy of the checkpoints outside the machine.

They are uploaded in the background, and restored if the disk is lost.
"""

STATE = ".mirror.json"
"""A file in the run directory with the result of the last upload: the mirror's `url`, the `steps`
that are complete in it, and the last error (`failed`).
"""
