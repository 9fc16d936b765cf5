"""What a run's offline files hold: wandb 0.31 reads them in its own service only, so this reads the format itself.

A `.wandb` file is a LevelDB log: a header of 7 bytes, which block 0 includes, then blocks of 32 KiB of fragments
(checksum, length, type); joined fragments are protobuf records. A file that a kill cut short ends with its last whole
record.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE_HEADER_BYTES = 7
BLOCK_BYTES = 32768
FRAGMENT = struct.Struct("<IHB")
FULL, LAST = 1, 4
"""Types of the fragment that ends a record."""


def offline_files(directory: Path, run_id: str) -> list[Path]:
    """Of a run, in order of their start."""
    return sorted(directory.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))


def history(path: Path) -> Iterator[dict[str, str]]:
    """The rows logged, with wandb's own `_step` and `_timestamp`, each value as JSON."""
    for record in read_records(path):
        if record.WhichOneof("record_type") == "history":
            yield {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}


def read_records(path: Path) -> Iterator[Any]:
    """Protobuf records (`wandb_internal_pb2.Record`)."""
    from wandb.proto import wandb_internal_pb2

    content, parts, place = path.read_bytes(), b"", FILE_HEADER_BYTES
    while place + FRAGMENT.size <= len(content):
        left_in_block = BLOCK_BYTES - place % BLOCK_BYTES
        if left_in_block < FRAGMENT.size:
            place += left_in_block
            continue
        _, num_bytes, kind = FRAGMENT.unpack_from(content, place)
        place += FRAGMENT.size
        if not kind or place + num_bytes > len(content):
            return
        parts += content[place : place + num_bytes]
        place += num_bytes
        if kind in (FULL, LAST):
            yield wandb_internal_pb2.Record.FromString(parts)  # type: ignore[attr-defined]
            parts = b""
