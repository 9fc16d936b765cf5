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
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import tokenizers
import transformers

from trainer.data.prepare import BAD_ROWS, PrepareOptions, RowEncoder, SampleWriter
from trainer.data.samples import CHECKSUMS, TokenDataset, open_dataset
from trainer.errors import CannotWriteError, DataError
from trainer.runtime.files import locked, publish, try_lock

logger = logging.getLogger(__name__)

HASHED_BYTES = 1 << 24
MAX_BAD_FRACTION = 0.5
"""With more bad rows than this, `data.on_bad_row=skip` ends the run too: the columns or the
template are wrong, not rows."""
TOKEN_MODULES = (
    "chat",
    "content",
    "formats",
    "masks",
    "plain_text",
    "prepare",
    "readers",
    "rows",
    "template",
    "tokens",
)
"""The modules that turn files into prepared samples: `prepare` and all that it imports of this
package."""


def prepare(
    files: list[Path],
    *,
    tokenizer: transformers.PreTrainedTokenizerBase,
    tokenizer_digest: str,
    options: PrepareOptions,
    cache_dir: Path,
    progress: Callable[[], None] = lambda: None,
) -> TokenDataset:
    """Return the samples of `files`, prepared by the first process that asks unless the cache has
    them whole.

    `progress` is called during the work, and while another process works. Raises `DataError` for
    rows or files that cannot be trained on, and `CannotWriteError`.
    """
    contents = RowFiles(files, progress)
    directory = cache_dir / "tokens" / _content_hash(contents, tokenizer_digest, options)
    if not _is_whole(directory):
        try:
            _make_whole(directory, partial(_fill, contents, tokenizer, options, progress), progress)
        except OSError as error:
            raise CannotWriteError(
                f"cannot write prepared tokens to '{directory}': {error}.\n"
                f"Fix: free space, or point data.cache_dir to a writable directory"
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
        return [digest for _, digest in self._found]

    def require_unchanged(self) -> None:
        """Raise `DataError` if a file was written to or replaced since it was hashed.

        Its times show a content that came and went again. They may be coarse, or come from the
        cache of a network file system, so each file is hashed once more, too.
        """
        for path, (state, digest) in zip(self.paths, self._found, strict=True):
            if _state_of(path) != state or self._digest(path) != digest:
                raise DataError(
                    f"'{path}' changed while its rows were prepared: some of them may be old and "
                    f"some new.\nFix: start again when nothing writes to this file, or train on a "
                    f"copy of it"
                )

    def _digest(self, path: Path) -> str:
        try:
            return _digest(path, self._progress)
        except OSError as error:
            raise DataError(f"cannot read '{path}': {error.strerror}") from error


def _state_of(path: Path) -> tuple[int, ...]:
    """Return what changes with the content of a file; `st_ctime` cannot be set back, unlike
    `st_mtime`. Raises `DataError`.
    """
    try:
        with path.open("rb") as file:  # on NFS, to open a file asks the server what it is now
            state = os.fstat(file.fileno())
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror}") from error
    return state.st_size, state.st_mtime_ns, state.st_ctime_ns


def _digest(path: Path, progress: Callable[[], None] = lambda: None) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(HASHED_BYTES):
            digest.update(piece)
            progress()
    return digest.hexdigest()


def _content_hash(contents: RowFiles, tokenizer_digest: str, options: PrepareOptions) -> str:
    versions = tokenizers.__version__, transformers.__version__
    parts = [_code_digest(), *versions, tokenizer_digest, dataclasses.asdict(options)]
    parts += zip([path.suffix for path in contents.paths], contents.digests, strict=True)
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


@cache
def _code_digest() -> str:
    """Return a sha256 over the source of `TOKEN_MODULES`: other code may give other tokens."""
    digest = hashlib.sha256()
    for name in TOKEN_MODULES:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()


def _make_whole(
    directory: Path, fill: Callable[[Path], None], progress: Callable[[], None]
) -> None:
    """Let `fill` prepare a directory that is missing or damaged. Where the file system has no
    locks, several processes do the work, and the first rename wins.
    """
    with locked(directory.with_name(f"{directory.name}.lock"), on_wait=progress) as is_alone:
        damage = find_damage(directory) if directory.is_dir() else None
        if directory.is_dir() and damage is None:
            return
        if damage:
            # an error, because another rank than the main one may find it, and these log errors
            # only
            logger.error(
                "prepared tokens in %s are damaged (%s): preparing them again", directory, damage
            )
        if is_alone:
            _remove_leftovers(directory)
        staging = directory.with_name(f"{directory.name}.tmp-{uuid.uuid4().hex}")
        staging.mkdir()
        try:
            fill(staging)
            write_checksums(staging)
            _publish(staging, directory)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _remove_leftovers(directory: Path) -> None:
    """Remove what killed preparations left: of this data, whose lock is held, and of other data
    that nobody prepares now.
    """
    for leftover in directory.parent.glob("*.tmp-*"):
        lock = leftover.with_name(f"{leftover.name.partition('.tmp-')[0]}.lock")
        with suppress(OSError), lock.open("a", encoding="utf-8") as file:
            if lock.stem == directory.name or try_lock(file.fileno()):
                shutil.rmtree(leftover, ignore_errors=True)


