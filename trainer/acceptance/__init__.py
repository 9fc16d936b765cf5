NUM_ROUNDINGS = 4
"""So far may be what is computed from what rounding alone changes: of a kernel, and of a run in bfloat16."""
