"""Which samples are worth a look, and what is said of each."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainer.data.chat import preview
from trainer.data.samples import Samples


@dataclass(frozen=True)
class Shown:
    """A sample and why it was picked."""

    sample_id: int
    reasons: tuple[str, ...]


def pick(samples: Samples, *, num_each: int, seed: int) -> list[Shown]:
    """The first sample of each source, then `num_each` of each kind: longest, least supervised, random; each once."""
    reasons: dict[int, list[str]] = {}
    firsts = np.cumsum([0, *(len(source.indices) for source in samples.sources)])[:-1]
    share = samples.num_loss_tokens / samples.lengths
    kinds = {
        "first of its source": firsts[[len(source.indices) > 0 for source in samples.sources]],
        "longest": np.argsort(-samples.lengths, kind="stable")[:num_each],
        "least supervised": np.argsort(share, kind="stable")[:num_each],
        "random": np.random.default_rng(seed).permutation(len(share))[:num_each],
    }
    for reason, ids in kinds.items():
        for sample_id in ids.tolist():
            reasons.setdefault(sample_id, []).append(reason)
    return [Shown(sample_id, tuple(found)) for sample_id, found in reasons.items()]


def headline(samples: Samples, shown: Shown) -> str:
    """Where a sample comes from and how long it is."""
    num_tokens, num_supervised = int(samples.lengths[shown.sample_id]), int(samples.num_loss_tokens[shown.sample_id])
    source = samples.names[int(samples.source_of([shown.sample_id])[0])]
    return (
        f"{samples.location(shown.sample_id)} (source {source}; {', '.join(shown.reasons)}): {num_tokens} tokens, "
        f"{num_tokens - num_supervised} prompt + {num_supervised} supervised ({num_supervised / num_tokens:.1%})"
    )


def as_text(
    samples: Samples, picked: list[Shown], tokenizer: PreTrainedTokenizerBase, *, has_ids: bool
) -> Iterator[str]:
    """Blocks of lines for a terminal."""
    for number, shown in enumerate(picked, start=1):
        ids, mask = samples.sample(shown.sample_id)
        block = f"--- {number}. {headline(samples, shown)}\n{preview(ids, mask, tokenizer)}"
        if has_ids:
            block += "\nids: " + " ".join(
                f"[[{token}]]" if kept else str(token) for token, kept in zip(ids, mask, strict=True)
            )
        yield block
