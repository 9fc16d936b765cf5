"""What torchrun tells a rank about itself (floor 1, no torch)."""

import os


def rank_and_size() -> tuple[int, int]:
    """(rank, number of ranks); without torchrun a run of one rank."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def local_rank() -> int:
    """Index of this rank on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0))
