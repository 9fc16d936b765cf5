"""How much is trained: tokens, supervised share, lengths, turns, by source; what was left out;
exact duplicates.
"""

import hashlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from trainer.data.preview import visible
from trainer.data.row_encoder import SUPERVISED
from trainer.data.samples import Samples, TokenDataset
from trainer.run.inputs import PreparedData

NUM_AT_ONCE = 4096


def scan(samples: Samples) -> tuple[np.ndarray, np.ndarray]:
    """Of each sample a digest of its token ids (uint64), and its supervised stretches (int64).

    These are its assistant turns, but for those that are not trained.
    """
    found = [
        [own[np.asarray(source.samples)] for own in _of_dataset(source.dataset)]
        for source in samples.sources
    ]
    digests, turns = (np.concatenate(columns) for columns in zip(*found, strict=True))
    return digests, turns


@cache
def _of_dataset(dataset: TokenDataset) -> tuple[np.ndarray, np.ndarray]:
    digests, turns = np.empty(len(dataset), dtype=np.uint64), np.empty(len(dataset), dtype=np.int64)
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
        turns[places] = np.add.reduceat(is_start, starts, dtype=np.int64)
        digests[places] = [
            _digest(ids[a:b]) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)
        ]
    return digests, turns


def _digest(input_ids: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(input_ids.tobytes(), digest_size=8).digest(), "little")


Tree = dict[str, Any]
QUANTILES = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
LENGTHS = ("prompt", "completion", "total", "turns")
COUNTS = {
    "num_rows": "rows",
    "num_samples": "samples",
    "num_bad_rows": "bad rows",
    "num_dropped": "rows dropped",
    "num_truncated": "rows cut",
    "num_cut_tokens": "tokens cut off",
    "num_without_reasoning": "turns without their reasoning",
}
UNREAD = {
    "bad_rows_by_kind": "bad rows",
    "unread_keys": "keys of messages that nothing reads",
    "unread_columns": "columns that nothing reads",
}


def as_tree(data: PreparedData) -> Tree:
    """All there is to say, for JSON."""
    sides = {"train": data.train, "validation": data.validation}
    tree: Tree = {name: _side(samples) if samples else None for name, samples in sides.items()}
    sources = [
        (name, source) for name, samples in sides.items() if samples for source in samples.sources
    ]
    datasets = {source.dataset: f"{name} {source.name}" for name, source in reversed(sources)}
    keys = (*COUNTS, *UNREAD)
    tree["read"] = {
        name: {key: getattr(dataset.summary, key) for key in keys}
        for dataset, name in reversed(datasets.items())
    }
    found = validation_in_train(data)
    tree["duplicates"] = {
        "train": inside(data.train, scan(data.train)[0]),
        "validation_in_train": found,
    }
    return tree


def validation_in_train(data: PreparedData) -> Tree | None:
    """None without validation."""
    if not data.validation:
        return None
    own, known = (scan(samples)[0] for samples in (data.validation, data.train))
    return between(data.validation, own, data.train, known)


def _side(samples: Samples) -> Tree:
    ids = np.arange(len(samples))
    numbers = samples.source_of(ids)
    columns = (*samples.counts(ids), scan(samples)[1])
    by_source = {
        name: _facts(*(column[numbers == number] for column in columns))
        for number, name in enumerate(samples.names)
    }
    facts = _facts(*columns)
    for share, own in zip(samples.shares, by_source.values(), strict=True):
        own |= {"rows": share.num_rows, "rows_per_epoch": share.num_samples}
    facts |= {
        key: sum(own[key] for own in by_source.values()) for key in ("rows", "rows_per_epoch")
    }
    return {"total": facts, "sources": by_source}


def _facts(lengths: np.ndarray, supervised: np.ndarray, turns: np.ndarray) -> Tree:
    facts: Tree = {
        "samples": len(lengths),
        "tokens": int(lengths.sum()),
        "supervised_tokens": int(supervised.sum()),
    }
    if len(lengths):
        facts["supervised_share"] = facts["supervised_tokens"] / facts["tokens"]
        columns = (lengths - supervised, supervised, lengths, turns)
        facts |= {name: _quantiles(values) for name, values in zip(LENGTHS, columns, strict=True)}
    return facts


