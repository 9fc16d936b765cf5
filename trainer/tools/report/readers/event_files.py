"""Reads every point of every scalar from TensorBoard event files, with TensorBoard's own loader."""

from pathlib import Path

from trainer.tools.report.readers.store import Store
from trainer.tools.report.run_log import UnreadableLogError

PATTERN = "*tfevents*"
NOTE = "TensorBoard keeps scalars as 32-bit floats; a file is read up to its first damaged record"


def read_event_files(path: Path, store: Store) -> None:
    """Read all event files in the directory of `path`, oldest first.

    The names of event files begin with their creation time. The start of a session discards earlier
    points at its step and later steps.
    """
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError as error:
        cause = "event files need tensorboard: pip install 'tensorboard>=2.18'"
        raise UnreadableLogError(cause) from error
    store.facts |= {"source": "tensorboard", "notes": (NOTE,)}
    files = [file for file in sorted(path.parent.glob(PATTERN)) if file.is_file()]
    for event in (event for file in files for event in EventFileLoader(str(file)).Load()):
        if event.session_log.status == SessionLog.START:
            store.rewind(event.step - 1)
        arrays = {value.tag: make_ndarray(value.tensor) for value in event.summary.value}
        scalars = {
            tag: float(array.item())
            for tag, array in arrays.items()
            if array.size == 1 and array.dtype.kind in "iuf"
        }
        if scalars:
            store.add(event.step, scalars | {"ts": event.wall_time})
