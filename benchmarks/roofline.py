"""What the roofline of `python -m trainer.cli.plan` says beside what can be measured, and of an 8B model on eight H100.

python benchmarks/roofline.py calibrate   ten shapes on this CPU, with this CPU's own rates: predicted over measured
python benchmarks/roofline.py recipe      the 7B recipe on 8 x H100: what is planned, and what is fastest of what fits
python benchmarks/roofline.py levers      the same recipe with and without what makes it faster
python benchmarks/roofline.py settings    8B, documents of 4,096 tokens, 8 x H100: settings beside each other
"""

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from measuring import gemm_gflops, header, table, write_result
from memory_plan import Case, write_inputs
from torch.distributed.fsdp import FSDPModule

from trainer.config import MAX_TOKENS, RECOMPUTE, Config
from trainer.model import head, load, parallelize
from trainer.model.experts import Routers
from trainer.optim import OPTIMIZERS
from trainer.planner import fake_step, roofline
from trainer.planner.choose import best, search
from trainer.planner.fake_step import full_batch, on_meta, run_step
from trainer.planner.forecast import Forecast, forecaster
from trainer.planner.memory_plan import _job, plan_memory
from trainer.planner.roofline import CARDS, Card, predict
from trainer.run.compose import load_config, with_words
from trainer.runtime.distributed import make_world, mesh_dimensions

