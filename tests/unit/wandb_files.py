"""Reads wandb's offline files: records in the log format of LevelDB, without checksums."""

import json
import struct

FILE_HEADER_BYTES = 7
BLOCK_BYTES = 32768
FRAGMENT = struct.Struct("<IHB")
FULL = 1
LAST = 4
"""Types of the fragment that ends a record."""


def files_of(run_dir):
    """In order of their start."""
    return sorted((run_dir / "wandb").glob("offline-run-*/*.wandb"))


def records(run_dir, kind):
    """The records of a kind in all files."""
    found = [record for path in files_of(run_dir) for record in _records_of(path)]
    return [getattr(record, kind) for record in found if record.WhichOneof("record_type") == kind]


def _records_of(path):
    """Protobuf records (`wandb_internal_pb2.Record`)."""
    from wandb.proto import wandb_internal_pb2

    content = path.read_bytes()
    parts = b""
    place = FILE_HEADER_BYTES
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
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


def history(run_dir):
    """The rows logged, with wandb's own `_step` and `_timestamp`."""
    return [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in row.item}
        for row in records(run_dir, "history")
    ]
