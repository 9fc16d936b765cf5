"""Datasets of the Hub, named `hf://org/name@revision:split`: their files, downloaded once."""

import fnmatch
import logging
import re
import shlex
from pathlib import Path

from trainer.data.rows import SUFFIXES
from trainer.errors import DataError

logger = logging.getLogger(__name__)
TIMEOUT_S = 10.0
ADDRESS = re.compile(r"hf://(?P<name>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[^:]+))?:(?P<split>.+)")
SHARD = re.compile(r"(.+)-\d+-of-(\d+)\b.*")
NUM_NAMED = 20


def dataset_files(address: str) -> list[Path]:
    """The files of a split, in order: those in the Hub's cache if they are whole there, else downloaded.

    A branch, or no revision, means the commit that the cache has: it stays the same from start to start. Raises
    `DataError`.
    """
    if (found := ADDRESS.fullmatch(address)) is None:
        raise DataError(f"'{address}' is no address: write hf://org/name:split or hf://org/name@revision:split")
    name, revision, split = found.groups()
    root, files = _cached(name, revision, split)
    if root is None or not files or not _has_all_shards(files):
        try:
            root, choice = _download(name, revision, split)
        except Exception as error:  # the Hub client raises many kinds
            raise _unreachable(address, name, revision, split, error) from error
        if not (files := _files(root, split)):
            raise DataError(f"'{address}': there is no such split; {choice}")
    if len(subsets := {file.parent for file in files}) > 1:
        own = (folder if folder.name == split else folder / split for folder in subsets)
        named = ", ".join(sorted(folder.relative_to(root).as_posix() for folder in own))
        raise DataError(f"'{address}': several subsets have this split, name one in its place: {named}")
    if revision != root.name:
        logger.info("%s is revision %s; hf://%s@%s:%s keeps to it anywhere", address, root.name, name, root.name, split)
    return files


def _patterns(split: str) -> list[str]:
    """Of the names that files of a split have; a split that is the name of data files stands for itself."""
    if split.endswith(SUFFIXES):
        return [split]
    own = (f"{split}.parquet", f"{split}-[0-9]*.parquet", f"{split}/*.parquet")
    return [pattern for name in own for pattern in (name, f"*/{name}")]


def _files(root: Path, split: str) -> list[Path]:
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    return [root / name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in _patterns(split))]


def _has_all_shards(files: list[Path]) -> bool:
    shards = [found.groups() for file in files if (found := SHARD.fullmatch(file.name))]
    return all(shards.count(shard) == int(shard[1]) for shard in shards)


def _cached(name: str, revision: str | None, split: str) -> tuple[Path | None, list[Path]]:
    """(The directory of a commit, the split's files that the cache has of it)."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        root = Path(snapshot_download(name, repo_type="dataset", revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None, []
    return root, _files(root, split)


def _download(name: str, revision: str | None, split: str) -> tuple[Path, str]:
    """(The directory of the commit with the split's files, what else could be named)."""
    from huggingface_hub import HfApi, snapshot_download

    # one short question: without a network the download would try for half a minute
    found = HfApi().dataset_info(name, revision=revision, timeout=TIMEOUT_S)
    root = snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=_patterns(split))
    names = [file.rfilename for file in (found.siblings or []) if file.rfilename.endswith(SUFFIXES)]
    choice = f"it has no parquet files; the Hub's own may be there: hf://{name}@refs/convert/parquet:default/train"
    return Path(root), f"its data files, which can be named too: {', '.join(names[:NUM_NAMED])}" if names else choice


def _unreachable(address: str, name: str, revision: str | None, split: str, error: Exception) -> DataError:
    from huggingface_hub import constants

    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    words = ["hf", "download", "--repo-type", "dataset", name, "--include", f"*{split}*"]
    command = shlex.join([*words, *(["--revision", revision] if revision else [])])
    return DataError(
        f"'{address}' is not whole in the Hub's cache ({constants.HF_HUB_CACHE}) and could not be had from the Hub "
        f"({reason}); where there is a network, run: {command} — and copy that cache here"
    )
