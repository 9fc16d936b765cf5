"""The files that a path, glob, address of the Hub or list of these names.

It imports neither torch nor pyarrow, so that a wrong path fails before anything slow starts.
"""

import fnmatch
import glob
import itertools
import logging
import re
import shlex
import stat
from pathlib import Path

from trainer.data.rows import SUFFIXES
from trainer.errors import DataError

_OURS = {suffix: suffix for suffix in (".jsonl", ".json", ".parquet")}  # in capitals
_OURS |= {".ndjson": ".jsonl", ".jsonlines": ".jsonl", ".pq": ".parquet"}
_TABLE = (
    'convert it: python -c "from pyarrow import csv, parquet; '
    "parquet.write_table(csv.read_csv('{path}'%s), '{path}.parquet')\""
)
FIXES = {
    **{other: f"rename it: mv '{{path}}' '{{stem}}{suffix}'" for other, suffix in _OURS.items()},
    ".csv": _TABLE % "",
    ".tsv": _TABLE % ", parse_options=csv.ParseOptions(delimiter='\\t')",
    ".txt": "make a row of each line, to be read with data.text_key=text: python -c "
    "\"import json; open('{path}.jsonl', 'w').writelines("
    "json.dumps({{'text': line.strip()}}) + '\\n' for line in open('{path}') if line.strip())\"",
    ".gz": "unpack it: gunzip '{path}'",
    ".zst": "unpack it: unzstd '{path}'",
    ".bz2": "unpack it: bunzip2 '{path}'",
    ".xz": "unpack it: unxz '{path}'",
    ".arrow": 'make one file of those beside it: python -c "import glob, pyarrow as pa, '
    "pyarrow.parquet as pq; "
    "pq.write_table(pa.concat_tables(pa.ipc.open_stream(pa.memory_map(part)).read_all() "
    "for part in sorted(glob.glob('{folder}/*.arrow'))), '{folder}.parquet')\"",
}
"""By the suffix in small letters. What datasets saves with `save_to_disk` is `.arrow`."""
NUM_LOOKED_AT = 1000  # files in a directory
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def resolve_files(spec: str | list[str]) -> list[Path]:
    """The files a path, glob, address of the Hub or list of these names, in that order; matches are
    sorted.

    Raises `DataError` for an empty match, a missing file, anything but a regular file, or an
    unsupported suffix.
    """
    entries = [spec] if isinstance(spec, str) else list(spec)
    if not entries:
        raise DataError("no data files given: set a path, a glob or a list of both")
    return [path for entry in entries for path in _resolve_one(entry)]


def _resolve_one(entry: str) -> list[Path]:
    if entry.startswith("hf://"):
        return dataset_files(entry)
    path = Path(entry).expanduser()
    if entry and path.exists():
        paths = [path]
    elif entry and glob.has_magic(entry):
        paths = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
    else:
        paths = []
    if not paths:
        what = "no file matches" if glob.has_magic(entry) else "no such file:"
        fix = "give an existing path or glob"
        if HUB_ID.fullmatch(entry) and not entry.endswith(SUFFIXES):
            fix += f"; a dataset of the Hub is written hf://{entry}:train"
        raise DataError(f"{what} '{entry}' (current directory: {Path.cwd()}); {fix}")
    for found in paths:
        _check_file(found)
    return paths


def _check_file(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror}") from error
    if stat.S_ISDIR(mode):
        raise DataError(f"'{path}' is a directory: {_inside(path)}")
    if not stat.S_ISREG(mode):
        raise DataError(
            f"'{path}' is a pipe, a socket or a device; data is read more than once: write it to a "
            f"file"
        )
    if not path.name.endswith(SUFFIXES):
        fix = _fix(path)
        supported = f"supported are {', '.join(SUFFIXES)}"
        raise DataError(
            f"'{path}' has an unsupported format '{path.suffix}': {supported}{fix and '; ' + fix}"
        )


def _fix(path: Path) -> str:
    return FIXES.get(path.suffix.lower(), "").format(
        path=path, stem=path.with_suffix(""), folder=path.parent
    )


def _inside(directory: Path) -> str:
    """How the first data files in a directory, or in one of its own, are named."""
    files = [
        *itertools.islice(
            itertools.chain(directory.glob("*"), directory.glob("*/*")), NUM_LOOKED_AT
        )
    ]
    for suffix in (".arrow", *SUFFIXES):  # beside .arrow stand .json files that hold no rows
        if file := next((file for file in sorted(files) if file.name.endswith(suffix)), None):
            return (
                _fix(file) if suffix == ".arrow" else f"name its files: '{file.parent}/*{suffix}'"
            )
    return f"name its files, for example '{directory}/*.jsonl'"


