"""What the roofline of `python -m trainer.cli.plan` says beside what can be measured, and of an 8B model on eight H100.

python benchmarks/roofline.py calibrate   ten shapes on this CPU, with this CPU's own rates: predicted over measured
python benchmarks/roofline.py settings    8B, documents of 4,096 tokens, 8 x H100: settings beside each other
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import gemm_gflops, header, table, write_result
from memory_plan import Case, write_inputs

from trainer.config import Config
from trainer.model import load, parallelize
from trainer.model.experts import Routers
from trainer.optim import OPTIMIZERS
from trainer.planner.fake_step import full_batch, on_meta, run_step
from trainer.planner.forecast import Forecast
from trainer.planner.memory_plan import _job, plan_memory
from trainer.planner.roofline import CARDS, Card, predict
from trainer.run.compose import load_config
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
RECOMPUTE = "model.enable_gradient_checkpointing"
SETTINGS = {
    "chosen: nothing recomputed, 8,192 tokens, compiled": (8192, f"{RECOMPUTE}=false", "model.compile=true"),
    "the same, not compiled": (8192, f"{RECOMPUTE}=false"),
    "selective, 16,384 tokens": (16384, f"{RECOMPUTE}=selective"),
    "the 7B recipe: all recomputed, 16,384 tokens": (16384, f"{RECOMPUTE}=true"),
    "like TRL's defaults: all recomputed, 8 documents": (32768, f"{RECOMPUTE}=true"),
    "like torchtitan's: all recomputed, compiled, 1 document": (4096, f"{RECOMPUTE}=true", "model.compile=true"),
    "torchtitan's selective, 1 document": (4096, f"{RECOMPUTE}=selective"),
}
"""Of others the settings only, in this trainer's own step: TRL's SFTConfig (gradient checkpointing, 8 samples a device)
and torchtitan's llama3 8B (a document a device). Their code computes other operations around them."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["calibrate", "settings"])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "calibrate":
        torch.set_num_threads(1)
        card = this_cpu()
        rows = [calibrated(case, card) for case in SHAPES]
        ratios = sorted(row["predicted_over_measured"] for row in rows)
        found = {"card": vars(card), "shapes": rows, "predicted_over_measured": [ratios[0], ratios[-1]]}
    else:
        rows = [setting(name, *words) for name, words in SETTINGS.items()]
        found = {"card": vars(CARDS["H100"]), "settings": rows}
    print(table(list(rows[0]), [row.values() for row in rows]))
    write_result(f"roofline_{arguments.what}", {**header(), **found}, arguments.output)


def this_cpu() -> Card:
    """Its rates on one thread: a large product, a large copy, an operation on a single number."""
    rate = gemm_gflops(torch.float32, size=1024) / 1e3
    large, small = torch.ones(2**25), torch.ones(1)
    copy_s, launch_s = best_s(lambda: large * 2, 5), best_s(lambda: [small * 2 for _ in range(1000)], 5) / 1000
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
