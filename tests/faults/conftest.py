"""What the fault tests share with the unit tests, and a directory in memory for thousands of
tiny files.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit")]


@pytest.fixture
def memory_dir(tmp_path: Path) -> Iterator[Path]:
    """A new directory in memory where there is one; nothing here depends on the kind of disk."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        dir=shared if os.access(shared, os.W_OK) else tmp_path
    ) as name:
        yield Path(name)
