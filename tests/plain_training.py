"""Training by its definition, with plain transformers, peft and torch in float64 and without the
trainer's code.

One document per forward pass, eager attention, and the loss over the supervised tokens of the whole
global batch.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

EPS = 1e-5
BETAS = (0.9, 0.95)
DECAY = 0.05
MIN_LR_RATIO = 0.1
STABLE_RATIO = 0.9
Rows = dict[int, dict[str, float]]


@dataclass(frozen=True)
class Document:
    """Token ids, a mask of the supervised ones, and the source."""

    ids: list[int]
    mask: list[bool]
    source: str


@dataclass(frozen=True, kw_only=True)
class Definition:
    """The definition of a run by its configuration. `steps` holds the documents of each global
    batch.
    """

    model: Path
    steps: Sequence[list[Document]]
    validation: list[Document]
    test_freq: int
    lr: float
    adapter: Path | None = None
    frozen: Sequence[str] = ()
    is_rounded: bool = False
    """Trained parameters start in bfloat16."""
    loss: str = "cross_entropy"
    optimizer: str = "adamw"
    schedule: str = "cosine"
    max_norm: float = math.inf
    skip_above: float = math.inf
    """Steps with a larger gradient norm change nothing."""


@dataclass
class Outcome:
    """Rows of metrics by step, and the trained parameters before and after."""

    train: Rows = field(default_factory=dict)
    val: Rows = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)


AS_DEFINED = {
    "eps": EPS,
    "betas": list(BETAS),
    "weight_decay": DECAY,
    "lr_warmup_steps_ratio": 0.0,
    "min_lr_ratio": MIN_LR_RATIO,
}
"""The constants of a definition as keys of `optim`."""


def train(definition):
    """Run all steps of the definition."""
    torch.manual_seed(0)
    model = load(definition.model, definition.adapter)
    for name, parameter in model.named_parameters():
        if any(re.search(pattern, name) for pattern in definition.frozen):
            parameter.requires_grad_(False)
        elif definition.is_rounded and parameter.requires_grad:
            parameter.data = parameter.data.bfloat16().double()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    outcome = Outcome(before=copied(named))
    optimizer = PlainOptimizer(model, named, definition.optimizer)
    fractions_E = 0.0
    for step, documents in enumerate(definition.steps, start=1):
        model.train()
        row, objective, fractions_E = measured(model, documents, definition, fractions_E)
        objective.backward()
        for parameter in named.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = nn.utils.get_total_norm([p.grad for p in named.values()]).item()
        lr = lr_at(step, len(definition.steps), definition)
        if norm <= definition.skip_above:
            optimizer.step(lr, scale=min(1.0, definition.max_norm / norm))
        model.zero_grad()
        outcome.train[step] = {**row, "train/grad_norm": norm, "train/lr(1e-3)": lr * 1e3}
        if step == len(definition.steps) or step % definition.test_freq == 0:
            outcome.val[step] = validated(model, definition)
    outcome.after = copied(named)
    return outcome


def load(path, adapter=None):
    """Return transformers' model in float64, with an adapter that peft trains."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, **eager)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    return model.double()


def ends(model):
    """The weights of embeddings and output head; one where they are tied."""
    return {model.get_input_embeddings().weight, model.get_output_embeddings().weight}


def copied(named):
    return {name.removeprefix("base_model.model."): p.detach().clone() for name, p in named.items()}


def lr_at(step, total_steps, definition):
    progress = (step - 1) / total_steps
    share = {
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "linear": 1 - progress,
        "constant": 1.0,
        "wsd": 1.0 if progress <= STABLE_RATIO else (1 - progress) / (1 - STABLE_RATIO),
    }[definition.schedule]
    return definition.lr * (MIN_LR_RATIO + (1 - MIN_LR_RATIO) * share)


def token_losses(logits, labels, loss):
    losses = F.cross_entropy(logits.double(), labels, reduction="none")
    return losses * losses.detach().neg().exp() if loss == "dft" else losses


def judged(model, documents, loss, **asked):
    """Yield (document, (cross-entropy, trained loss) of its supervised tokens, number of hits,
    output of the model).
    """
    for document in documents:
        output = model(input_ids=torch.tensor([document.ids]), use_cache=False, **asked)
        where = torch.tensor(document.mask[1:])
        logits = output.logits[0, :-1][where]
        labels = torch.tensor(document.ids[1:])[where]
        hits = (logits.gather(1, labels[:, None])[:, 0] >= logits.amax(-1)).sum().item()
        losses = token_losses(logits, labels, "cross_entropy"), token_losses(logits, labels, loss)
        yield document, losses, hits, output


