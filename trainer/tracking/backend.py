"""What a tracker offers, and what of a run it already has when a later attempt opens it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from trainer.tracking.events_file import Event
from trainer.tracking.metrics_file import MetricsRow


class Backend(Protocol):
    """A place rows are sent to. Called from one thread; may raise: the facade then drops it."""

    def open(self) -> None:
        """Before the first row of the attempt; also sends the rows of earlier attempts that the tracker lacks."""

    def log(self, row: MetricsRow) -> None: ...

    def rewind(self, step: int) -> None:
        """The run went back to finished step `step`: rows of later steps come again with other values."""

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, str | float]]) -> None:
        """Rows of equal columns; where a tracker has no tables nothing is shown."""
        return

    def alert(self, event: Event) -> None:
        """An event of level error."""

    def close(self, exit_code: int) -> None: ...


class Held:
    """What a tracker has from earlier attempts: by metric, or by kind of row, the last step it knows.

    A killed attempt sent more steps than its checkpoint holds; the next one makes them again, bit for bit, and they
    must not be drawn twice.
    """

    def __init__(self, metrics: Mapping[str, int], kinds: Mapping[str, int] | None = None) -> None:
        self._metrics, self._kinds = dict(metrics), dict(kinds or {})

    def missing(self, row: MetricsRow) -> dict[str, float]:
        """The part of the row that the tracker does not have."""
        if row.step <= self._kinds.get(row.kind, -1):
            return {}
        return {key: value for key, value in row.data.items() if row.step > self._metrics.get(key, -1)}

    def rewind(self, step: int) -> None:
        self._metrics = {key: min(step, last) for key, last in self._metrics.items()}
        self._kinds = {kind: min(step, last) for kind, last in self._kinds.items()}


def last_steps(points: Iterable[tuple[str, int, float]], rollbacks: Sequence[tuple[float, int]]) -> dict[str, int]:
    """{metric: its last step} of points (metric, step, Unix seconds); rollbacks took back what they left behind."""
    last: dict[str, int] = {}
    for key, step, ts in points:
        if not any(ts <= rollback_ts and step > rollback_step for rollback_ts, rollback_step in rollbacks):
            last[key] = max(step, last.get(key, step))
    return last