def _quantiles(values: np.ndarray) -> dict[str, float]:
    found = np.quantile(values, list(QUANTILES.values()), method="inverted_cdf")
    return {"mean": float(values.mean()), **dict(zip(QUANTILES, map(int, found), strict=True))}


def as_lines(tree: Tree) -> Iterator[str]:
    """The tree as text for a terminal."""
    for side in ("train", "validation"):
        if tree[side] is None:
            yield f"{side}: no samples"
            continue
        sources = tree[side]["sources"]
        scopes = (
            {f"source {name}": facts for name, facts in sources.items()} if len(sources) > 1 else {}
        )
        for name, facts in {**scopes, "total": tree[side]["total"]}.items():
            yield from _scope_lines(f"{side}, {visible(name)}", facts)
    for name, summary in tree["read"].items():
        counts = (
            f"{summary[key]:,} {words}"
            for key, words in COUNTS.items()
            if summary[key] or key == "num_rows"
        )
        yield f"read for {visible(name)}: {', '.join(counts)}"
        for key, text in UNREAD.items():
            if summary[key]:
                yield f"  {text}: " + ", ".join(
                    f"{visible(kind)} {count}" for kind, count in summary[key].items()
                )
    for key, text in (("train", "inside train"), ("validation_in_train", "of validation in train")):
        if (found := tree["duplicates"][key]) is not None:
            yield f"exact duplicates {text}: {found['count']:,} of {found['num_samples']:,} ({found['share']:.1%})"
            yield from (
                f"  {visible(where)} equals {visible(original)}"
                for where, original in found["places"]
            )


def _scope_lines(name: str, facts: Tree) -> Iterator[str]:
    share = f"; {facts['supervised_share']:.1%} supervised" if facts["samples"] else ""
    repeated = (
        f" ({facts['rows_per_epoch']:,} an epoch)"
        if facts["rows"] != facts["rows_per_epoch"]
        else ""
    )
    yield f"{name}: {facts['rows']:,} rows{repeated}, {facts['samples']:,} samples, {facts['tokens']:,} tokens{share}"
    if facts["samples"]:
        yield f"  {'':<12}" + "".join(f"{key:>10}" for key in ("mean", *QUANTILES))
    for what in LENGTHS if facts["samples"] else ():
        cells = (
            f"{value:>10,.1f}" if key == "mean" else f"{value:>10,}"
            for key, value in facts[what].items()
        )
        yield f"  {what:<12}{''.join(cells)}"


NUM_PLACES = 5


def inside(samples: Samples, own: np.ndarray) -> dict[str, Any]:
    """Samples that equal an earlier one. `own`: the digests of the samples."""
    _, first, inverse = np.unique(own, return_index=True, return_inverse=True)
    originals = first[inverse]
    later = np.flatnonzero(originals != np.arange(len(own)))
    return _found(samples, later, samples, originals[later])


def between(
    samples: Samples, own: np.ndarray, others: Samples, known: np.ndarray
) -> dict[str, Any]:
    """Those of `samples` that are among `others`; `own`, `known`: the digests of both."""
    order = np.argsort(known, kind="stable")
    found = order[np.searchsorted(known, own, sorter=order).clip(max=len(known) - 1)]
    same = np.flatnonzero(known[found] == own)
    return _found(samples, same, others, found[same])


def _found(
    samples: Samples, candidates: np.ndarray, others: Samples, originals: np.ndarray
) -> dict[str, Any]:
    """Their number and share, and the first places: (where one stands, which it equals). Digests
    have 8 bytes: what has the same is compared token by token.
    """
    count, places = 0, []
    for sample_id, original in zip(candidates.tolist(), originals.tolist(), strict=True):
        if np.array_equal(samples.sample(sample_id)[0], others.sample(original)[0]):
            count += 1
            if count <= NUM_PLACES:
                places.append((samples.location(sample_id), others.location(original)))
    share = count / len(samples) if len(samples) else 0.0
    return {"count": count, "num_samples": len(samples), "places": places, "share": share}
