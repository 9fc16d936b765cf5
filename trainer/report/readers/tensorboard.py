"""TensorBoard event files: all points of all scalars; TensorBoard reads the messages.

A record is a length (8 bytes), its checksum (4), the message, its checksum (4). TensorBoard's own loader ends at the
first wrong checksum. None is proven here: a damaged length ends the file, a damaged message is one unparsed record.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainer.report.readers.frame import CLOCK, Frame
from trainer.report.readers.parsing import Faults, as_step
from trainer.report.run_log import RunLog, UnreadableLogError

MAX_FILES = 10000
MAX_RECORD_BYTES = 2**28
_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\..*?(?:\.(\d+))?(?:\.v2)?$")


@dataclass(frozen=True)
class LoggedEvent:
    wall_time_s: float
    step: int
    is_start: bool
    """A writer began here and takes back this step and what was written of later ones."""
    scalars: dict[str, float] = field(default_factory=dict)


def event_dir(root: Path) -> tuple[Path, int] | None:
    """The directory with the newest event file in or below `root`, and how many others there are."""
    newest: dict[Path, tuple[int, int, str]] = {}
    for count, path in enumerate(root.rglob("*tfevents*")):
        if count == MAX_FILES:
            break
        newest[path.parent] = max(newest.get(path.parent, (0, 0, "")), _age(path))
    if not newest:
        return None
    return max(newest, key=lambda directory: (newest[directory], str(directory))), len(newest) - 1


def read_tensorboard(path: Path) -> RunLog:
    """All event files of a directory (that of the newest one), or the directory of the file given."""
    directory, num_others = (path.parent, 0) if path.is_file() else (event_dir(path) or (path, 0))
    if find_spec("tensorboard") is None:
        raise UnreadableLogError("event files need tensorboard: pip install 'tensorboard>=2.18'")
    frame = Frame()
    for file in sorted(directory.glob("*tfevents*"), key=_age):
        _read_file(file, frame)
    run_dir = directory.parent if directory.name == "tensorboard" else path if path.is_dir() else directory
    others = f"{num_others} other directories with event files are left out: name one of them to read it"
    notes = ("TensorBoard keeps scalars as 32-bit floats", others)
    return replace(frame.log(directory, "tensorboard", run_dir), notes=notes if num_others else notes[:1])


def _age(path: Path) -> tuple[int, int, str]:
    """Order of writing: the seconds in the name, then the writer's counter."""
    match = _NAME.match(path.name)
    return (int(match[1][:18]), int((match[2] or "0")[:18]), path.name) if match else (0, 0, path.name)


def _read_file(path: Path, frame: Frame) -> None:
    begun = False
    for record in _records(path, frame.faults):
        try:
            event = parse_event(record)
        except ValueError:
            frame.faults.num_unparsed += 1
            continue
        if event.is_start:
            frame.restart(event.step - 1, rewinds=True)
            begun = True
        elif event.scalars:
            if not begun and frame.num_rows:
                frame.restart()
            begun = True
            frame.add(event.step, {CLOCK: event.wall_time_s, **event.scalars})


def _records(path: Path, faults: Faults) -> Iterator[bytes]:
    with path.open("rb") as file:
        while head := file.read(12):
            length = struct.unpack("<Q", head[:8])[0] if len(head) == 12 else MAX_RECORD_BYTES + 1
            record = file.read(length + 4) if length <= MAX_RECORD_BYTES else b""
            if len(record) < length + 4:
                faults.num_unparsed += 1
                return
            yield record[:-4]


def parse_event(record: bytes) -> LoggedEvent:
    """Raises `ValueError` for bytes that are no Event."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    try:
        event = Event.FromString(record)
    except DecodeError as error:
        raise ValueError("no Event") from error
    step = as_step(event.step)
    if step is None:
        raise ValueError(f"step {event.step}")
    scalars = {value.tag: scalar for value in event.summary.value if (scalar := _scalar(value)) is not None}
    scalars.pop("", None)
    return LoggedEvent(event.wall_time, step, event.session_log.status == SessionLog.START, scalars)


def _scalar(value: Any) -> float | None:
    """None for what is no single number: texts, histograms, images."""
    if value.WhichOneof("value") == "simple_value":
        return float(value.simple_value)
    if not value.HasField("tensor"):
        return None
    from tensorboard.util.tensor_util import make_ndarray

    try:
        array = make_ndarray(value.tensor)
    except (TypeError, ValueError):  # of no known type, or of fewer values than its shape has
        return None
    return float(array.item()) if array.size == 1 and array.dtype.kind in "iuf" else None
