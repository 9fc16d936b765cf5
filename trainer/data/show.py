"""Prepared samples for people: as text with the supervised parts marked, and as counts."""

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
"""Anyone may have written the data: characters that drive a terminal or turn the direction of
reading are spelled out."""
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
    ids = np.arange(len(samples))
    numbers = samples.source_of(ids)
    lengths, num_loss_tokens = samples.counts(ids)
    kinds = {
        "first of its source": np.unique(numbers, return_index=True)[1],
        "longest": np.argsort(-lengths, kind="stable")[:num_each],
        "least supervised": np.argsort(num_loss_tokens / lengths, kind="stable")[:num_each],
        "random": np.random.default_rng(seed).permutation(len(samples))[:num_each],
    }
    reasons: dict[int, list[str]] = {}
    for reason, chosen in kinds.items():
        for sample_id in chosen.tolist():
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
    sides = {"train": train, "validation": validation}
    read = {
        f"{side} {source.name}": source.dataset.summary.as_json()
        for side, samples in sides.items()
        for source in (samples.sources if samples else ())
        if side == "train" or source.dataset not in {own.dataset for own in train.sources}
    }
    return {
        **{side: _counts(samples) if samples else None for side, samples in sides.items()},
        "read": read,
        "duplicates": {
            "train": _duplicates(train, train),
            "validation_in_train": _duplicates(validation, train) if validation else None,
        },
    }


def _counts(samples: Samples) -> Tree:
    ids = np.arange(len(samples))
    numbers = samples.source_of(ids)
    lengths, num_loss_tokens = samples.counts(ids)
    sources = {}
    for number, (name, share) in enumerate(zip(samples.names, samples.shares, strict=True)):
        own = numbers == number
        rows = {"rows": share.num_rows, "rows_per_epoch": share.num_samples}
        sources[name] = rows | _lengths(lengths[own], num_loss_tokens[own])
    total = {
        name: sum(facts[name] for facts in sources.values()) for name in ("rows", "rows_per_epoch")
    }
    return {"sources": sources, "total": total | _lengths(lengths, num_loss_tokens)}


def _lengths(lengths: np.ndarray, num_supervised: np.ndarray) -> Tree:
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


def _duplicates(samples: Samples, others: Samples) -> Tree:
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
    return {
        "count": len(found),
        "num_samples": len(own),
        "share": len(found) / max(1, len(own)),
        "places": [
            [samples.location(number), others.location(originals[number])]
            for number in found[:NUM_PLACES].tolist()
        ],
    }


def _digests(samples: Samples) -> np.ndarray:
    ids = (samples.sample(number)[0].tobytes() for number in range(len(samples)))
    digests = (hashlib.blake2b(content, digest_size=8).digest() for content in ids)
    return np.frombuffer(b"".join(digests), dtype=np.uint64)
