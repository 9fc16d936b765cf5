"""AdamW, with weight decay for matrices only."""

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import OptimConfig
from trainer.model.weights import local
from trainer.optim import rounding
from trainer.optim.clip import Optimizer
from trainer.optim.groups import parameter_groups, trainable
from trainer.runtime import seeding

CHUNK_NUMEL = 2**24
"""Number of elements updated at once. Float32 copies of a whole parameter would take the memory
that bfloat16 saves. With smaller chunks a GPU would wait for the host, because an update consists
of about 95 small kernels.
"""


class AdamW(torch.optim.AdamW, Optimizer):
    """torch's fused AdamW, or a chunkwise update for moments or parameters in bfloat16, which torch
    does not support.

    The state exists before the first step, so that a checkpoint can be loaded into it.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        *,
        others: Container[nn.Parameter] = (),
    ) -> None:
        """Optimize all trained parameters except `others`."""
        named = trainable(model)
        self._names = {p: name for p, name in named.items() if p not in others}
        super().__init__(
            parameter_groups(model, self._names, config),
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            fused=True,
        )
        dtype: torch.dtype = getattr(torch, config.state_dtype)
        dtypes = {dtype, *(parameter.dtype for parameter in self._names)}
        self._is_rounded = dtypes != {torch.float32}
        for parameter in self._names:
            self.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, dtype=dtype),
                "exp_avg_sq": torch.zeros_like(parameter, dtype=dtype),
            }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self._is_rounded:
            super().step()
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_rounded(parameter, parameter.grad, group)

    def _step_rounded(
        self,
        parameter: nn.Parameter,
        whole_gradient: Tensor,
        group: dict[str, Any],
    ) -> None:
        """Update like the fused kernel, in float32 and chunk by chunk; values stored in bfloat16
        are rounded at random.

        Only products, sums, quotients and roots are used, each correctly rounded, so no result
        depends on where a shard begins.
        """
        state = self.state[parameter]
        beta1, beta2 = group["betas"]
        lr = group["lr"]
        is_skipped = self.found_inf > 0
        state["step"].add_(1 - self.found_inf)
        # a skipped first step leaves the count at zero, and the corrections would be zero
        step = state["step"].double().clamp(min=1)
        correction1 = 1 - beta1**step
        correction2 = (1 - beta2**step).sqrt()
        keys = [
            seeding.key(self.rounding_key, self._names[parameter], which)
            for which in ("w", "m", "v")
        ]
        tensors = (parameter, state["exp_avg"], state["exp_avg_sq"], whole_gradient)
        chunks = [local(tensor).detach().view(-1).split(CHUNK_NUMEL) for tensor in tensors]
        first = rounding.first_element(parameter)
        for *targets, gradient in zip(*chunks, strict=True):
            gradient.div_(self.grad_scale)
            weight, mean, square = (target.float() for target in targets)
            mean = mean * beta1 + gradient * (1 - beta1)
            square = square * beta2 + (gradient * gradient).mul_(1 - beta2)
            root = (square.sqrt() / correction2).add_(group["eps"])
            update = (mean / root).mul_(lr / correction1)
            weight = weight * (1 - lr * group["weight_decay"]) - update
            for target, value, key in zip(targets, (weight, mean, square), keys, strict=True):
                kept = torch.where(is_skipped, target.float(), value)
                rounding.store(target, kept, key, first)
            first += len(gradient)
