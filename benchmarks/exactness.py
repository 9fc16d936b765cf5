"""Is a run the same run on any number of ranks and micro-batches, and the same as a plain
transformers loop?

    python benchmarks/exactness.py --train-file train.jsonl --steps 40 --ranks 1 2 4 --micro-batches
    1 4 16

Every run is `run_sft.sh` on question/answer rows with the quickstart model in fp32. The reference
tokenizes, masks, orders and trains with transformers and torch alone, one sample per forward pass;
of this project it uses only the two keyed seeds (initial weights, order of an epoch) and the
learning rate of each step.
"""

import argparse
import itertools
import json
import os
import platform
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from trainer.data.order import Share, rows_at
from trainer.quickstart import MODEL_DIR
from trainer.runtime import seeding
from trainer.tracking import read_metrics

REPOSITORY = Path(__file__).resolve().parent.parent
SEED = 1
BATCH = 32
KEYS = ("train/loss", "train/grad_norm")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-file", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument(
        "--output", type=Path, default=REPOSITORY / "benchmarks" / "results" / "exactness.json"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        cache = Path(directory, "cache")
        curves = {
            (ranks, size): our_run(Path(directory), cache, arguments, ranks, size)
            for ranks in arguments.ranks
            for size in arguments.micro_batches
        }
        lrs = next(iter(curves.values()))["lr"]
        reference = plain_loop(MODEL_DIR, arguments, lrs)
    report(curves, reference, arguments)


def our_run(
    directory: Path, cache: Path, arguments: argparse.Namespace, ranks: int, size: int
) -> dict[str, list[float]]:
    name = f"n{ranks}_m{size}"
    overrides = {
        "data.cache_dir": cache,
        "data.train_files": arguments.train_file.resolve(),
        "data.prompt_key": "question",
        "data.response_key": "answer",
        "data.val_ratio": 0,
        "data.train_max_samples": arguments.rows,
        "data.train_batch_size": BATCH,
        "data.micro_batch_size_per_gpu": size,
        "model.fsdp_config.param_dtype": "float32",
        "trainer.total_training_steps": arguments.steps,
        "trainer.save_freq": -1,
        "trainer.seed": SEED,
        "trainer.project_name": "exactness",
        "trainer.experiment_name": name,
    }
    words = [f"{key}={value}" for key, value in overrides.items()]
    started = time.perf_counter()
    subprocess.run(
        ["bash", str(REPOSITORY / "run_sft.sh"), str(ranks), *words],
        cwd=directory,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    rows = read_metrics(directory / "checkpoints" / "exactness" / name / "metrics.jsonl")
    print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
    return {
        **{key: [row[key] for row in rows] for key in KEYS},
        "lr": [row["train/lr(1e-3)"] / 1e3 for row in rows],
    }


def plain_loop(
    model_dir: Path, arguments: argparse.Namespace, lrs: list[float]
) -> dict[str, list[float]]:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    samples = []
    for line in arguments.train_file.read_text().splitlines()[: arguments.rows]:
        row = json.loads(line)
        chat = [
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": row["answer"]},
        ]
        encoded = tokenizer.apply_chat_template(
            chat, return_dict=True, return_assistant_tokens_mask=True
        )
        samples.append(
            (torch.tensor(encoded["input_ids"]), torch.tensor(encoded["assistant_masks"]).bool())
        )
    torch.manual_seed(seeding.key("init", SEED))
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(model_dir), dtype=torch.float32
    )
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.01},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    curve: dict[str, list[float]] = {key: [] for key in KEYS}
    for step, lr in enumerate(lrs):
        epoch, start = divmod(step * BATCH, len(samples))
        _, order = rows_at(np.arange(len(samples)), (Share(len(samples)),), seed=SEED, epoch=epoch)
        loss, norm = plain_step(model, [samples[i] for i in order[start : start + BATCH]])
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        curve["train/loss"].append(loss)
        curve["train/grad_norm"].append(norm)
    return curve


def plain_step(
    model: torch.nn.Module, batch: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[float, float]:
    """Loss and gradient norm of one batch; gradients are left clipped to norm 1."""
    num_labels = sum(int(mask[1:].sum()) for _, mask in batch)
    total = 0.0
    for ids, mask in batch:
        logits = model(input_ids=ids[None]).logits[0, :-1]
        labels = torch.where(mask[1:], ids[1:], -100)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        (loss / num_labels).backward()
        total += loss.item()
    norm = (
        torch.stack([p.grad.double().square().sum() for p in model.parameters()])
        .sum()
        .sqrt()
        .item()
    )  # type: ignore[union-attr]
    for p in model.parameters():
        p.grad *= min(1.0, 1.0 / norm)  # type: ignore[operator]
    return total / num_labels, norm


def report(
    curves: dict[tuple[int, int], dict[str, list[float]]],
    reference: dict[str, list[float]],
    arguments: argparse.Namespace,
) -> None:
    to_plain_loop = {
        f"ranks={n} micro_batch={m}": worst(curve, reference) for (n, m), curve in curves.items()
    }
    pairs = [worst(a, b) for a, b in itertools.combinations(curves.values(), 2)] or [
        dict.fromkeys(KEYS, 0.0)
    ]
    result = {
        "command": f"python benchmarks/exactness.py --steps {arguments.steps} --rows "
        f"{arguments.rows}",
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "cpus": os.cpu_count(),
        "reference_first_last_loss": [reference["train/loss"][0], reference["train/loss"][-1]],
        "worst_relative_difference_to_plain_loop": to_plain_loop,
        "worst_relative_difference_between_runs": {
            key: max(pair[key] for pair in pairs) for key in KEYS
        },
    }
    print(json.dumps(result, indent=2))
    arguments.output.parent.mkdir(exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")


def worst(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> dict[str, float]:
    """Largest relative difference of any step, for each key."""
    return {
        key: max(abs(a - b) / abs(b) for a, b in zip(ours[key], theirs[key], strict=True))
        for key in KEYS
    }


if __name__ == "__main__":
    main()