def _publish(staging: Path, directory: Path) -> None:
    """Rename a finished directory. Another process may be first, with the same content; a damaged
    one is moved away, because it may still be mapped.
    """
    if not publish(staging, directory) and not _is_whole(directory):
        damaged = staging.with_name(f"{staging.name}-damaged")
        directory.rename(damaged)
        publish(staging, directory)
        shutil.rmtree(damaged, ignore_errors=True)


def _fill(
    contents: RowFiles,
    tokenizer: transformers.PreTrainedTokenizerBase,
    options: PrepareOptions,
    progress: Callable[[], None],
    staging: Path,
) -> None:
    with SampleWriter(staging, options) as writer:
        try:
            writer.write(RowEncoder(tokenizer, options), contents.paths, progress)
        except DataError:
            contents.require_unchanged()  # a change may be the reason
            raise
    contents.require_unchanged()
    _require_usable(writer, contents.paths, options, staging)
    text = json.dumps(dataclasses.asdict(writer.summary()), indent=2)
    (staging / "summary.json").write_text(text + "\n", encoding="utf-8")


def _require_usable(
    writer: SampleWriter, paths: list[Path], options: PrepareOptions, staging: Path
) -> None:
    """Raise `DataError` with the first bad rows, unless enough rows can be trained on."""
    summary, is_strict = writer.summary(), options.on_bad_row == "error"
    num_bad, num_rows = summary.num_bad_rows, summary.num_rows
    if not num_rows:
        raise DataError(f"no row to train on: there is none in {', '.join(map(str, paths))}")
    if summary.num_samples and num_bad <= (0 if is_strict else MAX_BAD_FRACTION * num_rows):
        return
    if num_bad == 0:
        raise DataError(
            f"no row left to train on: {num_rows} rows read, {summary.num_dropped} dropped by "
            f"data.truncation as longer than data.max_length={options.max_length}: raise it"
        )
    listed = staging.parents[1] / f"bad_rows_{staging.name[:8]}.jsonl"
    shutil.copyfile(staging / BAD_ROWS, listed)
    fixes = ["repair the rows"]
    if "over-long" in summary.bad_rows_by_kind:
        fixes.append(
            "for over-long rows raise data.max_length or set data.truncation=right, left or drop"
            + ", or split for plain text" * (options.keys.text_key is not None)
        )
    if is_strict:
        fixes.append("leave them out with data.on_bad_row=skip")
    else:
        fixes.append(f"data.on_bad_row=skip leaves out at most {MAX_BAD_FRACTION:.0%} of the rows")
    lines = [
        f"{num_bad} of {num_rows} rows cannot be trained on ({summary.num_samples} can):",
        *writer.bad_row_lines(),
        f"all of them: {listed}",
        f"Fix: {'; '.join(fixes)}",
    ]
    raise DataError("\n".join(lines))


# Checksums


def write_checksums(directory: Path) -> None:
    """List every file of the directory; `sha256sum -c SHA256SUMS` checks them too."""
    lines = [f"{digest}  {name}\n" for name, digest in _checksums(directory).items()]
    (directory / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def find_damage(directory: Path) -> str | None:
    """Name the files that are missing, left over or changed; None if there are none."""
    try:
        lines = (directory / CHECKSUMS).read_text(encoding="utf-8").splitlines()
        found = [f"{digest}  {name}" for name, digest in _checksums(directory).items()]
    except (OSError, UnicodeDecodeError) as error:
        return f"{CHECKSUMS} or a file it lists cannot be read: {error}"
    changed = {line.partition("  ")[2] for line in set(lines) ^ set(found)}
    return f"not as listed in {CHECKSUMS}: {', '.join(sorted(changed))}" if changed else None


def _is_whole(directory: Path) -> bool:
    return directory.is_dir() and find_damage(directory) is None


def _checksums(directory: Path) -> dict[str, str]:
    return {
        path.name: _digest(path)
        for path in sorted(directory.iterdir())
        if path.name != CHECKSUMS and not path.name.startswith(".")
    }
