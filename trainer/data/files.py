"""Finds the data files for a path, a glob, a Hub address, or a list of these.

This module imports neither torch nor pyarrow, so that a wrong path fails before slow imports.
"""

import glob
import logging
import os
import re
import stat
from collections import Counter
from pathlib import Path

from trainer.data.rows import SUFFIXES
from trainer.errors import DataError

logger = logging.getLogger(__name__)

CSV_FIX = (
    'convert it: python -c "from pyarrow import csv, parquet; '
    "parquet.write_table(csv.read_csv('{path}'), '{path}.parquet')\""
)
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
ADDRESS = re.compile(r"hf://(?P<name>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[^:]+))?:(?P<split>.+)")
SHARD = re.compile(r"(.+)-\d+-of-(\d+)\b.*")
TIMEOUT_S = 10.0
NUM_NAMED = 20


def resolve_files(spec: str | list[str]) -> list[Path]:
    """Return the files of each path, glob or Hub address, in this order. Matches of a glob are
    sorted.

    Raises `DataError` for a file that is missing, not regular, or has an unsupported suffix.
    """
    entries = [spec] if isinstance(spec, str) else spec
    files = [path for entry in entries for path in _resolve_one(entry)]
    if not any(path.stat().st_size for path in files):
        raise DataError(
            f"no row to train on: '{files[0]}' is empty.\nFix: name a file with at least one row"
        )
    return files


def _resolve_one(entry: str) -> list[Path]:
    if entry.startswith("hf://"):
        return dataset_files(entry)
    # Path.exists raises an error for a name that is too long
    paths = [Path(entry)] if os.path.exists(entry) else []
    if not paths and glob.has_magic(entry):
        paths = [Path(match) for match in sorted(glob.glob(entry, recursive=True))]
    if not paths:
        fix = "use an existing path or glob"
        if HUB_ID.fullmatch(entry) and not entry.endswith(SUFFIXES):
            fix += f", or hf://{entry}:train for a dataset of the Hub"
        raise DataError(f"no file matches '{entry}' (current directory: {Path.cwd()}).\nFix: {fix}")
    for found in paths:
        _check_file(found)
    return paths


def _check_file(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror}") from error
    if not stat.S_ISREG(mode):  # a pipe could be read only once
        raise DataError(
            f"'{path}' is not a regular file.\nFix: name a file or glob ('DIR/*.jsonl')"
        )
    if not path.name.endswith(SUFFIXES):
        fix = CSV_FIX.format(path=path) if path.suffix == ".csv" else "convert, unpack or rename it"
        raise DataError(
            f"'{path}' has the unsupported format '{path.suffix}'; the supported formats are "
            f"{', '.join(SUFFIXES)}.\nFix: {fix}"
        )


# The Hub


def dataset_files(address: str) -> list[Path]:
    """Return the files of a dataset split, in order. Downloads missing files.

    For a branch, or without a revision, a commit in the Hub's cache takes precedence, so that every
    start uses the same commit. Raises `DataError`.
    """
    if (found := ADDRESS.fullmatch(address)) is None:
        raise DataError(
            f"'{address}' is not an address of a Hub dataset.\n"
            f"Fix: write hf://org/name:split or hf://org/name@revision:split"
        )
    name, revision, split = found.groups()
    root, files = _cached(name, revision, split)
    if not files or missing_shards(files):
        others = _download(address, name, revision, split)
        root, files = _cached(name, revision, split)
        if not files:
            raise DataError(
                f"'{address}': the dataset does not have this split.\n"
                f"Fix: use a file name instead of the split (the dataset has "
                f"{', '.join(others[:NUM_NAMED]) or 'none'}), or try the Hub's parquet conversion: "
                f"hf://{name}@refs/convert/parquet:default/train"
            )
    if len(folders := {file.parent for file in files}) > 1:
        subsets = (folder if folder.name == split else folder / split for folder in folders)
        named = ", ".join(sorted(subset.as_posix() for subset in subsets))
        raise DataError(
            f"'{address}': several subsets have this split.\n"
            f"Fix: replace the split by one of {named}"
        )
    if revision != root.name:
        pinned = f"hf://{name}@{root.name}:{split}"
        logger.info("%s: using revision %s; to pin it, write %s", address, root.name, pinned)
    return [root / file for file in files]


def missing_shards(files: list[Path]) -> list[str]:
    """Return the names of numbered shards, as `NAME-*-of-N`, of which some are missing."""
    counts = Counter(SHARD.findall("\n".join(map(str, files))))
    return [f"{name}-*-of-{n}" for (name, n), found in counts.items() if found < int(n)]


def _patterns(split: str) -> list[str]:
    """Return glob patterns for the files of a split, which may also be a file name or a pattern."""
    if split.endswith(SUFFIXES):
        return [split]
    own = (f"{split}.parquet", f"{split}-[0-9]*.parquet", f"{split}/*.parquet")
    return [pattern for name in own for pattern in (name, f"*/{name}")]


def _cached(name: str, revision: str | None, split: str) -> tuple[Path, list[Path]]:
    """Return the cached directory of a commit, and the relative paths of the split's files in it.
    The list is empty if the commit is not in the cache.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils import filter_repo_objects

    patterns = _patterns(split)
    try:
        # without patterns, the client would also require the dataset's other files
        directory = snapshot_download(
            name,
            repo_type="dataset",
            revision=revision,
            allow_patterns=patterns,
            local_files_only=True,
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return Path(), []
    root = Path(directory)
    files = sorted(path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return root, list(filter_repo_objects(files, allow_patterns=patterns))


def _download(
    address: str,
    name: str,
    revision: str | None,
    split: str,
) -> list[str]:
    """Download a split. Return the names of all data files of the dataset. Raises `DataError`."""
    from huggingface_hub import HfApi, constants, snapshot_download

    try:
        # fails fast without a network, which the download would notice only after half a minute
        info = HfApi().dataset_info(name, revision=revision, timeout=TIMEOUT_S)
        patterns = _patterns(split)
        snapshot_download(
            name,
            repo_type="dataset",
            revision=revision,
            allow_patterns=patterns,
        )
    except Exception as error:  # the Hub client raises many kinds
        commit = f" --revision {revision}" if revision else ""
        command = f"hf download --repo-type dataset {name} --include '*{split}*'{commit}"
        raise DataError(
            f"'{address}' is not complete in the Hub's cache ({constants.HF_HUB_CACHE}), and could "
            f"not be downloaded: {' '.join(str(error).split())}\n"
            f"Fix: if {constants.ENDPOINT}/datasets/{name} exists, accept its conditions there and "
            f"log in with `hf auth login`; without a network, run `{command}` on another machine "
            f"and copy its cache here"
        ) from error
    return [file.rfilename for file in info.siblings or () if file.rfilename.endswith(SUFFIXES)]
