"""A digest of a model's weights from samples of every tensor. It takes seconds for any model size.

For each file it covers the name, the size and the whole header: name, dtype, shape and place of
each tensor. Of the values it covers the first and the last bytes of every tensor and blocks in
between, at most `SAMPLED_EVERY_BYTES` apart. Any file of a different checkpoint changes the digest,
even for the same architecture. A change of a few values outside the samples does not. A sha256 of
whole files would detect it, but would read up to 140 GB on each machine.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainer.config import ConfigError

BLOCK_BYTES = 1 << 12
SAMPLED_EVERY_BYTES = 1 << 24
NUM_THREADS = 8
"""The threads mostly wait for disk or network."""
MAX_HEADER_BYTES = 100_000_000
"""The safetensors library has the same limit."""


def digest_of_weights(files: Sequence[Path], *, progress: Callable[[], None] = lambda: None) -> str:
    """Return one sha256 of these files, in order. Call `progress` after each file. Raise
    `ConfigError` if a file cannot be read.
    """
    digest = hashlib.sha256()
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for path in files:
            try:
                _add_file(digest, path, pool)
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                raise ConfigError(f"weights cannot be read from '{path}': {error}") from error
            progress()
    return digest.hexdigest()


def _add_file(digest: "hashlib._Hash", path: Path, pool: ThreadPoolExecutor) -> None:
    with path.open("rb") as file:
        descriptor = file.fileno()
        size = os.fstat(descriptor).st_size
        digest.update(f"{path.name} {size}\n".encode())
        header, spans = _header(descriptor, size)
        digest.update(header)
        blocks = [block for begin, end in spans for block in _blocks(begin, end)]
        for piece in pool.map(lambda block: os.pread(descriptor, *block), blocks):
            digest.update(piece)


def _header(descriptor: int, size: int) -> tuple[bytes, list[tuple[int, int]]]:
    """Return a safetensors file's header, and where each tensor begins and ends in the file.

    A broken header may raise any of several errors.
    """
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    header = os.pread(descriptor, min(length, size, MAX_HEADER_BYTES), 8)
    offsets = [
        entry["data_offsets"]
        for name, entry in json.loads(header).items()
        if name != "__metadata__"
    ]
    return header, [(8 + length + int(begin), 8 + length + int(end)) for begin, end in offsets]


def _blocks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield (size, start) of blocks spread evenly over a span, including its first and last bytes;
    at least three blocks if it is long enough.
    """
    if end - begin <= 3 * BLOCK_BYTES:
        yield end - begin, begin
        return
    last = end - BLOCK_BYTES
    num_steps = max(2, -(-(last - begin) // SAMPLED_EVERY_BYTES))
    for index in range(num_steps + 1):
        yield BLOCK_BYTES, begin + (last - begin) * index // num_steps
