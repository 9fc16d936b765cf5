"""Tokens and loss masks prepared once, under a content hash, and memory-mapped by every process.

`<cache_dir>/tokens/<hash>/` appears by one rename of a finished, synced directory; what a killed
preparation leaves behind is never read. The memory used does not grow with the number of rows.
"""

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache, partial
from pathlib import Path

import tokenizers
import transformers

from trainer.data.mapped import CHECKSUMS, HASHED_BYTES
from trainer.data.row_encoder import PrepareOptions, RowEncoder
from trainer.data.sample_writer import BAD_ROWS, BadRows, SampleWriter, Summary, write_samples
from trainer.data.samples import TokenDataset, open_dataset
from trainer.errors import CannotWriteError, DataError
from trainer.runtime.files import locked, publish, try_lock

logger = logging.getLogger(__name__)

MAX_BAD_FRACTION = 0.5
"""Of the rows, under `data.on_bad_row=skip`: where more are unusable, columns or template are
wrong, not rows.
"""
TOKEN_MODULES = (
    "chat",
    "content",
    "conversation",
    "plain_text",
    "readers",
    "row_encoder",
    "row_processes",
    "rows",
    "sample_writer",
    "shapes",
    "spans",
    "template",
    "token_rows",
    "tokens",
    "turns",
)
"""The modules of this package that turn files into prepared samples: all that `sample_writer`
imports.
"""


class NotPreparedError(Exception):
    """The tokens are not in the cache."""


def prepare(
    files: list[Path],
    *,
    tokenizer: transformers.PreTrainedTokenizerBase,
    tokenizer_digest: str,
    options: PrepareOptions,
    cache_dir: Path,
    progress: Callable[[], None] = lambda: None,
    only_cached: bool = False,
) -> TokenDataset:
    """The samples of `files`, prepared unless the cache has them whole; the first process that asks
    does the work.

    `progress` is called as rows are rendered and while another process works: who waits is not
    hung, and who works is watched by itself. Raises `DataError` for rows or files that cannot be
    trained on, `CannotWriteError` when the cache cannot be written, `NotPreparedError` for what is
    not there and would have to be, as `only_cached` says.
    """
    contents = RowFiles(files, progress)
    directory = cache_dir / "tokens" / _content_hash(contents, tokenizer_digest, options)
    if only_cached and not (directory.is_dir() and find_damage(directory) is None):
        raise NotPreparedError(directory)
    try:
        _make_whole(directory, partial(_fill, contents, tokenizer, options, progress), progress)
    except OSError as error:
        fix = "free space or point data.cache_dir to a writable directory"
        raise CannotWriteError(
            f"cannot write prepared tokens to '{directory}': {error}; {fix}"
        ) from error
    return open_dataset(directory, tuple(files))


class RowFiles:
    """Data files and what they held when this was made."""

    def __init__(self, paths: list[Path], progress: Callable[[], None]) -> None:
        """Hash all of them; `progress` is called as they are read. Raises `DataError`."""
        self.paths, self._progress = paths, progress
        # the state comes first: a write while the file is hashed then shows as a later change
        self._found = [(_state_of(path), self._digest(path)) for path in paths]

    @property
    def digests(self) -> list[str]:
        """sha256 of each file."""
        return [digest for _, digest in self._found]

    def require_unchanged(self, *, is_hashed: bool) -> None:
        """Raise `DataError` if a file was written to or replaced since it was hashed.

        Its times tell of a content that came and went again. They may be coarse, or come from a
        cache of a network file
        system: with `is_hashed` each file is hashed once more, too.
        """
        for path, (state, digest) in zip(self.paths, self._found, strict=True):
            if _state_of(path) != state or (is_hashed and self._digest(path) != digest):
                raise DataError(
                    f"'{path}' changed while its rows were prepared: some of them may be old and "
                    f"some new.\nFix: start again when nothing writes to this file, or train on a "
                    f"copy of it"
                )

    def _digest(self, path: Path) -> str:
        digest = hashlib.sha256()
        try:
            with path.open("rb") as file:
                while piece := file.read(HASHED_BYTES):
                    digest.update(piece)
                    self._progress()
        except OSError as error:
            raise DataError(f"cannot read '{path}': {error.strerror}") from error
        return digest.hexdigest()


