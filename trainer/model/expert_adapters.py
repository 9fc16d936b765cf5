"""LoRA adapters for experts: peft's `target_parameters`, computed as grouped products.

peft adds the product of an adapter's two matrices to the stacked weights in every forward pass.
Here the tokens go through both matrices instead, which avoids a tensor as large as the weights.

Shape suffixes: T tokens of a micro-batch, K experts chosen for each, S = T * K (token, expert)
pairs sorted by expert, E experts, R rank, I inputs and O outputs of a product, H hidden size.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import _grouped_linear

from trainer.model.adapter_names import NAME

if TYPE_CHECKING:
    from peft import LoraConfig

_RANK_MULTIPLE = 8
"""Ranks are padded to a multiple of this: grouped products require rows of a multiple of 16 bytes,
which in bfloat16 is 8 elements.
"""


def adapt(
    model: nn.Module,
    name: str,
    weights: Sequence[str],
    settings: "LoraConfig",
) -> None:
    """Wrap the expert module `name` in peft's wrappers, one for each of its `weights`, in peft's
    order.
    """
    from peft.tuners.lora.layer import ParamWrapper

    experts: Any = model.get_submodule(name)
    outermost = experts
    experts.adapters = {}
    for weight in weights:
        outermost = ParamWrapper(
            outermost,
            NAME,
            parameter_name=weight,
            config=settings,
            r=settings.r,
            lora_alpha=settings.lora_alpha,
        )
        experts.adapters[weight] = outermost
    outermost.forward = partial(_forward, outermost, experts)
    model.set_submodule(name, outermost)


def _forward(
    outermost: Any,
    experts: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run the experts with their adapters.

    If the self-check asks for transformers' own forward pass, use the weights that peft computes.
    """
    if experts.config._experts_implementation == "eager":
        return type(outermost).forward(outermost, *args, **kwargs)
    return experts(*args, **kwargs)


def grouped_mm(
    experts: Any,
    hidden_TH: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
) -> Tensor:
    """Compute the same products as transformers' grouped experts, and add the adapters' results.

    `experts.tokens_E` counts the rows of each expert.
    """
    num_tokens, num_chosen = index_TK.shape
    expert_S, order_S = index_TK.flatten().sort()
    ends_E = experts.tokens_E.cumsum(0, dtype=torch.int32)
    product = partial(_product, experts, expert_S=expert_S, ends_E=ends_E)

    input_SH = hidden_TH[order_S // num_chosen]
    if experts.has_gate:
        inner_SI = experts._apply_gate(product("gate_up_proj", input_SH))
    else:
        inner_SI = experts.act_fn(product("up_proj", input_SH))
    output_SH = product("down_proj", inner_SI)
    if getattr(experts, "has_post_expert_norm", False):  # absent before transformers 5.23
        output_SH = experts.post_expert_norm(output_SH)

    output_SH = output_SH * weights_TK.flatten()[order_S, None]
    output_TKH = output_SH[order_S.argsort()].view(num_tokens, num_chosen, -1)
    return output_TKH.sum(1).to(hidden_TH.dtype)


def _product(
    experts: Any,
    name: str,
    input_SI: Tensor,
    *,
    expert_S: Tensor,
    ends_E: Tensor,
) -> Tensor:
    """Multiply each row by its expert's weight, and add the adapter's scaling * B A of the row."""
    bias_SO = getattr(experts, f"{name}_bias")[expert_S] if experts.has_bias else None
    output_SO: Tensor = _grouped_linear(
        input_SI, getattr(experts, name), ends_E, bias=bias_SO, is_transposed=experts.is_transposed
    )
    if name not in experts.adapters:
        return output_SO
    adapter = experts.adapters[name]
    down = adapter.lora_A[NAME].weight
    up = adapter.lora_B[NAME].weight
    # peft stores A as [E * R, I] and B as [O, R * E]: the experts vary slowest in A, fastest in B
    down_ERI = down.view(experts.num_experts, -1, down.shape[1])
    up_EOR = up.view(up.shape[0], -1, experts.num_experts).permute(2, 0, 1).contiguous()
    padding = -down_ERI.shape[1] % _RANK_MULTIPLE
    down_ERI = F.pad(down_ERI, (0, 0, 0, padding))
    up_EOR = F.pad(up_EOR, (0, padding))
    added_SO = _grouped_linear(_grouped_linear(input_SI, down_ERI, ends_E), up_EOR, ends_E)
    return output_SO + added_SO * adapter.scaling[NAME]
