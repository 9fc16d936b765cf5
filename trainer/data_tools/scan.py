"""What statistics need of the tokens of each sample, in one pass over a prepared dataset."""

import hashlib
from dataclasses import dataclass
from functools import cache

import numpy as np

from trainer.data.sample_writer import SUPERVISED
from trainer.data.samples import Samples, TokenDataset

NUM_AT_ONCE = 4096


@dataclass(frozen=True, eq=False)
class Scan:
    """Of each sample: a digest of its token ids (uint64), and its supervised stretches (int64).

    These are its assistant turns, but for those that are not trained.
    """

    digests: np.ndarray
    turns: np.ndarray


def scan(samples: Samples) -> Scan:
    parts = [(_of_dataset(source.dataset), np.asarray(source.samples)) for source in samples.sources]
    return Scan(
        np.concatenate([found.digests[numbers] for found, numbers in parts]),
        np.concatenate([found.turns[numbers] for found, numbers in parts]),
    )


@cache
def _of_dataset(dataset: TokenDataset) -> Scan:
    found = Scan(np.empty(len(dataset), dtype=np.uint64), np.empty(len(dataset), dtype=np.int64))
    for first in range(0, len(dataset), NUM_AT_ONCE):
        rows = dataset.rows[first : first + NUM_AT_ONCE]
        begin = int(rows["end"][0] - rows["num_tokens"][0])
        tokens = np.asarray(dataset.tokens[begin : int(rows["end"][-1])])
        ends = rows["end"] - begin
        starts = ends - rows["num_tokens"]
        is_start = tokens < 0
        is_start[1:] &= tokens[:-1] >= 0
        is_start[starts] = tokens[starts] < 0  # whatever the sample in front of it ends with
        ids, places = tokens & ~SUPERVISED, slice(first, first + len(rows))
        found.turns[places] = np.add.reduceat(is_start, starts, dtype=np.int64)
        found.digests[places] = [_digest(ids[a:b]) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
    return found


def _digest(input_ids: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(input_ids.tobytes(), digest_size=8).digest(), "little")
