"""Mixtures of experts: matrix products, the load on each expert, and the auxiliary loss that keeps
the load even.

Shape suffixes: T tokens of a micro-batch, K experts chosen for each, E experts, H hidden size.
"""

import copy
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
from transformers.utils.output_capturing import OutputRecorder

from trainer.data.batch import PackedBatch, StepBatch
from trainer.model import expert_adapters
from trainer.model.expert_exchange import ExpertExchange

COUNTED = "counted_grouped_mm"
logger = logging.getLogger(__name__)


def counted_grouped_mm(
    experts: Any,
    hidden_TH: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
) -> Tensor:
    """Compute all experts in one grouped product.

    Unlike transformers' loop over the chosen experts, this does not wait for the device. In
    training, and where the product needs it, each module stores in `tokens_E` the number of tokens
    per expert in the last forward pass.
    """
    exchange: ExpertExchange | None = vars(experts).get("exchange")
    has_adapters = "adapters" in vars(experts)
    if experts.training or exchange is not None or has_adapters:
        index = index_TK.flatten()
        tokens_E = index.new_zeros(experts.num_experts)
        experts.tokens_E = tokens_E.index_add_(0, index, torch.ones_like(index))
    if exchange is not None:
        return _exchanged_grouped_mm(experts, exchange, hidden_TH, index_TK, weights_TK)
    if has_adapters:
        return expert_adapters.grouped_mm(experts, hidden_TH, index_TK, weights_TK)
    return grouped_mm_experts_forward(experts, hidden_TH, index_TK, weights_TK)


ALL_EXPERTS_FUNCTIONS.register(COUNTED, counted_grouped_mm)


def _exchanged_grouped_mm(
    experts: Any,
    exchange: ExpertExchange,
    hidden_TH: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
) -> Tensor:
    """Compute each (token, expert) pair on the rank that holds the expert.

    S pairs of this rank's tokens, R pairs that this rank computes. The routers' weights stay on
    this rank, which applies them to the results that come back.
    """
    order_S = index_TK.flatten().argsort(stable=True)  # by expert, and thus by its rank
    # entry s of the flattened [T, K] belongs to token s // K
    rows_RH, expert_ids_R, num_sent, num_received = exchange.send(
        hidden_TH[order_S // index_TK.shape[1]], experts.tokens_E
    )
    own = _with_parameters(experts, exchange.gather)
    own.num_experts = experts.num_experts // exchange.size
    ones_R1 = rows_RH.new_ones(len(rows_RH), 1)
    # to transformers, each row is a token with a single expert of weight 1
    made_RH = grouped_mm_experts_forward(own, rows_RH, expert_ids_R[:, None], ones_R1)
    # back to the ranks of their tokens, in the order of `send`
    made_SH = exchange.exchange(made_RH, num_sent, num_received)
    # `argsort` of a permutation is its inverse, which restores the order of [T, K]
    made_TKH = made_SH[order_S.argsort()].view(*index_TK.shape, hidden_TH.shape[1])
    return (made_TKH * weights_TK[..., None]).sum(1).to(hidden_TH.dtype)


def compute_without_exchange(experts: Any, *args: Tensor) -> Tensor:
    """Compute all experts on this rank with transformers' own forward. Collective."""
    return type(experts).forward(_with_parameters(experts, experts.exchange.gather_all), *args)


def _with_parameters(experts: Any, gather: Callable[[nn.Parameter], Tensor]) -> Any:
    """Return a copy of the module whose parameters are gathered."""
    own = copy.copy(experts)
    own._parameters = {name: gather(p) for name, p in experts.named_parameters(recurse=False)}
    return own


def experts_of(model: nn.Module) -> list[Any]:
    """Return the expert modules: one for each layer with experts."""
    return [
        module
        for module in model.modules()
        if {"num_experts", "is_transposed"} <= vars(module).keys()
    ]


def num_chosen(config: PretrainedConfig) -> int | None:
    """Return how many routed experts process a token; None if config.json has no single number."""
    number = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None)
    return number if isinstance(number, int) else None


