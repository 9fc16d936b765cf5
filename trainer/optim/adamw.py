"""AdamW over named parameters, with decay only where it helps."""

import torch
from torch import nn

from trainer.config import OptimConfig


def build_adamw(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Fused AdamW in two groups: matrices decay, vectors (norms, biases) do not.

    State is created before the first step, so that there is memory to load a checkpoint into.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decayed = [p for p in trainable.values() if p.ndim >= 2]
    plain = [p for p in trainable.values() if p.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=0.0,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        fused=True,
    )
    for parameter in trainable.values():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return optimizer
