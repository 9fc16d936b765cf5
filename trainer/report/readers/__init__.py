"""Readers of training logs: one `RunLog` from whatever a trainer wrote, told by its content."""

from collections.abc import Callable, Iterator
from pathlib import Path

from trainer.report.readers import json_logs, tables, tensorboard
from trainer.report.run_log import RunLog, UnreadableLogError
from trainer.runtime.files import open_regular
from trainer.runtime.json_lines import MAX_FILE_BYTES

FIX = (
    "give a run directory or one of its files: metrics.jsonl, logging.jsonl, trainer_state.json, "
    "training_history.csv, a CSV with a step column, TensorBoard event files, JSON lines with a "
    "step, or the captured console of verl or ROLL"
)
MAX_TRIED = 40
"""Files of a directory; one with more is no run directory."""
KNOWN_NAMES = ("metrics.jsonl", "logging.jsonl")
OTHERS = (*json_logs.SUFFIXES, *tables.SUFFIXES, ".json", ".log", ".txt", ".out")
FORMATS: tuple[tuple[Callable[[Path], object], Callable[[Path], RunLog]], ...] = (
    (lambda path: path.is_dir() or "tfevents" in path.name, tensorboard.read_tensorboard),
    (lambda path: path.suffix in tables.SUFFIXES, tables.read_csv),
    (lambda path: path.suffix == ".json", json_logs.read_transformers),
    (lambda path: json_logs.json_source(path), json_logs.read_json_lines),
    (lambda path: True, json_logs.read_console),
)
"""What tells a format by its path, and its reader; the first that fits reads."""


def read_run(path: Path) -> RunLog:
    """The log at `path`, a file or a run directory, whoever wrote it.

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
            tried.append(
                f"{candidate.name}: no metrics in it ({log.num_unparsed} lines unreadable)"
            )
    except OSError as error:
        tried.append(str(error))
    what = "; ".join(tried) if tried else "it is empty" if path.exists() else "it does not exist"
    raise UnreadableLogError(f"cannot read {path} as a training log ({what}): {FIX}")


def _read(path: Path) -> RunLog:
    if not path.is_dir():
        with open_regular(path, limit_bytes=MAX_FILE_BYTES):
            pass  # refuses what is no regular file
    return next(read for fits, read in FORMATS if fits(path))(path)


def _candidates(path: Path) -> Iterator[Path]:
    """What `path` can mean, best first: the richest log of a run directory before copies of it."""
    if not path.is_dir():
        if path.exists():
            yield path
        return
    yield from (path / name for name in KNOWN_NAMES if (path / name).exists())
    # ms-swift makes a directory v<N>-<time> for each start.
    versions = [
        log
        for log in path.glob("v*-*/logging.jsonl")
        if log.parent.name[1:].partition("-")[0].isdecimal()
    ]
    yield from sorted(
        versions, key=lambda log: int(log.parent.name[1:].partition("-")[0]), reverse=True
    )
    yield from json_logs.state_files(path)
    yield from [path / name for name in tables.PAIR if (path / name).is_file()][:1]
    if tensorboard.event_dir(path):
        yield path
    others = [
        file for file in path.iterdir() if file.suffix in OTHERS and file.name not in KNOWN_NAMES
    ]
    yield from sorted(others, key=lambda file: (OTHERS.index(file.suffix), file.name))[:MAX_TRIED]