def measured(model, documents, definition, fractions_E):
    """Return (row of metrics, the value that is differentiated, share of the tokens for each
    expert).
    """
    coefficient = getattr(model.config, "router_aux_loss_coef", None) or 0.0
    routers = [
        p for name, p in model.named_parameters() if re.search(r"\.(gate|router)\.weight$", name)
    ]
    is_routed = bool(coefficient and any(p.requires_grad for p in routers))
    asked = {"output_router_logits": True} if is_routed else {}
    found = list(judged(model, documents, definition.loss, **asked))
    objective = torch.cat([losses for _, (_, losses), *_ in found]).sum() / supervised(documents)
    row = summary(found, "train")
    if definition.loss != "cross_entropy":
        row["train/objective"] = objective.item()
    row["train/total_token_count"] = sum(len(document.ids) for document in documents)
    if is_routed:
        layers = [
            torch.cat(logits_TE)
            for logits_TE in zip(*(output.router_logits for *_, output in found), strict=True)
        ]
        mean_E = torch.stack([logits.softmax(-1).mean(0) for logits in layers]).mean(0)
        router_loss = (fractions_E * mean_E).sum() * len(mean_E)
        objective = objective + coefficient * router_loss
        row["moe/router_loss"] = router_loss.item()
        chosen = [logits.topk(model.config.num_experts_per_tok).indices for logits in layers]
        tokens_LE = torch.stack([one.flatten().bincount(minlength=len(mean_E)) for one in chosen])
        loads_L = tokens_LE.amax(1) / tokens_LE.double().mean(1)
        row["moe/load_max_over_mean"] = loads_L.max().item()
        fractions_E = tokens_LE.sum(0) / sum(map(len, layers))
    return row, objective, fractions_E


def supervised(documents):
    return sum(sum(document.mask[1:]) for document in documents)


def summary(found, kind):
    """Return cross-entropy and hits over all tokens, and for each source that has tokens, if there
    are several.
    """
    count = supervised(document for document, *_ in found)
    sums = Counter[str]()
    tokens = Counter[str]()
    for document, (losses, _), *_ in found:
        sums[document.source] += losses.detach().sum().item()
        tokens[document.source] += len(losses)
    row = {f"{kind}/loss_by/{name}": total / tokens[name] for name, total in sums.items() if name}
    row[f"{kind}/loss"] = sums.total() / count
    row[f"{kind}/token_accuracy"] = sum(hits for _, _, hits, _ in found) / count
    return {**row, f"{kind}/total_valid_token_count": count}


@torch.no_grad()
def validated(model, definition):
    if not definition.validation:
        return {}
    model.eval()
    return summary(list(judged(model, definition.validation, "cross_entropy")), "val")


class PlainOptimizer:
    """torch's AdamW and, for `muon`, its definition for the matrices of layers."""

    def __init__(self, model, named, kind):
        self.parameters = list(named.values())
        decayed = {p for name, p in named.items() if is_decayed(name, p)}
        of_muon = decayed - ends(model) if kind == "muon" else set()
        groups = {}
        for parameter in self.parameters:
            if parameter not in of_muon:
                decay = DECAY if parameter in decayed else 0.0
                groups.setdefault(decay, []).append(parameter)
        settings = [{"params": group, "weight_decay": decay} for decay, group in groups.items()]
        self.adamw = torch.optim.AdamW(settings, betas=BETAS, eps=EPS) if settings else None
        self.momenta = {p: torch.zeros_like(p) for p in self.parameters if p in of_muon}

    @torch.no_grad()
    def step(self, lr, *, scale):
        for parameter in self.parameters:
            parameter.grad *= scale
        for group in self.adamw.param_groups if self.adamw else ():
            group["lr"] = lr
        if self.adamw:
            self.adamw.step()
        for weight, momentum in self.momenta.items():
            weight -= lr * (muon_update(weight.grad, momentum) + DECAY * weight)


def is_decayed(name, parameter):
    *_, owner, leaf = name.split(".")
    return parameter.ndim >= 2 and not leaf.endswith("bias") and "norm" not in owner


def muon_update(gradient, momentum):
    """Add a matrix's gradient to its momentum, and return Muon's update without the rate."""
    momentum.lerp_(gradient, 0.05)
    ahead = torch.lerp(gradient, momentum, 0.95)
    return orthogonal(ahead) * (0.2 * max(ahead.shape[-2:]) ** 0.5)


def orthogonal(matrix):
    """Apply five of Jordan's quintic iterations to the singular values, which is equivalent to
    applying them to the matrix.
    """
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm(dim=-1, keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left * values[..., None, :] @ right
