"""AdamW over named parameters, with decay only where it helps."""

import torch
from torch import nn

from trainer.config import OptimConfig


def build_adamw(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Fused AdamW in two groups: matrices decay, norms and biases do not, whatever their number of dimensions.

    State is created before the first step, so that there is memory to load a checkpoint into.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decayed = [p for name, p in trainable.items() if _is_decayed(name, p)]
    plain = [p for name, p in trainable.items() if not _is_decayed(name, p)]
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


def _is_decayed(name: str, parameter: nn.Parameter) -> bool:
    """Norms over heads and the biases of fused experts have two dimensions too."""
    owner, _, leaf = name.rpartition(".")
    return parameter.ndim >= 2 and not leaf.endswith("bias") and "norm" not in owner.rpartition(".")[2]
