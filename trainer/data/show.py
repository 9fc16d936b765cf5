"""Shows the training data: as log lines, as text with marked supervised parts, and as counts."""

import hashlib
import itertools
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainer.data.batch_plan import RankPlan, Schedule, length_facts
from trainer.data.prepare import BAD_ROWS, OVER_LONG_ROWS
from trainer.data.samples import Samples, TokenDataset
from trainer.runtime.log import labelled

_INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that control a terminal or change the reading direction. They are escaped, because the
data may be malicious.
"""
NUM_PLACES = 5
MAX_PREVIEW = 1600
"""Maximum number of characters of the sample shown at the start of a run. With the other lines,
they fill a screen.
"""
NUM_COMPARED = 256
MAX_CANDIDATES = 20_000
"""Maximum numbers of validation and training samples compared at the start of a run."""
MAX_SHARE_IN_TRAIN = 0.1
TURNS = {
    "num_apart": "conversations divided into one sample per turn (data.turns)",
    "num_unlike_prompt": "turns that do not begin with their generation prompt's header",
    "num_without_reasoning": "assistant turns rendered without their reasoning",
}
"""{count in `Summary`: its name in the log}."""
Tree = dict[str, Any]


def visible(text: str) -> str:
    """Return a string in which characters that are not safe to print are escaped."""
    return _INVISIBLE.sub(lambda found: ascii(found[0])[1:-1], text)


def preview(
    input_ids: np.ndarray,
    loss_mask: np.ndarray,
    tokenizer: PreTrainedTokenizerBase,
    *,
    color: bool = False,
) -> str:
    """Decode a sample. Its supervised parts are green with `color`, in [[…]] without."""
    opening, closing = ("\x1b[32m", "\x1b[0m") if color else ("[[", "]]")
    changes = np.flatnonzero(np.diff(loss_mask.astype(np.int8))) + 1
    text = ""
    for start, end in itertools.pairwise([0, *changes.tolist(), len(input_ids)]):
        ids = input_ids[start:end].tolist()
        part = visible(str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)))
        text += f"{opening}{part}{closing}" if loss_mask[start] else part
    return text


def shown(
    samples: Samples,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_each: int,
    seed: int,
) -> Iterator[str]:
    """Yield the place and the text of the first sample of each source, then of the `num_each`
    longest, least supervised and random samples. No sample appears twice.
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
        yield preview(*samples.sample(sample_id), tokenizer, color=sys.stdout.isatty())


