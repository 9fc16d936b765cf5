"""What a batch looks like: numbers for the log that follow from lengths alone. Computed beside training, no torch."""

from collections.abc import Sequence

import numpy as np

from trainer.data.batch_plan import Limits


def length_facts(lengths: np.ndarray, num_loss_tokens: np.ndarray) -> dict[str, float]:
    """Mean, largest and 95th percentile of prompt, completion and total tokens of samples (int arrays [N]).

    The completion is what is supervised, the prompt the rest.
    """
    kinds = {"prompt": lengths - num_loss_tokens, "completion": num_loss_tokens, "total": lengths}
    facts: dict[str, float] = {}
    for kind, tokens in kinds.items():
        rank_95 = min(len(tokens) - 1, int(0.95 * len(tokens)))
        facts[f"seq_{kind}_len_mean"] = float(tokens.mean())
        facts[f"seq_{kind}_len_max"] = int(tokens.max())
        facts[f"seq_{kind}_len_p95"] = int(np.partition(tokens, rank_95)[rank_95])
    return facts


def deal_facts(
    lengths: np.ndarray, num_loss_tokens: np.ndarray, dealt: Sequence[Sequence[Sequence[int]]], limits: Limits
) -> dict[str, float]:
    """How a global batch was packed and dealt (`dealt`: for each data rank micro-batches of indices), as metrics."""
    num_tokens, tokens_by_rank = int(lengths.sum()), [sum(int(lengths[m].sum()) for m in rank if m) for rank in dealt]
    num_empty = sum(not members for rank in dealt for members in rank)
    num_full = sum(bool(members) for rank in dealt for members in rank)
    facts = {
        "data/valid_token_frac": int(num_loss_tokens.sum()) / num_tokens,
        "data/pad_frac": num_empty / (num_tokens + num_empty),
        "data/token_imbalance": max(tokens_by_rank) * len(dealt) / num_tokens,
        "data/empty_label": int((num_loss_tokens == 0).sum()),
    }
    if limits.max_tokens is not None:
        facts["data/packing_efficiency"] = num_tokens / (num_full * limits.max_tokens)
    return facts
