"""TensorBoard event files in `run_dir/tensorboard`, and what such files hold."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer import metrics
from trainer.tracking.backend import Backend, Held
from trainer.tracking.metrics_file import MetricsRow
from trainer.tracking.run_info import RunInfo

MAX_RECORD_BYTES = 2**28


def where(info: RunInfo) -> str:
    return f"tensorboard --logdir={info.run_dir}/tensorboard --port=6006"


Layout = dict[str, dict[str, list[str | list[str]]]]


def layout() -> Layout:
    """Of the tab "Custom Scalars", from the table of metrics: its groups, training and validation in one chart."""
    return {
        group: {title: ["Multiline", [f"^{re.escape(key)}$" for key in keys]] for title, keys in charts.items()}
        for group, charts in metrics.charts().items()
    }


class TensorboardBackend(Backend):
    """A later attempt, and a rollback, purge the steps they repeat, so that each step is drawn once."""

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._directory = info.run_dir / "tensorboard"
        self._writer: Any = None
        self._held = Held({})

    def open(self) -> None:
        self._held = Held(last_steps(self._directory))
        self.rewind(self._info.resume_step)
        self._writer.add_custom_scalars(layout())
        for row in self._info.earlier_rows():
            self._write(row)

    def log(self, row: MetricsRow) -> None:
        self._write(row)
        # A killed attempt must not lose steps before its checkpoint.
        self._writer.flush()

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, str | float]]) -> None:
        """As text, in a table of Markdown."""
        lines = [[*rows[0]], ["---"] * len(rows[0]), *([str(value) for value in row.values()] for row in rows)]
        cells = ([cell.replace("|", "\\|").replace("\n", "<br>") for cell in line] for line in lines)
        self._writer.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in cells), step)
        self._writer.flush()

    def rewind(self, step: int) -> None:
        """A file of its own, whose first entry takes back the later steps of those before it."""
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is not None:
            self._writer.close()
        self._held.rewind(step)
        self._writer = SummaryWriter(str(self._directory), purge_step=step + 1)

    def close(self, exit_code: int) -> None:
        self._writer.close()

    def _write(self, row: MetricsRow) -> None:
        for key, value in self._held.missing(row).items():
            self._writer.add_scalar(key, value, row.step, walltime=row.ts)


def last_steps(directory: Path) -> dict[str, int]:
    """{tag: its last step} over all files in order of their start; a restart in them takes back what it repeats."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    last: dict[str, int] = {}
    for path in sorted(directory.glob("*tfevents*")):
        for event in (Event.FromString(record) for record in read_records(path) if record is not None):
            if event.session_log.status == SessionLog.START:
                last = {tag: min(step, event.step - 1) for tag, step in last.items()}
            for value in event.summary.value:
                last[value.tag] = max(event.step, last.get(value.tag, event.step))
    return last


def read_records(path: Path) -> Iterator[bytes | None]:
    """The messages of an event file, each a protobuf `Event`; None at last for one that was cut short.

    A record is a length (8 bytes), its checksum (4), the message, its checksum (4). No checksum is proven: a damaged
    length ends the file, a damaged message is for who reads it.
    """
    with path.open("rb") as file:
        while head := file.read(12):
            length = int.from_bytes(head[:8], "little") if len(head) == 12 else MAX_RECORD_BYTES + 1
            record = file.read(length + 4) if length <= MAX_RECORD_BYTES else b""
            if len(record) < length + 4:
                yield None
                return
            yield record[:-4]