SHAPES = [
    Case(128, 4, 1024, 256),
    Case(256, 4, 512, 256),
    Case(256, 4, 2048, 256),
    Case(256, 4, 2048, 1024),
    Case(256, 8, 1024, 256, recompute="true"),
    Case(384, 4, 1024, 512),
    Case(512, 4, 512, 256),
    Case(512, 4, 1024, 256),
    Case(512, 4, 1024, 512, recompute="selective"),
    Case(768, 2, 1024, 512),
]
LENGTH = 4096
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
}
QWEN_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
}
HSDP, KEPT = ("model.fsdp_config.fsdp_size=8",), "model.fsdp_config.reshard_after_forward=false"
SETTINGS = {
    "chosen: nothing recomputed, 8,192 tokens, compiled": (8192, f"{RECOMPUTE}=false", "model.compile=true"),
    "the same, not compiled": (8192, f"{RECOMPUTE}=false"),
    "selective, 16,384 tokens": (16384, f"{RECOMPUTE}=selective"),
    "all recomputed, 16,384 tokens": (16384, f"{RECOMPUTE}=true"),
    "like TRL's defaults: all recomputed, 8 documents": (32768, f"{RECOMPUTE}=true"),
    "like torchtitan's: all recomputed, compiled, 1 document": (4096, f"{RECOMPUTE}=true", "model.compile=true"),
    "torchtitan's selective, 1 document": (4096, f"{RECOMPUTE}=selective"),
}
"""Of others the settings only, in this trainer's own step: TRL's SFTConfig (gradient checkpointing, 8 samples a device)
and torchtitan's llama3 8B (a document a device). Their code computes other operations around them."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["calibrate", "settings", "recipe", "levers"])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "calibrate":
        torch.set_num_threads(1)
        card = this_cpu()
        rows = [calibrated(case, card) for case in SHAPES]
        ratios = sorted(row["predicted_over_measured"] for row in rows)
        found = {"card": vars(card), "shapes": rows, "predicted_over_measured": [ratios[0], ratios[-1]]}
    elif arguments.what == "recipe":
        rows, found = recipe()
    elif arguments.what == "levers":
        rows = [lever(*words) for words in LEVERS]
        found = {"card": vars(CARDS["H100"]), "levers": rows}
    else:
        rows = [setting(name, *words) for name, words in SETTINGS.items()]
        found = {"card": vars(CARDS["H100"]), "settings": rows}
    print(table(list(rows[0]), [row.values() for row in rows]))
    write_result(f"roofline_{arguments.what}", {**header(), **found}, arguments.output)


def this_cpu() -> Card:
    """Its rates on one thread: a large product, a large copy into memory that is there (to get it takes longer than to
    fill it, and a step is given what the one before it gave back), an operation on a single number.
    """
    rate = gemm_gflops(torch.float32, size=1024) / 1e3
    large, copy, small = torch.ones(2**25), torch.ones(2**25), torch.ones(1)
    copy_s, launch_s = (
        best_s(lambda: torch.mul(large, 2, out=copy), 5),
        best_s(lambda: [small * 2 for _ in range(1000)], 5) / 1000,
    )
    return replace(
        CARDS["H100"],
        name="this CPU",
        tflops=rate,
        matmul_tflops=rate,
        attention_tflops=rate,
        float32_tflops=rate,
        memory_gb_s=2 * large.nbytes / copy_s / 1e9,
        launch_us=launch_s * 1e6,
        is_queued=False,
    )


def best_s(work: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def calibrated(case: Case, card: Card) -> dict[str, Any]:
    """The planned step, and the same step computed: the best of five."""
    with tempfile.TemporaryDirectory() as name:
        write_inputs(Path(name), case)
        config = load_config(case.words(Path(name)))
        plan = plan_memory(config, 1)
        predicted = predict(plan.operations, card, num_micro_batches=plan.workload.num_micro_batches)
        measured_s = measure_s(config)
    return {
        "model": case.name,
        "tokens": case.tokens,
        "documents of": case.max_length,
        "recompute": case.recompute,
        "predicted_s": round(predicted.step_s, 4),
        "measured_s": round(measured_s, 4),
        "predicted_over_measured": round(predicted.step_s / measured_s, 3),
    }


def measure_s(config: Config) -> float:
    """Of the best of five steps, after one more."""
    job = _job(config, 1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = make_world(torch.device("cpu"), mesh_dimensions(1, fsdp_size=-1))
        model = on_meta(job)
        parallelize.parallelize(model, job.config.model, world)
        load.materialize(model, world.device, buffer_device=world.device)
        load.load_weights(model, job.source, seed=1)
        optimizer = OPTIMIZERS[config.optim.name](model, config.optim)
        routers = Routers(model, world.device, is_asked=True)
        batches = [full_batch(job.workload.seqlens)] * job.workload.num_micro_batches
        run_step(model, routers, optimizer, batches)
        return best_s(lambda: run_step(model, routers, optimizer, batches), 5)
    finally:
        dist.destroy_process_group()


def recipe() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What the planner tries for the recipe, and which it would take."""
    with tempfile.TemporaryDirectory() as directory:
        config = with_words(qwen_recipe(Path(directory)), [f"{MAX_TOKENS}=auto", f"{RECOMPUTE}=auto"])
        card = CARDS["H100"]
        tried = search(config, 8, card, forecaster(config, card.memory_gib))
    rows = [
        {"words": " ".join(one.change.overrides), "fits": one.fits, "GiB": round(one.forecast.needed_gib, 1)}
        | {"tokens/s": round(one.tokens_per_s)}
        for one in tried
    ]
    asked = {"data.train_batch_size": config.data.train_batch_size, "data.max_length": config.data.max_length}
    asked["model.compile"] = config.model.compile
    taken = best(tried).change.overrides
    return rows, {"card": vars(card), "ranks": 8, "asked": asked, "candidates": rows, "taken": list(taken)}


def qwen_recipe(directory: Path) -> Config:
    (directory / "config.json").write_text(json.dumps(QWEN_7B))
    return load_config(["experiment=phase1_sft_qwen7b_coder", f"model.partial_pretrain={directory}"])


