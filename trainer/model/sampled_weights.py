"""A digest of a model's weights from samples of its files: it takes seconds for any model size.

For each file it covers the name, the size, the last bytes and blocks at equal distances. A
different checkpoint of the same architecture changes the digest, even if only one of its files is
used. A change of a few values elsewhere does not change it. A sha256 of whole files would, but it
would read 140 GB on each machine.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from trainer.config import ConfigError

BLOCK_BYTES = 1 << 12
LEAST_BLOCKS = 1 << 10
"""A file of fewer blocks is read as a whole."""
MAX_DISTANCE_BYTES = 1 << 22
NUM_THREADS = 8
"""The threads wait for disk or network, not for a CPU."""


def digest_of_weights(files: Sequence[Path], *, progress: Callable[[], None] = lambda: None) -> str:
    """Return one sha256 of these files, in order. Call `progress` after each file. Raise
    `ConfigError` if a file cannot be read.
    """
    digest = hashlib.sha256()
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for path in files:
            try:
                with path.open("rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    distance = max(BLOCK_BYTES, min(size // LEAST_BLOCKS, MAX_DISTANCE_BYTES))
                    starts = [*range(0, size, distance), max(0, size - BLOCK_BYTES)]
                    digest.update(f"{path.name} {size}\n".encode())
                    for block in pool.map(partial(os.pread, file.fileno(), BLOCK_BYTES), starts):
                        digest.update(block)
            except OSError as error:
                raise ConfigError(f"weights cannot be read from '{path}': {error}") from error
            progress()
    return digest.hexdigest()
