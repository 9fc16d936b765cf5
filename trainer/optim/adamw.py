"""AdamW over named parameters, with decay only where it helps."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import OptimConfig
from trainer.optim.clip import Optimizer, local

NamedParameters = Iterable[tuple[str, nn.Parameter]]


class AdamW(torch.optim.AdamW, Optimizer):
    """torch's fused one; its state exists before the first step, so that there is memory to load a checkpoint into."""

    def __init__(self, parameters: NamedParameters, config: OptimConfig) -> None:
        """Two groups: matrices decay, norms and biases do not, whatever their number of dimensions."""
        named = list(parameters)
        groups = [
            {"params": [p for name, p in named if is_decayed(name, p)], "weight_decay": config.weight_decay},
            {"params": [p for name, p in named if not is_decayed(name, p)], "weight_decay": 0.0},
        ]
        super().__init__(
            [group for group in groups if group["params"]],
            lr=0.0,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            fused=True,
        )
        for _, parameter in named:
            self.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }

    def update_of(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """The last step's change of this rank's shard but for its sign, from the moments.

        lr * (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay * w), with w after the update instead of before.
        """
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        weight, mean, square = (local(t).detach() for t in (parameter, state["exp_avg"], state["exp_avg_sq"]))
        step = state["step"].to(weight.device)
        root = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        return (mean / (1 - beta1**step)).div_(root).add_(weight, alpha=group["weight_decay"]).mul_(group["lr"])


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def is_decayed(name: str, parameter: nn.Parameter) -> bool:
    """Norms over heads and the biases of fused experts have two dimensions too."""
    owner, _, leaf = name.rpartition(".")
    return parameter.ndim >= 2 and not leaf.endswith("bias") and "norm" not in owner.rpartition(".")[2]
