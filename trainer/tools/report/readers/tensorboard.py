"""TensorBoard event files: all points of all scalars, by TensorBoard's own loader."""

import re
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from trainer.tools.report.readers.store import Store
from trainer.tools.report.run_log import RunLog, UnreadableLogError

MAX_FILES = 10_000
PATTERN = "*tfevents*"
NOTE = "TensorBoard keeps scalars as 32-bit floats; a file is read up to its first damaged record"


def read_tensorboard(path: Path) -> RunLog:
    """Read the event files of the directory of `path`, or of the newest file below it."""
    if find_spec("tensorboard") is None:
        raise UnreadableLogError("event files need tensorboard: pip install 'tensorboard>=2.18'")
    files = [path] if path.is_file() else event_files(path)
    if not files:
        raise UnreadableLogError(f"{path} has no event files")
    directory = max(files, key=_age).parent
    store = Store()
    for file in sorted(directory.glob(PATTERN), key=_age):
        _add_file(file, store)
    run_dir = directory.parent if directory.name == "tensorboard" else directory
    notes = [NOTE]
    if num_others := len({file.parent for file in files}) - 1:
        notes.append(f"{num_others} other directories with event files are left out: name one")
    return store.log(directory, "tensorboard", run_dir, notes=tuple(notes))


def event_files(root: Path) -> list[Path]:
    """Return the event files in or below a directory."""
    return list(islice(root.rglob(PATTERN), MAX_FILES))


def _age(path: Path) -> list[int]:
    """Order files by the second of their creation and the writer's counter, both in the name."""
    return [int(number[:18]) for number in re.findall(r"\d+", path.name)]


def _add_file(path: Path, store: Store) -> None:
    """Add the events of a file; a start takes back its step and later ones."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.compat.proto.event_pb2 import SessionLog
    from tensorboard.util.tensor_util import make_ndarray

    for event in EventFileLoader(str(path)).Load():
        if event.session_log.status == SessionLog.START:
            store.rewind(event.step - 1)
        row = {"ts": event.wall_time}
        for value in event.summary.value:
            array = make_ndarray(value.tensor)
            if array.size == 1 and array.dtype.kind in "iuf":
                row[value.tag] = float(array.item())
        if len(row) > 1:
            store.add(event.step, row)