logger = logging.getLogger(__name__)
TIMEOUT_S = 10.0
ADDRESS = re.compile(r"hf://(?P<name>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[^:]+))?:(?P<split>.+)")
SHARD = re.compile(r"(.+)-\d+-of-(\d+)\b.*")
NUM_NAMED = 20


def dataset_files(address: str) -> list[Path]:
    """The files of a split, in order: those in the Hub's cache if they are whole there, else
    downloaded.

    A branch, or no revision, means the commit that the cache has: it stays the same from start to
    start. Raises `DataError`.
    """
    if (found := ADDRESS.fullmatch(address)) is None:
        raise DataError(
            f"'{address}' is no address: write hf://org/name:split or hf://org/name@revision:split"
        )
    name, revision, split = found.groups()
    root, files = _cached(name, revision, split)
    shards = [shard.groups() for file in files if (shard := SHARD.fullmatch(file.name))]
    if root is None or not files or any(shards.count(shard) != int(shard[1]) for shard in shards):
        try:
            root, choice = _download(name, revision, split)
        except Exception as error:  # the Hub client raises many kinds
            raise _not_had(address, name, revision, split, error) from error
        if not (files := _files(root, split)):
            raise DataError(f"'{address}': there is no such split; {choice}")
    if len(subsets := {file.parent for file in files}) > 1:
        own = (folder if folder.name == split else folder / split for folder in subsets)
        named = ", ".join(sorted(folder.relative_to(root).as_posix() for folder in own))
        raise DataError(
            f"'{address}': several subsets have this split, name one in its place: {named}"
        )
    if revision != root.name:
        logger.info(
            "%s is revision %s; hf://%s@%s:%s keeps to it anywhere",
            address,
            root.name,
            name,
            root.name,
            split,
        )
    return files


def _patterns(split: str) -> list[str]:
    """Of the names that files of a split have; a split that is the name of data files stands
    for itself.
    """
    if split.endswith(SUFFIXES):
        return [split]
    own = (f"{split}.parquet", f"{split}-[0-9]*.parquet", f"{split}/*.parquet")
    return [pattern for name in own for pattern in (name, f"*/{name}")]


def _files(root: Path, split: str) -> list[Path]:
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    return [
        root / name
        for name in names
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in _patterns(split))
    ]


def _cached(name: str, revision: str | None, split: str) -> tuple[Path | None, list[Path]]:
    """(The directory of a commit, the split's files that the cache has of it)."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    own = _patterns(split)  # without them the client misses the files that nobody asked for
    try:
        root = Path(
            snapshot_download(
                name,
                repo_type="dataset",
                revision=revision,
                allow_patterns=own,
                local_files_only=True,
            )
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None, []
    return root, _files(root, split)


def _download(name: str, revision: str | None, split: str) -> tuple[Path, str]:
    """(The directory of the commit with the split's files, what else could be named)."""
    from huggingface_hub import HfApi, snapshot_download

    # one short question: without a network the download would try for half a minute
    found = HfApi().dataset_info(name, revision=revision, timeout=TIMEOUT_S)
    root = snapshot_download(
        name, repo_type="dataset", revision=revision, allow_patterns=_patterns(split)
    )
    names = [file.rfilename for file in (found.siblings or []) if file.rfilename.endswith(SUFFIXES)]
    choice = f"it has no parquet files; the Hub's own may be there: hf://{name}@refs/convert/parquet:default/train"
    return (
        Path(root),
        f"its data files, which can be named too: {', '.join(names[:NUM_NAMED])}"
        if names
        else choice,
    )


def _not_had(
    address: str, name: str, revision: str | None, split: str, error: Exception
) -> DataError:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    page = f"{constants.ENDPOINT}/datasets/{name}"
    if isinstance(error, RevisionNotFoundError):
        return DataError(
            f"'{address}': there is no revision '{revision}'; its branches, tags and commits: "
            f"{page}"
        )
    if isinstance(error, GatedRepoError):
        return DataError(
            f"'{address}': accept its conditions on {page}, then log in: hf auth login"
        )
    if isinstance(error, RepositoryNotFoundError):
        return DataError(
            f"'{address}': there is no dataset {page}; if it is private, log in: hf auth login"
        )
    reason = next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )
    words = ["hf", "download", "--repo-type", "dataset", name, "--include", f"*{split}*"]
    command = shlex.join([*words, *(["--revision", revision] if revision else [])])
    return DataError(
        f"'{address}' is not whole in the Hub's cache ({constants.HF_HUB_CACHE}) and could not be "
        f"had from the Hub ({reason}); where there is a network, run: {command} — and copy that "
        f"cache here"
    )