def _state_of(path: Path) -> tuple[int, ...]:
    """What changes with the content of a path; `st_ctime` cannot be set back, unlike
    `st_mtime`. Raises `DataError`.
    """
    try:
        with path.open("rb") as file:  # on NFS, to open a file asks the server what it is now
            state = os.fstat(file.fileno())
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror}") from error
    return state.st_size, state.st_mtime_ns, state.st_ctime_ns


def _content_hash(contents: RowFiles, tokenizer_digest: str, options: PrepareOptions) -> str:
    versions = tokenizers.__version__, transformers.__version__
    parts = [_code_digest(), *versions, tokenizer_digest, dataclasses.asdict(options)]
    parts += [
        [path.suffix, digest] for path, digest in zip(contents.paths, contents.digests, strict=True)
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


@cache
def _code_digest() -> str:
    """sha256 over the source of `TOKEN_MODULES`: with other code the same input may give other
    tokens.
    """
    digest = hashlib.sha256()
    for name in TOKEN_MODULES:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()


def _make_whole(
    directory: Path, fill: Callable[[Path], None], progress: Callable[[], None]
) -> None:
    """Let `fill` make what is not there or no longer what was written."""
    if directory.is_dir() and find_damage(directory) is None:
        return
    here = Path(tempfile.gettempdir(), f"sft-{os.getuid()}-{directory.name}.lock")
    with ExitStack() as held:
        is_alone = held.enter_context(
            locked(directory.with_name(f"{directory.name}.lock"), on_wait=progress)
        )
        # the file system has no locks: at least the ranks of this machine do not work twice
        if not is_alone:
            held.enter_context(locked(here, on_wait=progress))
        damage = find_damage(directory) if directory.is_dir() else None
        if damage:
            # an error, because it may not be the main rank that finds it, and others speak only in
            # errors
            logger.error(
                "prepared tokens in %s are damaged (%s): preparing them again", directory, damage
            )
        if damage or not directory.is_dir():
            _make(directory, fill, is_alone=is_alone)


def _make(directory: Path, fill: Callable[[Path], None], *, is_alone: bool) -> None:
    """Where the file system has no locks (not `is_alone`) the rename keeps readers safe, and
    the work is done twice.
    """
    if is_alone:
        _remove_leftovers(directory)
    staging = directory.with_name(f"{directory.name}.tmp-{socket.gethostname()}-{os.getpid()}")
    staging.mkdir()
    try:
        fill(staging)
        write_checksums(staging)
        _publish(staging, directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _remove_leftovers(directory: Path) -> None:
    """What killed preparations left: of this data, whose lock is held, and of other data that
    nobody prepares now.
    """
    for leftover in directory.parent.glob("*.tmp-*"):
        name = leftover.name.partition(".tmp-")[0]
        with (
            suppress(OSError),
            leftover.with_name(f"{name}.lock").open("a", encoding="utf-8") as file,
        ):
            if name == directory.name or try_lock(file.fileno()):
                shutil.rmtree(leftover, ignore_errors=True)


def _fill(
    contents: RowFiles,
    tokenizer: transformers.PreTrainedTokenizerBase,
    options: PrepareOptions,
    progress: Callable[[], None],
    staging: Path,
) -> None:
    encoder = RowEncoder(tokenizer, options)
    with SampleWriter(staging, options) as writer:
        try:
            write_samples(writer, encoder, contents.paths, progress)
        except DataError:
            contents.require_unchanged(is_hashed=False)
            raise
    # before bad rows are told of: a change may be why they are bad
    contents.require_unchanged(is_hashed=False)
    summary = writer.summary()
    if not summary.num_rows:
        raise DataError(
            f"no row to train on: there is none in {', '.join(map(str, contents.paths))}"
        )
    _check_usable(summary, writer.bad_rows, options, staging)
    contents.require_unchanged(is_hashed=True)
    text = json.dumps(dataclasses.asdict(summary), indent=2)
    (staging / "summary.json").write_text(text + "\n", encoding="utf-8")


def _check_usable(
    summary: Summary, bad_rows: BadRows, options: PrepareOptions, staging: Path
) -> None:
    """Raise `DataError` with the first bad rows, their counts and the way out, unless enough
    rows can be trained on.
    """
    num_bad, num_rows = summary.num_bad_rows, summary.num_rows
    allowed = MAX_BAD_FRACTION * num_rows if options.on_bad_row == "skip" else 0
    if summary.num_samples and num_bad <= allowed:
        return
    if num_bad == 0:
        raise DataError(
            f"no row left to train on: {num_rows} rows read, {summary.num_dropped} dropped by "
            f"data.truncation as longer than data.max_length={options.max_length}: raise it"
        )
    cache_dir = staging.parent.parent
    bad_rows_file = cache_dir / f"bad_rows_{staging.name[:8]}.jsonl"
    shutil.copyfile(staging / BAD_ROWS, bad_rows_file)
    lines = [f"{num_bad} of {num_rows} rows cannot be trained on ({summary.num_samples} can):"]
    lines += bad_rows.lines()
    lines.append(f"all of them: {bad_rows_file}")
    lines.append(_way_out(summary, options, is_cut=bad_rows.is_cut))
    raise DataError("\n".join(lines))


def _way_out(summary: Summary, options: PrepareOptions, *, is_cut: bool) -> str:
    fixes = ["repair the rows"]
    if "over-long" in summary.bad_rows_by_kind:
        ways = (
            "right, left or drop" if options.keys.text_key is None else "split, right, left or drop"
        )
        fixes.append(f"for over-long rows raise data.max_length or set data.truncation={ways}")
    if (summary.num_samples or is_cut) and options.on_bad_row == "error":
        fixes.append("leave them out with data.on_bad_row=skip")
    if summary.num_samples and options.on_bad_row == "skip":
        fixes.append(f"data.on_bad_row=skip leaves out at most {MAX_BAD_FRACTION:.0%} of the rows")
    return "fix: " + "; ".join(fixes)


def _publish(staging: Path, directory: Path) -> None:
    # Another process may be first, with the same content; or the damaged one is there, which may
    # still be mapped.
    if not publish(staging, directory) and find_damage(directory):
        damaged = staging.with_name(f"{staging.name}-damaged")
        directory.rename(damaged)
        publish(staging, directory)
        shutil.rmtree(damaged, ignore_errors=True)


def write_checksums(directory: Path) -> None:
    """List every file of the directory; `sha256sum -c SHA256SUMS` checks them too."""
    names = sorted(path.name for path in directory.iterdir())
    lines = [f"{digest}  {name}\n" for name, digest in _digests(directory, names).items()]
    (directory / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def find_damage(directory: Path) -> str | None:
    """What is wrong with the files: one that is missing, left over or changed; None when
    nothing is.
    """
    try:
        lines = (directory / CHECKSUMS).read_text(encoding="utf-8").splitlines()
        names = sorted(
            path.name
            for path in directory.iterdir()
            if path.name != CHECKSUMS and path.name[0] != "."
        )
        found = [f"{digest}  {name}" for name, digest in _digests(directory, names).items()]
    except (OSError, UnicodeDecodeError) as error:
        return f"{CHECKSUMS} or a file it lists cannot be read: {error}"
    changed = {line.partition("  ")[2] for line in set(lines) ^ set(found)}
    return f"not as listed in {CHECKSUMS}: {', '.join(sorted(changed))}" if changed else None


def _digests(directory: Path, names: list[str]) -> dict[str, str]:
    with ThreadPoolExecutor(max_workers=min(len(names) or 1, os.cpu_count() or 1)) as pool:
        return dict(
            zip(names, pool.map(lambda name: _digest(directory / name), names), strict=True)
        )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