def stats(train: Samples, validation: Samples | None) -> Tree:
    """Return counts of the samples by source, of the rows read for them, and of duplicates."""
    sides = {"train": train}
    if validation:
        sides["validation"] = validation
    datasets = {
        source.dataset: f"{side} {source.name}"
        for side, samples in reversed(sides.items())
        for source in samples.sources
    }
    return {
        **{side: _counts(samples) for side, samples in sides.items()},
        "read": {name: dataset.summary.as_json() for dataset, name in datasets.items()},
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


def _lengths(lengths: np.ndarray, num_loss_tokens: np.ndarray) -> Tree:
    return {
        "samples": len(lengths),
        "tokens": int(lengths.sum()),
        "supervised_tokens": int(num_loss_tokens.sum()),
        **(length_facts(lengths, num_loss_tokens) if len(lengths) else {}),
    }


def _duplicates(samples: Samples, others: Samples) -> Tree:
    """Count the samples that have the same token ids as a sample in `others`, or as an earlier one
    if `others` is `samples`, and list the first places. Digests of 8 bytes are compared.
    """
    first: dict[bytes, int] = {}
    for number in range(len(others)):
        first.setdefault(_digest(others, number), number)
    places = []
    for number in range(len(samples)):
        original = first.get(_digest(samples, number))
        if original is not None and (samples is not others or original != number):
            places.append([samples.location(number), others.location(original)])
    return {
        "count": len(places),
        "num_samples": len(samples),
        "share": len(places) / max(1, len(samples)),
        "places": places[:NUM_PLACES],
    }


def _digest(samples: Samples, number: int) -> bytes:
    return hashlib.blake2b(samples.sample(number)[0].tobytes(), digest_size=8).digest()


def share_in_train(validation: Samples, train: Samples) -> float:
    """Estimate the share of validation samples with the same token ids as a training sample.

    Only some samples of both are compared, so that the start of a run stays fast. `stats` compares
    all of them.
    """
    num_compared = min(NUM_COMPARED, len(validation))
    ids = np.linspace(0, len(validation) - 1, num_compared).astype(np.int64)
    candidates = np.flatnonzero(
        np.isin(_sizes(train, np.arange(len(train))), _sizes(validation, ids))
    )
    # only every `stride`-th candidate is hashed, so each match stands for `stride` matches
    stride = 1 + len(candidates) // MAX_CANDIDATES
    known = {_digest(train, number) for number in candidates[::stride].tolist()}
    num_found = sum(_digest(validation, number) in known for number in ids.tolist())
    return min(1.0, stride * num_found / num_compared)


def _sizes(samples: Samples, ids: np.ndarray) -> np.ndarray:
    """Return one number per sample that combines its token count and its supervised token count."""
    lengths, num_loss_tokens = samples.counts(ids)
    return (lengths << 32) + num_loss_tokens


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
    """Log the training data, the steps, the rows that were left out or cut, and the next sample as
    the model sees it. Return the text of this sample, with its supervised parts in [[…]].
    """
    rows = schedule.rows(schedule.start.step + 1)
    counts = _counts(train)
    total = counts["total"]
    share = total["supervised_tokens"] / total["tokens"]
    held_out = f"; {len(validation):,} validation samples" if validation else ""
    _log(
        "data",
        f"{len(train):,} samples, {total['tokens']:,} tokens, {share:.1%} of them supervised"
        f"{held_out}",
    )
    if len(train.sources) > 1 or train.sources[0].repeat != 1:
        for name, facts in counts["sources"].items():
            share = facts["supervised_tokens"] / facts["tokens"]
            repeat = facts["rows_per_epoch"] / facts["rows"]
            _log(
                "source",
                f"{name}: {facts['rows']:,} rows, {facts['tokens']:,} tokens, {share:.1%} "
                f"supervised; each row {repeat:.3g} times per epoch",
            )
    sources = [*train.sources, *(validation.sources if validation else ())]
    for dataset in dict.fromkeys(source.dataset for source in sources):
        _log_rows(dataset, tokenizer)
    _log("batch", f"{len(rows):,} rows; ranks: {plan.num_data_ranks} ({device})")
    if len(train) < schedule.batch_size:
        logger.warning(
            f"data.train_batch_size={schedule.batch_size} exceeds the number of samples: each step "
            f"trains all {len(rows):,}. Fix: set it to {len(rows)} or less, or add data"
        )
    if validation and (share := share_in_train(validation, train)) >= MAX_SHARE_IN_TRAIN:
        logger.warning(
            f"about {share:.0%} of the validation samples are also training samples, so val/loss does "
            f"not show overfitting. Fix: remove them from one side; `data stats` counts and lists them"
        )
    _log("steps", f"{total_steps:,}, {schedule.steps_per_epoch:,} per epoch; {lr}")
    sample = int(train.of_rows(rows)[0])
    text = preview(*train.sample(sample), tokenizer)
    if len(text) > MAX_PREVIEW:
        half = MAX_PREVIEW // 2
        text = f"{text[:half]}\n… {len(text) - MAX_PREVIEW:,} more characters …\n{text[-half:]}"
    _log("sample", f"{train.location(sample)}, supervised parts in [[…]]:\n{text}")
    return text


def _log(label: str, text: str) -> None:
    logger.info("%s", labelled(label, text))


def _log_rows(dataset: TokenDataset, tokenizer: PreTrainedTokenizerBase) -> None:
    """Log the row formats of a dataset, and warn about rows that were left out or cut."""
    summary = dataset.summary
    formats = "; ".join(f"{count:,} with {name}" for name, count in summary.rows_by_shape.items())
    ends = tokenizer.convert_ids_to_tokens(sorted(summary.end_token_ids))
    text = f"{formats}; supervised text ends with {', '.join(map(repr, ends)) or 'no end token'}"
    _log("rows", text)
    for name, text in TURNS.items():
        if count := getattr(summary, name):
            _log("turns", f"{count:,} {text}")
    if summary.unread_columns:
        _log("", f"unused columns: {_counted(summary.unread_columns)}")
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
    if summary.num_unknown:
        logger.warning(
            f"{summary.num_unknown} supervised tokens are {tokenizer.unk_token!r}, so the model learns "
            f"to write it. Fix: use a tokenizer with byte fallback, or add tokens (model.new_tokens)"
        )
    if summary.unread_keys:
        logger.warning(f"unused keys of messages: {_counted(summary.unread_keys)}")


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"'{name}' {count}" for name, count in counts.items())