EVERY_PART = {"start", "forward", "head", "backward", "update"}
LEVERS: list[tuple[str, int, tuple[str, ...], tuple[str, ...], tuple[tuple[Any, str, Any], ...]]] = [
    ("one kernel for an RMS norm", 8, (), (), ((fake_step, "fuse_norms", lambda model: None),)),
    ("model.compile, nothing recomputed", 8, (), ("model.compile=true",), ()),
    (
        "model.compile, all recomputed",
        8,
        (f"{RECOMPUTE}=true",),
        (f"{RECOMPUTE}=true", "model.compile=true"),
        (),
    ),
    (
        "model.compile, selective",
        8,
        (f"{RECOMPUTE}=selective",),
        (f"{RECOMPUTE}=selective", "model.compile=true"),
        (),
    ),
    (
        "replicas add gradients once a step (32 ranks, fsdp_size=8)",
        32,
        HSDP,
        HSDP,
        ((FSDPModule, "set_requires_all_reduce", lambda *_, **__: None), (roofline, "ALL_REDUCE", "")),
    ),
    (
        "gathered once a step (32 ranks, fsdp_size=8, reshard_after_forward=false)",
        32,
        (*HSDP, KEPT, f"{MAX_TOKENS}=4096"),
        (*HSDP, KEPT, f"{MAX_TOKENS}=4096"),
        ((FSDPModule, "set_reshard_after_backward", lambda *_, **__: None),),
    ),
    (
        "exchange beside computation",
        8,
        (),
        (),
        ((roofline, "ALONE", {"start", "forward", "head", "backward", "update"}),),
    ),
    (
        "blocks of 4,096 tokens in the head, the loss of 512 at a time",
        8,
        (),
        (),
        ((head, "BLOCK_TOKENS", 1024), (head, "CHUNKS", 1)),
    ),
]
"""What, ranks, words without it and with it, and what is replaced in the code to have it without."""


def lever(name: str, num_ranks: int, words: tuple[str, ...], more: tuple[str, ...], replaced: Any) -> dict[str, Any]:
    """A step of the recipe without and with it."""
    with contextlib.ExitStack() as stack:
        for owner, attribute, value in replaced:
            stack.enter_context(patch.object(owner, attribute, value))
        found = [step_of(num_ranks, words)]
    found.append(step_of(num_ranks, more))
    (before, after), names = found, ("kernels", "GB in memory", "GB exchanged", "GiB of 79")
    row = {key: f"{before[key]:,} -> {after[key]:,}" for key in names}
    gain = before["seconds"] / after["seconds"] - 1
    return {"lever": name, **row, "predicted gain": f"{gain:+.1%}"}


def step_of(num_ranks: int, words: tuple[str, ...]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        plan = plan_memory(with_words(qwen_recipe(Path(directory)), words), num_ranks)
    number, card = plan.workload.num_micro_batches, CARDS["H100"]
    times = {op: n * roofline.repeats(op, number) for op, n in plan.operations.items()}
    exchanged = {op: n for op, n in times.items() if op.kind in roofline.COLLECTIVES}
    return {
        "kernels": sum(times.values()) - sum(exchanged.values()),
        "GB in memory": round(sum(op.size_bytes * n for op, n in times.items() if op not in exchanged) / 1e9),
        "GB exchanged": round(sum(op.size_bytes * n for op, n in exchanged.items()) / 1e9),
        "GiB of 79": round(Forecast(plan, card.memory_gib, is_cuda=True).needed_gib, 1),
        "seconds": predict(plan.operations, card, num_micro_batches=number).step_s,
    }


def setting(name: str, num_tokens: int, *words: str) -> dict[str, Any]:
    """Eight ranks, 128 documents a step: the heaviest rank's share of it."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(LLAMA_8B))
        data = {"max_length": LENGTH, "train_batch_size": 128, "max_token_len_per_gpu": num_tokens}
        keys = [f"model.partial_pretrain={directory}", *(f"data.{key}={value}" for key, value in data.items())]
        plan = plan_memory(load_config([*keys, *words]), 8)
    card, number = CARDS["H100"], plan.workload.num_micro_batches
    predicted = predict(plan.operations, card, num_micro_batches=number)
    flops, tokens = plan.needed_flops or 0.0, plan.workload.num_tokens
    masked = LLAMA_8B["num_hidden_layers"] * 6 * LLAMA_8B["hidden_size"] * LENGTH * tokens  # half of attention's
    rate = number / predicted.step_s / card.tflops / 1e12
    return {
        "settings": name,
        "GiB of 80": round(Forecast(plan, card.memory_gib, is_cuda=True).needed_gib, 1),
        "tokens/s a card": round(tokens * number / predicted.step_s),
        "MFU": f"{flops * rate:.1%}",
        "MFU without masked pairs": f"{(flops - masked) * rate:.1%}",
        "costliest": "; ".join(f"{place} {s / predicted.step_s:.0%}" for place, s in predicted.costliest()),
    }


if __name__ == "__main__":
    main()
