"""Readers of training logs: one `RunLog` from any trainer's files."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from trainer.runtime.files import open_regular
from trainer.runtime.json_lines import MAX_FILE_BYTES
from trainer.tools.report.readers import rows, tensorboard
from trainer.tools.report.readers.checkpoints import STATE
from trainer.tools.report.run_log import RunLog, UnreadableLogError

FIX = (
    "give a run directory or one of its files: metrics.jsonl, logging.jsonl, trainer_state.json, "
    "training_history.csv, a CSV with a step column, TensorBoard event files, JSON lines with a "
    "step, or the captured console of verl or ROLL"
)
MAX_TRIED = 40
"""Files of a directory; one with more is no run directory."""
READERS: dict[str, Callable[[Path], RunLog]] = {
    ".jsonl": rows.read_json_lines,
    ".ndjson": rows.read_json_lines,
    ".csv": rows.read_csv,
    ".tsv": rows.read_csv,
    ".json": rows.read_transformers,
    ".log": rows.read_console,
    ".txt": rows.read_console,
    ".out": rows.read_console,
}
"""Readers by suffix, the best first; files without any of them are read as a console."""


def read_run(path: Path) -> RunLog:
    """Read the log at `path`, a file or a run directory.

    Damaged parts are passed over and counted. Raises `UnreadableLogError` where nothing can be
    read.
    """
    tried: list[str] = []
    try:
        for candidate in _candidates(path):
            try:
                log = _read(candidate)
            except (UnreadableLogError, OSError) as error:
                tried.append(f"{candidate.name}: {error}")
                continue
            if log.series:
                return log
            num_lines = log.num_unparsed
            tried.append(f"{candidate.name}: no metrics in it ({num_lines} lines unreadable)")
    except OSError as error:
        tried.append(str(error))
    cause = "; ".join(tried) or ("it is empty" if path.exists() else "it does not exist")
    raise UnreadableLogError(f"cannot read {path} as a training log ({cause}): {FIX}")


def _read(path: Path) -> RunLog:
    if path.is_dir() or "tfevents" in path.name:
        return tensorboard.read_tensorboard(path)
    with open_regular(path, limit_bytes=MAX_FILE_BYTES):
        pass  # refuses what is no regular file
    return READERS.get(path.suffix, rows.read_console)(path)


def _candidates(path: Path) -> Iterator[Path]:
    """Yield the files that `path` can mean, the richest log of a run directory first."""
    if not path.is_dir():
        yield from [path] if path.exists() else []
        return
    # ms-swift makes a directory v<N>-<time> for each start, transformers checkpoint-<step>.
    names = ("metrics.jsonl", "logging.jsonl", "v*-*/logging.jsonl", STATE, f"checkpoint-*/{STATE}")
    for name in (*names, *rows.PAIR):
        yield from sorted(path.glob(name), key=_number, reverse=True)
    if tensorboard.event_files(path):
        yield path
    suffixes = list(READERS)
    others = (file for file in path.iterdir() if file.suffix in READERS)
    yield from sorted(others, key=lambda file: (suffixes.index(file.suffix), file.name))[:MAX_TRIED]


def _number(log: Path) -> int:
    """Return the number in the name of a log's directory: 10 of `v10-2026` and `checkpoint-10`."""
    digits = re.search(r"\d+", log.parent.name)
    return int(digits[0]) if digits else 0
