"""Show what is trained: as lines for the log, as text with the supervised parts marked, and as
counts.
"""

import hashlib
import itertools
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainer.data.batch_plan import RankPlan, Schedule
from trainer.data.prepare import BAD_ROWS, OVER_LONG_ROWS
from trainer.data.samples import Samples, TokenDataset
from trainer.runtime.log import labelled

_INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Anyone may have written the data: characters that drive a terminal or turn the direction of
reading are spelled out."""
NUM_PLACES = 5
MAX_PREVIEW = 1600
"""Characters of a sample that the start of a run shows: with the other lines they fill a screen."""
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


logger = logging.getLogger(__name__)


def announce(
    train: Samples,
    validation: Samples | None,
    *,
    schedule: Schedule,
    plan: RankPlan,
    total_steps: int,
    tokenizer: PreTrainedTokenizerBase,
    lr: str,
    device: str,
) -> str:
    """Log what is trained on and in which steps, what was left out or cut, and the next sample as
    the model reads it. Return that sample as plain text, its supervised parts in [[…]].
    """
    rows = schedule.rows(schedule.start.step + 1)
    first = train.of_rows(rows)
    num_micro_batches = len(plan.deal(train.counts(first)[0])[0])
    num_tokens = sum(source.num_tokens[0] for source in train.sources)
    num_labels = sum(source.num_tokens[1] for source in train.sources)
    held_out = f"; {len(validation):,} validation samples" if validation else ""
    _log(
        "data",
        f"{len(train):,} samples, {num_tokens:,} tokens, {num_labels / num_tokens:.1%} of them "
        f"supervised{held_out}",
    )
    if len(train.sources) > 1 or train.sources[0].repeat != 1:
        facts = _facts(train, schedule, total_steps)
        for source in train.sources:
            found = facts[source.name]
            _log(
                "source",
                f"{source.name}: {found['rows']:,.0f} rows, {found['tokens']:,.0f} tokens, "
                f"{found['valid_token_frac']:.1%} supervised; each row {found['times']:.3g} times "
                f"in the run (repeat {source.repeat:g})",
            )
    sources = [*train.sources, *(validation.sources if validation is not None else ())]
    for dataset in dict.fromkeys(source.dataset for source in sources):
        _log_rows(dataset, tokenizer)
    _log_turns(train)
    _log(
        "batch",
        f"{len(rows):,} samples; ranks: {plan.num_data_ranks} ({device}); micro-batches of each: "
        f"{num_micro_batches}",
    )
    if len(train) < schedule.batch_size:
        logger.warning(
            f"data.train_batch_size={schedule.batch_size:,} is more than all samples: each step "
            f"trains {len(rows):,}. Fix: set it to {len(rows):,} or less, or give more data"
        )
    _log("steps", f"{total_steps:,}, {schedule.steps_per_epoch:,} an epoch; {lr}")
    sample = int(first[0])
    text = shortened(preview(*train.sample(sample), tokenizer))
    _log("sample", f"{train.location(sample)}, the supervised part is marked:\n{text}")
    return shortened(preview(*train.sample(sample), tokenizer, color=False))


def shortened(text: str) -> str:
    """Return the beginning and the end of a long text."""
    if len(text) <= MAX_PREVIEW:
        return text
    half = MAX_PREVIEW // 2
    return f"{text[:half]}\n… {len(text) - MAX_PREVIEW:,} more characters …\n{text[-half:]}"


def _log(label: str, text: str) -> None:
    logger.info("%s", labelled(label, text))


def _log_rows(dataset: TokenDataset, tokenizer: PreTrainedTokenizerBase) -> None:
    """Log the formats of the rows of a dataset, and warn of what was left out or cut."""
    summary = dataset.summary
    formats = "; ".join(f"{count:,} with {name}" for name, count in summary.rows_by_shape.items())
    ends = tokenizer.convert_ids_to_tokens(sorted(summary.end_token_ids))
    _log("rows", f"{formats}; supervised text ends with {', '.join(map(repr, ends))}")
    if summary.unread_columns:
        _log("", f"nothing reads these columns: {_counted(summary.unread_columns)}")
    if summary.num_bad_rows:
        logger.warning(
            f"left out {summary.num_bad_rows} bad rows ({_counted(summary.bad_rows_by_kind)}), "
            f"listed in {dataset.directory / BAD_ROWS}"
        )
    if summary.num_dropped or summary.num_truncated:
        logger.warning(
            f"over-long rows: {summary.num_dropped} dropped, {summary.num_truncated} cut by "
            f"{summary.num_cut_tokens} tokens, listed in {dataset.directory / OVER_LONG_ROWS}"
        )
    if summary.unread_keys:
        logger.warning(f"nothing reads these keys of messages: {_counted(summary.unread_keys)}")


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"'{name}' {count}" for name, count in counts.items())


def _log_turns(train: Samples) -> None:
    """Log the turns of conversations that are not trained as they stand."""
    if num_apart := train.total("num_apart"):
        num_conversations = train.total("num_conversations")
        text = f"{num_apart:,} of {num_conversations:,} conversations are trained turn by turn"
        _log("turns", f"{text} (data.turns)")
    if num_turns := train.total("num_unlike_prompt"):
        _log("", f"{num_turns:,} turns are not rendered as their generation prompt begins")
    if num_turns := train.total("num_without_reasoning"):
        _log("", f"the template leaves out the reasoning of {num_turns:,} assistant turns")


def _facts(train: Samples, schedule: Schedule, total_steps: int) -> dict[str, dict[str, float]]:
    """Return numbers of each source by its name."""
    found: dict[str, dict[str, float]] = {}
    for source, times in zip(train.sources, schedule.times_until(total_steps), strict=True):
        share, (num_tokens, num_labels) = source.share, source.num_tokens
        found[source.name] = {
            "rows": share.num_rows,
            "tokens": num_tokens,
            "valid_token_frac": num_labels / max(1, num_tokens),
            "repeat": share.num_samples / max(1, share.num_rows),
            "times": times,
        }
    return found