class Routers:
    """Statistics and auxiliary loss of a model's routers over the global batch. Without experts,
    all methods return empty results.

    The loss is transformers' `load_balancing_loss_func`: E * sum over experts of f * P. P is the
    expert's mean router probability over this step's tokens and all layers; f is the share of
    tokens sent to the expert. The loss is not additive over micro-batches. Therefore f comes from
    the previous global step (zero in the first step) and is saved with the state; the rest is a sum
    over tokens. f counts the selected experts, after any selection bias.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        """Attach to the model's routers, and log whether training uses their auxiliary loss."""
        self._experts = experts_of(model)
        if len({experts.num_experts for experts in self._experts}) > 1:
            self._experts = []  # different numbers of experts have no common distribution
        self._recorded = list(_recorded_routers(model))
        config: Any = model.config
        coefficient: float = getattr(config, "router_aux_loss_coef", None) or 0.0
        coefficient = coefficient or getattr(config, "aux_loss_coef", None) or 0.0
        obstacle = self._obstacle(model)
        self._coefficient = 0.0 if obstacle else coefficient
        if self._coefficient:
            for router, index in self._recorded:
                router.register_forward_hook(partial(_note_probabilities, index=index))
        if coefficient:
            logger.info(
                "the router's auxiliary loss (coefficient %g in config.json) is %s",
                coefficient,
                f"excluded from the loss: {obstacle}" if obstacle else "part of the training loss",
            )
        num_experts = self._experts[0].num_experts if self._experts else 0
        self._fractions_E = torch.zeros(num_experts, dtype=torch.float64, device=device)
        self._begin()

    def _obstacle(self, model: PreTrainedModel) -> str:
        """Return the reason why the auxiliary loss of this model cannot be computed, or ''."""
        modules = (sys.modules[kind.__module__] for kind in type(model).__mro__)
        if not any(hasattr(module, "load_balancing_loss_func") for module in modules):
            return "transformers has none for this architecture"
        if not self._experts or len(self._recorded) != len(self._experts):
            return "the router logits of this architecture cannot be captured"
        routers = nn.ModuleList(router for router, _ in self._recorded)
        if not any(parameter.requires_grad for parameter in routers.parameters()):
            return "its routers are not trained"
        return ""

    def _begin(self) -> None:
        self._tokens_LE = self._fractions_E.new_zeros(len(self._experts), len(self._fractions_E))
        self._loss = self._fractions_E.new_zeros(())

    def add(self, batch: PackedBatch, num_tokens: int) -> Tensor:
        """Add the routers' statistics of a micro-batch, and return its part of the auxiliary loss.

        The result is a float64 scalar that can be differentiated. Call this between the forward and
        the backward pass, because recomputation would count the tokens again. `num_tokens`: of the
        global batch.
        """
        if batch.num_tokens and self._experts:
            self._tokens_LE += torch.stack([experts.tokens_E for experts in self._experts])
        if not batch.num_tokens or not self._coefficient:
            return self._loss.new_zeros(())
        sums_E = torch.stack([router.probability_sums_E for router, _ in self._recorded]).sum(0)
        loss = (self._fractions_E * sums_E).sum() * (
            len(sums_E) / (len(self._experts) * num_tokens)
        )
        self._loss += loss.detach()
        return loss * self._coefficient

    def take(self) -> tuple[dict[str, Tensor], Tensor]:
        """Return (sums, tokens by layer and expert) of this rank's micro-batches, and reset both to
        zero.
        """
        loss = self._loss
        tokens_LE = self._tokens_LE
        self._begin()
        return {"moe/router_loss": loss} if self._coefficient else {}, tokens_LE

    def settle(self, tokens: Tensor, batch: StepBatch) -> dict[str, Tensor]:
        """Return the load metric for `tokens`, the counts by layer and expert summed over all
        ranks. The next step's loss uses the experts' shares of these counts.
        """
        if not self._experts:
            return {}
        tokens_LE = tokens.view_as(self._tokens_LE)
        self._fractions_E = tokens_LE.sum(0) / (len(tokens_LE) * batch.num_tokens)
        return {"moe/load_max_over_mean": (tokens_LE.amax(1) / tokens_LE.mean(1)).amax()}

    def state_dict(self) -> dict[str, Any]:
        return {"fractions": self._fractions_E} if self._experts else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if self._experts:
            self._fractions_E = state_dict["fractions"].to(self._fractions_E.device)


def _recorded_routers(model: PreTrainedModel) -> Iterator[tuple[Any, int]]:
    """Yield each module whose router logits transformers records, and the logits' index in its
    output.
    """
    base: Any = model.base_model
    found = base.can_record_outputs.get("router_logits", [])
    for recorder in found if isinstance(found, list) else [found]:
        if isinstance(recorder, OutputRecorder):
            within = f".{recorder.layer_name or ''}".rstrip(".") + "."
            for name, module in model.named_modules():
                if isinstance(module, recorder.target_class) and within in f".{name}.":
                    yield module, recorder.index


def _note_probabilities(
    router: Any,
    args: Any,
    output: Any,
    *,
    index: int,
) -> None:
    """Sum the probabilities over the tokens of a forward pass.

    This hook runs inside the layer, so that recomputation keeps nothing per token for the sum.
    """
    if router.training:
        logits_TE = output[index] if isinstance(output, tuple) else output
        router.probability_sums_E = logits_TE.float().softmax(-1).sum(0)
