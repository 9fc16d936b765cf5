"""Pick samples worth a look and print them as text for a terminal."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainer.data.preview import preview, visible
from trainer.data.samples import Samples

NUM_BESIDE = 8


@dataclass(frozen=True)
class Shown:
    """A sample, and what is said of it, with why it was picked."""

    where: str
    about: str
    input_ids: np.ndarray
    loss_mask: np.ndarray


def pick(samples: Samples, *, num_each: int, seed: int, side: str = "") -> list[Shown]:
    """The first sample of each source, then `num_each` of each kind: longest, least supervised,
    random; each once.

    Where rows have several samples, the first `NUM_BESIDE` of the same row stand beside it. `side`:
    in front of what is said of each.
    """
    reasons: dict[int, list[str]] = {}
    counts = [len(source.samples) for source in samples.sources]
    lengths, num_loss_tokens = samples.counts(np.arange(len(samples)))
    kinds = {
        "first of its source": np.cumsum([0, *counts])[:-1][np.array(counts) > 0],
        "longest": np.argsort(-lengths, kind="stable")[:num_each],
        "least supervised": np.argsort(num_loss_tokens / lengths, kind="stable")[:num_each],
        "random": np.random.default_rng(seed).permutation(len(samples))[:num_each],
    }
    for reason, ids in kinds.items():
        for sample_id in ids.tolist():
            reasons.setdefault(sample_id, []).append(reason)
            for other in samples.beside(sample_id)[:NUM_BESIDE].tolist():
                reasons.setdefault(other, [])
    return [
        _shown(samples, each, side + ", ".join(found or ["of the same row"]))
        for each, found in reasons.items()
    ]


def _shown(samples: Samples, sample_id: int, reasons: str) -> Shown:
    beside = samples.beside(sample_id)
    part = (
        f"sample {sample_id - beside[0] + 1} of {len(beside)} of its row; "
        if len(beside) > 1
        else ""
    )
    num_tokens, num_supervised = (int(count[0]) for count in samples.counts(np.array([sample_id])))
    source = samples.names[int(samples.source_of([sample_id])[0])]
    about = (
        f"{reasons}; source {source}; {part}{num_tokens} tokens: {num_tokens - num_supervised} "
        f"prompt, {num_supervised} supervised ({num_supervised / num_tokens:.1%})"
    )
    return Shown(visible(samples.location(sample_id)), about, *samples.sample(sample_id))


def as_text(
    picked: list[Shown], tokenizer: PreTrainedTokenizerBase, *, has_ids: bool
) -> Iterator[str]:
    """Blocks of lines for a terminal."""
    for number, shown in enumerate(picked, start=1):
        yield f"--- {number}. {shown.where}: {shown.about}"
        yield preview(shown.input_ids, shown.loss_mask, tokenizer)
        if has_ids:
            yield f"ids, those supervised in []: {_ids(shown)}"


def _ids(shown: Shown) -> str:
    pairs = zip(shown.input_ids.tolist(), shown.loss_mask.tolist(), strict=True)
    return " ".join(f"[{token}]" if is_kept else str(token) for token, is_kept in pairs)
