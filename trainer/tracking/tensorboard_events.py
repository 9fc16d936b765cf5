"""What TensorBoard's event files hold.

A file is a row of records (length, its checksum, protobuf `Event`, its checksum); one that a kill cut short ends with
its last whole record.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LENGTH = struct.Struct("<QI")
CHECKSUM_BYTES = 4


def last_steps(directory: Path) -> dict[str, int]:
    """{tag: its last step} over all files in order of their start; a restart in them takes back what it repeats."""
    from tensorboard.compat.proto.event_pb2 import SessionLog

    last: dict[str, int] = {}
    for path in sorted(directory.glob("*tfevents*")):
        for event in read_events(path):
            if event.session_log.status == SessionLog.START:
                last = {tag: min(step, event.step - 1) for tag, step in last.items()}
            for value in event.summary.value:
                last[value.tag] = max(event.step, last.get(value.tag, event.step))
    return last


def read_events(path: Path) -> Iterator[Any]:
    from tensorboard.compat.proto.event_pb2 import Event

    with path.open("rb") as file:
        while len(header := file.read(LENGTH.size)) == LENGTH.size:
            num_bytes, _ = LENGTH.unpack(header)
            content = file.read(num_bytes + CHECKSUM_BYTES)
            if len(content) < num_bytes + CHECKSUM_BYTES:
                return
            yield Event.FromString(content[:num_bytes])
