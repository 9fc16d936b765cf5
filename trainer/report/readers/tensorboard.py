"""TensorBoard event files, read without TensorBoard: TFRecords of Event messages, all points of all scalars.

A record is a length (8 bytes), its checksum (4), the message, its checksum (4). Checksums are not proven: a damaged
length ends the file, a damaged message is one unparsed record.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trainer.report.readers.aliases import canonical
from trainer.report.readers.checkpoints import find_checkpoints
from trainer.report.readers.frame import Frame
from trainer.report.readers.parsing import Faults, as_step
from trainer.report.run_log import RunLog

MAX_FILES = 10000
MAX_RECORD_BYTES = 2**28
_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\..*?(?:\.(\d+))?(?:\.v2)?$")
_TENSOR_FORMATS = {1: "<f", 2: "<d", 3: "<i", 9: "<q"}
"""DataType -> how its scalar lies in `tensor_content`: float, double, int32, int64."""
SESSION_START = 1

Field = tuple[int, int, int | bytes]
"""Number, wire type, and value: an int (varint or fixed width, raw) or the bytes of a string or message."""


@dataclass
class LoggedEvent:
    wall_time_s: float = 0.0
    step: int = 0
    is_start: bool = False
    """A writer began here and takes back this step and what was written of later ones."""
    scalars: dict[str, float] = field(default_factory=dict)


def is_event_file(path: Path) -> bool:
    return "tfevents" in path.name


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
    faults, frame = Faults(), Frame()
    files = sorted(directory.glob("*tfevents*"), key=_age)
    for file in files:
        _read_file(file, frame, faults)
    clock = frame.take("")
    resolved = frame.resolve(canonical)
    run_dir = directory.parent if directory.name == "tensorboard" else path if path.is_dir() else directory
    notes = ["TensorBoard keeps scalars as 32-bit floats"]
    if num_others:
        notes.append(f"{num_others} other directories with event files are left out: name one of them to read it")
    return RunLog(
        path=directory,
        source="tensorboard",
        series=resolved.series,
        num_rows=frame.num_rows,
        num_unparsed=faults.num_unparsed,
        checkpoints=find_checkpoints(run_dir),
        num_attempts=max(1, len({restart.row for restart in frame.restarts} | {0})),
        num_lost_steps=resolved.num_lost_steps,
        num_disordered_rows=resolved.num_disordered_rows,
        span_s=float(clock.max() - clock.min()) if len(clock) > 1 else None,
        notes=tuple(notes),
    )


def _age(path: Path) -> tuple[int, int, str]:
    """Order of writing: the seconds in the name, then the writer's counter."""
    match = _NAME.match(path.name)
    return (int(match[1][:18]), int((match[2] or "0")[:18]), path.name) if match else (0, 0, path.name)


def _read_file(path: Path, frame: Frame, faults: Faults) -> None:
    begun = False
    for record in _records(path, faults):
        try:
            event = parse_event(record)
        except (ValueError, IndexError, struct.error):
            faults.num_unparsed += 1
            continue
        if event.is_start:
            frame.restart(event.step - 1, rewinds=True)
            begun = True
        elif event.scalars:
            if not begun and frame.num_rows:
                frame.restart()
            begun = True
            frame.add(event.step, {"": event.wall_time_s, **event.scalars})


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
    """Raises `ValueError`, `IndexError` or `struct.error` for bytes that are no Event."""
    event = LoggedEvent()
    for number, wire_type, value in _fields(record):
        if number == 1 and wire_type == 1 and isinstance(value, int):
            event.wall_time_s = _double(value)
        elif number == 2 and isinstance(value, int):
            step = as_step(value)
            if step is None:
                raise ValueError(f"step {value}")
            event.step = step
        elif number == 5 and isinstance(value, bytes):
            event.scalars |= _summary(value)
        elif number == 7 and isinstance(value, bytes):
            event.is_start = any(n == 1 and v == SESSION_START for n, _, v in _fields(value))
    return event


def _summary(message: bytes) -> dict[str, float]:
    scalars = {}
    for number, _, value in _fields(message):
        if number != 1 or not isinstance(value, bytes):
            continue
        tag, scalar = "", None
        for inner, wire_type, content in _fields(value):
            if inner == 1 and isinstance(content, bytes):
                tag = content.decode()
            elif inner == 2 and wire_type == 5 and isinstance(content, int):
                scalar = _float(content)
            elif inner == 8 and isinstance(content, bytes):
                scalar = _tensor_scalar(content)
        if tag and scalar is not None:
            scalars[tag] = scalar
    return scalars


def _tensor_scalar(message: bytes) -> float | None:
    """The one value of a TensorProto, None for other shapes and types (texts, histograms)."""
    dtype, values = 0, []
    for number, wire_type, value in _fields(message):
        if number == 1 and isinstance(value, int):
            dtype = value
        elif number == 4 and isinstance(value, bytes) and value:
            form = _TENSOR_FORMATS.get(dtype)
            values += [float(item) for (item,) in struct.iter_unpack(form, value)] if form else [0.0, 0.0]
        elif number == 5:
            values += _floats(value, wire_type, "<f")
        elif number == 6:
            values += _floats(value, wire_type, "<d")
        elif number in (7, 10):
            ints = _varints(value) if isinstance(value, bytes) else [value]
            values += [float(item - 2**64 if item >= 2**63 else item) for item in ints]
    return values[0] if len(values) == 1 else None


def _floats(value: int | bytes, wire_type: int, form: str) -> list[float]:
    if isinstance(value, bytes):
        return [item for (item,) in struct.iter_unpack(form, value)]
    return [_float(value) if wire_type == 5 else _double(value)]


def _float(raw: int) -> float:
    return float(struct.unpack("<f", raw.to_bytes(4, "little"))[0])


def _double(raw: int) -> float:
    return float(struct.unpack("<d", raw.to_bytes(8, "little"))[0])


def _fields(message: bytes) -> Iterator[Field]:
    """The fields of a protobuf message."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, place = _varint(message, place)
            yield number, wire_type, value
            continue
        if wire_type == 2:
            size, place = _varint(message, place)
        elif wire_type in (1, 5):
            size = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"wire type {wire_type}")
        content = message[place : place + size]
        if len(content) < size:
            raise ValueError("cut short")
        place += size
        yield number, wire_type, content if wire_type == 2 else int.from_bytes(content, "little")


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
        if shift > 63:
            raise ValueError("varint of more than ten bytes")


def _varints(message: bytes) -> list[int]:
    values, place = [], 0
    while place < len(message):
        value, place = _varint(message, place)
        values.append(value)
    return values
