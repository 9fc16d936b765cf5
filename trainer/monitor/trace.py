"""Spans of all phases of a rank in Chrome's trace format: open `trace/rank_*.json` in Perfetto (ui.perfetto.dev)."""

import json
import logging
import os
import time
from pathlib import Path

from trainer.monitor.clock import Span

logger = logging.getLogger(__name__)
DIRECTORY = "trace"
FLUSH_EVERY = 200


class TraceFile:
    """Appends one span a line; the array is never closed, which the format allows. A file that fails is given up."""

    def __init__(self, run_dir: Path, *, rank: int) -> None:
        self._rank, self._num_spans = rank, 0
        self._offset_s = time.time() - time.perf_counter()
        directory = run_dir / DIRECTORY
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"rank_{rank}.json"
        is_new = not path.exists()
        self._file = path.open("a", encoding="utf-8")
        if is_new:
            self._file.write("[\n")

    def span(self, span: Span) -> None:
        """`span` starts on the clock of `time.perf_counter`."""
        phase, start_s, took_s = span
        event = {
            "name": phase,
            "ph": "X",
            "pid": self._rank,
            "tid": os.getpid(),
            "ts": round((start_s + self._offset_s) * 1e6),
            "dur": round(took_s * 1e6),
        }
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps(event) + ",\n")
            self._num_spans += 1
            if self._num_spans % FLUSH_EVERY == 0:
                self._file.flush()
        except OSError as error:
            logger.warning("the trace of rank %d ends here: %s", self._rank, error)
            self._file.close()
