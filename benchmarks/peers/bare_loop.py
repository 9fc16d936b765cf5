"""A bare loop: transformers' model, one SDPA call per document, the head on supervised tokens only,
and fused AdamW.

With `--dtype bfloat16`, parameters and optimizer state are bfloat16 too, which is the least work
that a loop can do. It runs in one process.
"""

import numpy as np
import torch
import torch.nn.functional as F
from common import BATCH, BETAS, EPS, LR, MAX_NORM, WEIGHT_DECAY, Report, arguments, read_samples
from transformers import AttentionInterface, AutoModelForCausalLM


def per_document(
    module, query, key, value, attention_mask, *, scaling=None, lengths=None, **kwargs
):  # type: ignore[no-untyped-def]
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, dim=1)
    value = value.repeat_interleave(groups, dim=1)
    documents = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    outputs = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
        for q, k, v in documents
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def main() -> None:
    options = arguments()
    AttentionInterface.register("per_document", per_document)
    model = AutoModelForCausalLM.from_pretrained(
        options.case / "model",
        dtype=getattr(torch, options.dtype),
        attn_implementation="per_document",
    )
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)
    samples = read_samples(options.case, options.steps * BATCH)
    report = Report(options.output)
    for step in range(options.steps):
        batch = samples[step * BATCH : (step + 1) * BATCH]
        loss, norm = train_step(model, batch, options.micro_batch)
        optimizer.step()
        optimizer.zero_grad()
        report.add(
            step=step + 1, loss=loss, grad_norm=norm, num_tokens=sum(len(ids) for ids, _ in batch)
        )


def train_step(model, batch, micro_batch: int) -> tuple[float, float]:  # type: ignore[no-untyped-def]
    num_labels = sum(int(mask[1:].sum()) for _, mask in batch)
    total = 0.0
    for start in range(0, len(batch), micro_batch):
        part = batch[start : start + micro_batch]
        lengths = [len(ids) for ids, _ in part]
        input_ids = torch.from_numpy(np.concatenate([ids for ids, _ in part]).astype(np.int64))
        positions = torch.cat([torch.arange(n) for n in lengths])
        hidden = model.model(
            input_ids=input_ids[None],
            position_ids=positions[None],
            lengths=lengths,
            use_cache=False,
        ).last_hidden_state[0]
        is_label = torch.from_numpy(
            np.concatenate([np.append(mask[1:], False) for _, mask in part])
        )
        kept = is_label.nonzero()[:, 0]
        logits = model.lm_head(hidden[kept]).float()
        loss = F.cross_entropy(logits, input_ids[kept + 1], reduction="sum") / num_labels
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    return total, float(norm)


if __name__ == "__main__":
    main()
