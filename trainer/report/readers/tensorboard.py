"""TensorBoard event files: all points of all scalars. TensorBoard's own loader ends at the
first wrong checksum.
"""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from trainer.report.readers.frame import CLOCK, Frame
from trainer.report.readers.parsing import as_step
from trainer.report.run_log import RunLog, UnreadableLogError

MAX_FILES = 10000
MAX_RECORD_BYTES = 2**28
_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\..*?(?:\.(\d+))?(?:\.v2)?$")


def event_dir(root: Path) -> tuple[Path, int] | None:
    """The directory with the newest event file in or below `root`, and how many others there
    are.
    """
    files = list(islice(root.rglob("*tfevents*"), MAX_FILES))
    if not files:
        return None
    newest = max(files, key=lambda path: (_age(path), str(path.parent)))
    return newest.parent, len({path.parent for path in files}) - 1


def read_tensorboard(path: Path) -> RunLog:
    """All event files of a directory (that of the newest one), or the directory of the file
    given.
    """
    directory, num_others = (path.parent, 0) if path.is_file() else (event_dir(path) or (path, 0))
    if find_spec("tensorboard") is None:
        raise UnreadableLogError("event files need tensorboard: pip install 'tensorboard>=2.18'")
    frame = Frame()
    for file in sorted(directory.glob("*tfevents*"), key=_age):
        _read_file(file, frame)
    run_dir = (
        directory.parent
        if directory.name == "tensorboard"
        else path
        if path.is_dir()
        else directory
    )
    others = (
        f"{num_others} other directories with event files are left out: name one of them to read it"
    )
    notes = ("TensorBoard keeps scalars as 32-bit floats", others)
    return frame.log(directory, "tensorboard", run_dir, notes=notes if num_others else notes[:1])


def _age(path: Path) -> tuple[int, int, str]:
    """Order of writing: the seconds in the name, then the writer's counter."""
    match = _NAME.match(path.name)
    return (
        (int(match[1][:18]), int((match[2] or "0")[:18]), path.name) if match else (0, 0, path.name)
    )


def _read_file(path: Path, frame: Frame) -> None:
    """A start takes back its step and what was written of later ones; TensorBoard itself reads
    the messages.
    """
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    has_begun = False
    for record in read_records(path):
        try:
            event = Event.FromString(record)
        except (DecodeError, TypeError):
            frame.num_unparsed += 1
            continue
        step, scalars = as_step(event.step), scalars_of(event)
        if step is None:
            frame.num_unparsed += 1
        elif event.session_log.status == SessionLog.START:
            frame.restart(step - 1, rewinds=True)
            has_begun = True
        elif scalars:
            if not has_begun and frame.num_rows:
                frame.restart()
            has_begun = True
            frame.add(step, {CLOCK: event.wall_time, **scalars})


def scalars_of(event: Any) -> dict[str, float]:
    """Of an `Event` what is a single number: no texts, histograms, images."""
    values = [value for value in event.summary.value if value.tag]
    return {value.tag: scalar for value in values if (scalar := _scalar(value)) is not None}


def _scalar(value: Any) -> float | None:
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


def read_records(path: Path) -> Iterator[bytes | None]:
    """The messages of an event file, each a protobuf `Event`; None at last for one that was cut
    short.

    A record is a length (8 bytes), its checksum (4), the message, its checksum (4). No checksum is
    proven: a damaged length ends the file, a damaged message is for who reads it.
    """
    with path.open("rb") as file:
        while head := file.read(12):
            length = int.from_bytes(head[:8], "little") if len(head) == 12 else MAX_RECORD_BYTES + 1
            record = file.read(length + 4) if length <= MAX_RECORD_BYTES else b""
            if len(record) < length + 4:
                yield None
                return
            yield record[:-4]
