"""Readers of training logs: they turn the files of any trainer into one `RunLog`."""

import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from trainer.runtime.files import open_regular
from trainer.runtime.json_lines import flat, read_object
from trainer.tools.report.readers.console import read_console
from trainer.tools.report.readers.csv_rows import read_csv
from trainer.tools.report.readers.event_files import read_event_files
from trainer.tools.report.readers.json_rows import read_json_lines, read_log_history
from trainer.tools.report.readers.own import add_run_directory
from trainer.tools.report.readers.store import Store
from trainer.tools.report.run_log import RunLog, UnreadableLogError
from trainer.tracking import metrics_file, run_info

FIX = (
    "Fix: pass a run directory or one of its files: metrics.jsonl, logging.jsonl, trainer_state.json, "
    "training_history.csv, a CSV with a step column, TensorBoard event files, JSON lines with a "
    "step, or the captured console of transformers, verl, ROLL, torchtune, torchtitan, NeMo, "
    "Megatron or slime"
)
READERS: dict[str, Callable[[Path, Store], None]] = {
    # ms-swift makes a directory v<N>-<time> for each start; transformers makes checkpoint-<step>.
    "metrics.jsonl logging.jsonl v*-*/logging.jsonl *.jsonl *.ndjson": read_json_lines,
    "trainer_state.json checkpoint-*/trainer_state.json *.json": read_log_history,
    "training_history.csv *.csv *.tsv": read_csv,
    "**/*tfevents*": read_event_files,
    "*.log *.txt *.out": read_console,
}
"""File patterns in a run directory -> their reader, best log first."""
MAX_TRIED = 40
"""After this many files without metrics, a directory does not count as a run directory."""
PARTS_OF_RUNS = re.compile(r"checkpoint-\d+|tensorboard")
"""Matches directories inside a run directory that hold logs."""


def read_run(path: Path) -> RunLog:
    """Read the log at `path`, a file or a run directory.

    Damaged parts are skipped and counted. Raises `UnreadableLogError` if nothing can be read.
    """
    files = _logs_in(path) if path.is_dir() else [path]
    causes = []
    for file in islice(files, MAX_TRIED):
        try:
            log = _read(file)
        except (UnreadableLogError, OSError) as error:
            causes.append(f"{file.name}: {error}")
            continue
        if log.series:
            return log
        causes.append(f"{file.name} contains no metrics ({log.num_unparsed} lines unreadable)")
    cause = "; ".join(causes) or "it contains no log"
    raise UnreadableLogError(f"cannot read {path} as a training log: {cause}. {FIX}")


def _logs_in(directory: Path) -> Iterator[Path]:
    """Yield the logs in a run directory, best format first, then newest version first."""
    for pattern in " ".join(READERS).split():
        yield from sorted(directory.glob(pattern), key=_version, reverse=True)


def _version(path: Path) -> list[list[int]]:
    """Return the numbers in the names of a file and its directory, such as 10 in `checkpoint-10`."""
    return [[int(n) for n in re.findall(r"\d+", name)] for name in (path.name, path.parent.name)]


def _read(path: Path) -> RunLog:
    open_regular(path).close()  # refuses anything but a regular file
    is_part = PARTS_OF_RUNS.fullmatch(path.parent.name)
    run_dir = path.parent.parent if is_part else path.parent
    store = Store()
    if path.name == metrics_file.FILE_NAME or (run_dir / run_info.FILE_NAME).exists():
        add_run_directory(run_dir, store)
    read = (
        reader
        for patterns, reader in READERS.items()
        if any(map(path.absolute().match, patterns.split()))
    )
    next(read, read_console)(path, store)
    config = flat(read_object(path.parent / "args.json"))
    store.facts["config"] = config | store.facts.get("config", {})
    return store.log(path, run_dir)
