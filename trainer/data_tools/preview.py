"""Which samples are worth a look, and how they are shown: as text for a terminal, as one page for a browser."""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainer.data.preview import marked_parts, preview, visible
from trainer.data.samples import Samples

NUM_BESIDE = 8
OPEN_CHARS = 4000
"""Longer samples are folded on the page."""
STYLE = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#1b2330;--soft:#5b6675;--rule:#e1e5ea;--mark:#cdeede}
@media screen and (prefers-color-scheme:dark){
:root{--page:#11151b;--card:#191f27;--ink:#e6eaf0;--soft:#9aa6b5;--rule:#2b333e;--mark:#14503a}}
body{max-width:1000px;margin:0 auto;padding:20px;background:var(--page);color:var(--ink);font:15px/1.5 system-ui}
h1{font-size:22px}h2{font-size:15px;margin:0;overflow-wrap:anywhere}p,summary{color:var(--soft)}summary{cursor:pointer}
section{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:12px 16px;margin:0 0 12px}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.5 ui-monospace,Menlo,Consolas,monospace;margin:8px 0 0}
mark{background:var(--mark);color:inherit}
"""


@dataclass(frozen=True)
class Shown:
    """A sample, and what is said of it, with why it was picked."""

    where: str
    about: str
    input_ids: np.ndarray
    loss_mask: np.ndarray


def pick(samples: Samples, *, num_each: int, seed: int, side: str = "") -> list[Shown]:
    """The first sample of each source, then `num_each` of each kind: longest, least supervised, random; each once.

    Where rows have several samples, the first `NUM_BESIDE` of the same row stand beside it. `side`: in front of what is
    said of each.
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
    return [_shown(samples, each, side + ", ".join(found or ["of the same row"])) for each, found in reasons.items()]


def _shown(samples: Samples, sample_id: int, reasons: str) -> Shown:
    beside = samples.beside(sample_id)
    part = f"sample {sample_id - beside[0] + 1} of {len(beside)} of its row; " if len(beside) > 1 else ""
    num_tokens, num_supervised = (int(count[0]) for count in samples.counts(np.array([sample_id])))
    source = samples.names[int(samples.source_of([sample_id])[0])]
    about = (
        f"{reasons}; source {source}; {part}{num_tokens} tokens: {num_tokens - num_supervised} prompt, "
        f"{num_supervised} supervised ({num_supervised / num_tokens:.1%})"
    )
    return Shown(visible(samples.location(sample_id)), about, *samples.sample(sample_id))


def as_text(picked: list[Shown], tokenizer: PreTrainedTokenizerBase, *, has_ids: bool) -> Iterator[str]:
    """Blocks of lines for a terminal."""
    for number, shown in enumerate(picked, start=1):
        yield f"--- {number}. {shown.where}: {shown.about}"
        yield preview(shown.input_ids, shown.loss_mask, tokenizer)
        if has_ids:
            yield f"ids, those supervised in []: {_ids(shown)}"


def as_page(title: str, picked: list[Shown], tokenizer: PreTrainedTokenizerBase, *, has_ids: bool) -> str:
    """One HTML page that needs nothing else."""
    sections = "".join(_section(number, shown, tokenizer, has_ids) for number, shown in enumerate(picked, start=1))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>What is trained</title><style>{STYLE}</style></head><body><h1>What is trained</h1>"
        f"<p>{escape(visible(title))}; what is supervised is <mark>marked</mark></p>{sections}</body></html>\n"
    )


def _section(number: int, shown: Shown, tokenizer: PreTrainedTokenizerBase, has_ids: bool) -> str:
    parts = list(marked_parts(shown.input_ids, shown.loss_mask, tokenizer))
    marked = "".join(f"<mark>{escape(text)}</mark>" if is_kept else escape(text) for text, is_kept in parts)
    num_chars = sum(len(text) for text, _ in parts)
    body = f"<pre>\n{marked}</pre>"
    if num_chars > OPEN_CHARS:
        body = f"<details><summary>{num_chars:,} characters</summary>{body}</details>"
    ids = f"<details><summary>ids, those supervised in []</summary><pre>{_ids(shown)}</pre></details>"
    return (
        f"<section><h2>{number}. {escape(shown.where)}</h2>"
        f"<p>{escape(shown.about)}</p>{body}{ids if has_ids else ''}</section>"
    )


def _ids(shown: Shown) -> str:
    pairs = zip(shown.input_ids.tolist(), shown.loss_mask.tolist(), strict=True)
    return " ".join(f"[{token}]" if is_kept else str(token) for token, is_kept in pairs)
