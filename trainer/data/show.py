"""Prepared samples for people: as text with the supervised parts marked, and as counts."""

import dataclasses
import hashlib
import itertools
import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainer.data.samples import Samples

_INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Anyone may have written the data: what drives a terminal or turns the direction of reading is
spelled out."""
NUM_PLACES = 5
QUANTILES = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
Tree = dict[str, Any]


def visible(text: str) -> str:
    return _INVISIBLE.sub(lambda found: ascii(found[0])[1:-1], text)


def preview(
    input_ids: np.ndarray,
    loss_mask: np.ndarray,
    tokenizer: PreTrainedTokenizerBase,
    *,
    color: bool | None = None,
) -> str:
    """Decode a sample, its supervised parts in green (None: on a terminal), else in [[…]]."""
    is_green = sys.stdout.isatty() if color is None else color
    opening, closing = ("\x1b[32m", "\x1b[0m") if is_green else ("[[", "]]")
    changes = np.flatnonzero(np.diff(loss_mask.astype(np.int8))) + 1
    text = ""
    for start, end in itertools.pairwise([0, *changes.tolist(), len(input_ids)]):
        ids = input_ids[start:end].tolist()
        part = visible(str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)))
        text += f"{opening}{part}{closing}" if loss_mask[start] else part
    return text


def shown(
    samples: Samples, tokenizer: PreTrainedTokenizerBase, *, num_each: int, seed: int
) -> Iterator[str]:
    """Yield as text the first sample of each source, then `num_each` of each kind: longest, least
    supervised, random; each once.
    """
    lengths, num_loss_tokens = samples.counts(np.arange(len(samples)))
    numbers = samples.source_of(np.arange(len(samples)))
    kinds = {
        "first of its source": np.unique(numbers, return_index=True)[1],
        "longest": np.argsort(-lengths, kind="stable")[:num_each],
        "least supervised": np.argsort(num_loss_tokens / lengths, kind="stable")[:num_each],
        "random": np.random.default_rng(seed).permutation(len(samples))[:num_each],
    }
    reasons: dict[int, list[str]] = {}
    for reason, ids in kinds.items():
        for sample_id in ids.tolist():
            reasons.setdefault(sample_id, []).append(reason)
    for sample_id, found in reasons.items():
        where = visible(samples.location(sample_id))
        yield (
            f"--- {where}: {', '.join(found)}; source {samples.names[numbers[sample_id]]}; "
            f"{lengths[sample_id]} tokens, {num_loss_tokens[sample_id]} supervised"
        )
        yield preview(*samples.sample(sample_id), tokenizer)


def stats(train: Samples, validation: Samples | None) -> Tree:
    """Return counts of samples by source, of what was read for them, and of duplicates."""
    tree: Tree = {"train": None, "validation": None, "read": {}}
    for side, samples in (("train", train), ("validation", validation)):
        if not samples:
            continue
        ids = np.arange(len(samples))
        columns, numbers = samples.counts(ids), samples.source_of(ids)
        by_source = {}
        for number, (source, share) in enumerate(zip(samples.sources, samples.shares, strict=True)):
            own = (column[numbers == number] for column in columns)
            epoch = {"rows": share.num_rows, "rows_per_epoch": share.num_samples}
            by_source[source.name] = epoch | _facts(*own)
            tree["read"].setdefault(source.dataset, f"{side} {source.name}")
        total = {
            key: sum(facts[key] for facts in by_source.values())
            for key in ("rows", "rows_per_epoch")
        }
        tree[side] = {"sources": by_source, "total": total | _facts(*columns)}
    tree["read"] = {
        name: dataclasses.asdict(dataset.summary) for dataset, name in tree["read"].items()
    }
    tree["duplicates"] = {
        "train": duplicates(train, train),
        "validation_in_train": duplicates(validation, train) if validation else None,
    }
    return tree


def _facts(lengths: np.ndarray, num_supervised: np.ndarray) -> Tree:
    facts: Tree = {
        "samples": len(lengths),
        "tokens": int(lengths.sum()),
        "supervised_tokens": int(num_supervised.sum()),
    }
    columns = {"prompt": lengths - num_supervised, "completion": num_supervised, "total": lengths}
    for name, values in columns.items() if len(lengths) else ():
        found = np.quantile(values, list(QUANTILES.values()), method="inverted_cdf")
        quantiles = dict(zip(QUANTILES, map(int, found), strict=True))
        facts[name] = {"mean": round(float(values.mean()), 1), **quantiles}
    return facts


def stats_lines(tree: Tree) -> Iterator[str]:
    """Yield the counts as lines for a terminal."""
    for side in ("train", "validation"):
        found = tree[side] or {"sources": {}, "total": {}}
        for name, facts in {**found["sources"], "total": found["total"]}.items():
            yield f"{side}, {visible(name)}: {_pairs(facts) or 'no samples'}"
            for what, values in facts.items():
                if isinstance(values, dict):
                    yield f"  {what}: {_pairs(values)}"
    for name, summary in tree["read"].items():
        yield f"read for {visible(name)}: {_pairs(summary)}"
        for what, values in summary.items():
            if isinstance(values, dict) and values:
                yield f"  {what}: {_pairs(values)}"
    for name, found in tree["duplicates"].items():
        if found is not None:
            yield f"exact duplicates, {name}: {found['count']:,} of {found['num_samples']:,}"
            for where, original in found["places"]:
                yield f"  {visible(where)} equals {visible(original)}"


def _pairs(values: Tree) -> str:
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    return ", ".join(f"{visible(name)} {value:,}" for name, value in numbers.items())


def duplicates(samples: Samples, others: Samples) -> Tree:
    """Count the samples whose token ids equal those of an earlier one (`others` is `samples`), or
    of any of `others`; with the first places. Ids are compared by digests of 8 bytes.
    """
    own, known = _digests(samples), _digests(others)
    values, first = np.unique(known, return_index=True)
    at = np.searchsorted(values, own).clip(max=len(values) - 1)
    originals, is_same = first[at], values[at] == own
    if samples is others:
        is_same &= originals != np.arange(len(own))
    found = np.flatnonzero(is_same)
    places = [
        (samples.location(number), others.location(originals[number]))
        for number in found[:NUM_PLACES].tolist()
    ]
    return {
        "count": len(found),
        "num_samples": len(own),
        "share": len(found) / max(1, len(own)),
        "places": places,
    }


def _digests(samples: Samples) -> np.ndarray:
    found = (
        hashlib.blake2b(source.dataset.sample(index)[0].tobytes(), digest_size=8).digest()
        for source in samples.sources
        for index in source.samples
    )
    return np.frombuffer(b"".join(found), dtype=np.uint64)
