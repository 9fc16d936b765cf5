"""Mixtures of experts: router statistics and the router's auxiliary loss follow the global batch alone.

The loss is compared with a plain loop over transformers' own model, one document at a time, in float64, to the
tolerances of `test_invariance.py`.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from toy import ToySamples, build_toy_model, optim_config, toy_run, write_model_config
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.data.batch_plan import Schedule, Share
from trainer.data.loader import ValidationBatches
from trainer.loop.fit import fit
from trainer.model.experts import Routers
from trainer.optim.schedule import LrSchedule
from trainer.runtime import seeding

STEPS, EXPERTS, CHOSEN, COEFFICIENT = 4, 8, 2, 0.5
SIZES = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 32}
KEYS = ("train/loss", "train/grad_norm", "moe/router_loss", "moe/load_max_over_mean")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("model")
    return write_model_config(path, "qwen3_moe", router_aux_loss_coef=COEFFICIENT, tie_word_embeddings=False, **SIZES)


def train(world: Any, source: Any, *, is_asked: bool = True, **settings: Any) -> dict[str, list[float]]:
    """Columns of a short run's rows; `settings` of the model but for the limits of a micro-batch."""
    limits = {name: settings.pop(name) for name in ("max_samples", "max_tokens") if name in settings}
    model = build_toy_model(world, source, **settings)
    routers = Routers(model, world.device, is_asked=is_asked)
    parts = toy_run(world, model, ToySamples(), total_steps=STEPS, routers=routers, **limits)
    parts.validation_batches = ValidationBatches(ToySamples(5, seed=1), parts.batches.plan, batch_size=4)
    assert fit(parts) == 0
    rows: Any = parts.tracking
    return {key: rows.column(key) for key in (*KEYS, "val/loss")}


def plain_loop(source: Any) -> dict[str, list[float]]:
    """Stock transformers, nothing of ours but the order: the fractions are those of the step before."""
    torch.manual_seed(seeding.key("init", 7))
    config = AutoConfig.from_pretrained(source.path)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").double()
    model.set_experts_implementation("eager")
    samples, schedule = ToySamples(), Schedule((Share(24),), 8, seed=3)
    lr = LrSchedule.from_config(optim_config(), peak_lr=3e-3, total_steps=STEPS)
    groups = [[p for p in model.parameters() if (p.ndim < 2) == is_vector] for is_vector in (False, True)]
    optimizer = torch.optim.AdamW(
        [{"params": params, "weight_decay": decay} for params, decay in zip(groups, (0.01, 0.0), strict=True)],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    found: dict[str, list[float]] = {key: [] for key in KEYS}
    fractions = torch.zeros(EXPERTS, dtype=torch.float64)
    for step in range(1, STEPS + 1):
        loss, count, logits = torch.zeros((), dtype=torch.float64), 0, []
        for index in schedule.samples(step):
            ids, mask = (torch.from_numpy(x) for x in samples.sample(int(index)))
            output = model(input_ids=ids[None].long(), output_router_logits=True)
            labels = torch.where(mask[1:], ids[1:].long(), -100)
            loss = loss + F.cross_entropy(output.logits[0, :-1], labels, reduction="sum", ignore_index=-100)
            count += int(mask[1:].sum())
            logits.append(torch.stack(output.router_logits))
        probabilities = torch.cat(logits, dim=1).softmax(-1)
        router_loss = EXPERTS * (fractions * probabilities.mean((0, 1))).sum()
        (loss / count + COEFFICIENT * router_loss).backward()
        tokens = F.one_hot(probabilities.topk(CHOSEN).indices, EXPERTS).sum((1, 2)).double()
        fractions = tokens.sum(0) / probabilities[..., 0].numel()
        norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
        for p in model.parameters():
            p.grad *= min(1.0, 1.0 / norm.item())
        for group in optimizer.param_groups:
            group["lr"] = lr.lr_at(step)
        optimizer.step()
        optimizer.zero_grad()
        load = (tokens.amax(1) / tokens.mean(1)).max()
        for key, value in zip(KEYS, (loss / count, norm, router_loss, load), strict=True):
            found[key].append(value.item())
    return found


@pytest.fixture(scope="module")
def expected(source: Any) -> dict[str, list[float]]:
    return plain_loop(source)


def differing(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> list[str]:
    tolerances = dict(zip(KEYS, (1e-6, 1e-5, 1e-6, 0.0), strict=True))
    return [key for key in KEYS if ours[key] != pytest.approx(theirs[key], rel=tolerances[key], abs=1e-12)]


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (1, {}),
        (1, {"is_packed": False, "enable_gradient_checkpointing": True}),
        (2, {"max_samples": 1, "enable_gradient_checkpointing": "selective"}),
        (4, {"max_tokens": 48, "fsdp_size": 2}),
        (5, {"max_samples": 1}),
    ],
    ids=["1 rank", "per document, recomputed", "2 ranks", "4 ranks, HSDP", "a rank without samples"],
)
def test_the_router_loss_and_the_loads_are_those_of_the_plain_loop(
    source: Any, expected: dict[str, list[float]], world_size: int, settings: dict[str, Any]
) -> None:
    found = run_ranks(train, world_size, source, **settings)[0]
    assert differing(found, expected) == [], (found, expected)
    assert found["moe/router_loss"][0] == 0.0 and min(found["moe/router_loss"][1:]) > 1


def test_without_the_router_loss_only_its_metric_and_its_gradient_are_gone(
    source: Any, expected: dict[str, list[float]]
) -> None:
    found = run_ranks(train, 1, source, is_asked=False)[0]
    assert found["moe/router_loss"] == [] and len(found["moe/load_max_over_mean"]) == STEPS
    first, second, *_ = found["train/grad_norm"]
    assert first == pytest.approx(expected["train/grad_norm"][0], rel=1e-5)
    assert second != pytest.approx(expected["train/grad_norm"][1], rel=1e-3)
