"""Tokens per second and share of the GEMM ceiling on GPUs: sizes, levers, and TRL on the same card.

    python benchmarks/gpu.py --sizes 0.6b 1.7b 4b 8b --ranks 8 \
        --levers "as configured" compiled LoRA --trl 1 2 4 8

Models of the Qwen3 family's shapes with random weights train chats of 20 to 4,096 tokens, packed to
at most `--pack-tokens` tokens per forward pass. A size that `plan` says does not fit is left out.
Every run is the launcher (or TRL on one card, `benchmarks/peers`) in processes of its own, which
end once `--steps` steps are logged: nothing is saved. The ceiling is one large bf16 matrix product.
TRL runs without packing, because it packs correctly only with the flash-attn package.
`--device cpu --sizes tiny` runs the same code on a machine without a GPU, to try it.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from case import LR, QUICKSTART_CONFIG, SEED, Case, prepare_tokens, write_samples
from make_quickstart import ENGLISH, train_tokenizer, write_tokenizer
from measuring import REPOSITORY, RESULTS, header, middle, table, write_result
from speed_cpu import PEERS, SKIP, flops_per_token, read_steps

from trainer.runtime import seeding
from trainer.runtime.processes import kill_tree
from trainer.tools.plan.memory import plan_memory
from trainer.train.start.compose import load_config

SHAPES = {
    # (hidden, layers, query heads, key heads, intermediate, vocabulary)
    "tiny": (128, 2, 2, 1, 256, 4096),
    "0.6b": (1024, 28, 16, 8, 3072, 151936),
    "1.7b": (2048, 28, 16, 8, 6144, 151936),
    "4b": (2560, 36, 32, 8, 9728, 151936),
    "8b": (4096, 36, 32, 8, 12288, 151936),
}
TIED = ("tiny", "0.6b", "1.7b", "4b")
BATCH = 64
NUM_CHATS = 1024
POLL_S = 0.2
NUM_LAUNCHER_WORDS = 4
LORA = {"model.lora_rank": "16", "model.random_weights": "false"}
LEVERS = {
    "as configured": {},
    "compiled": {"model.compile": "true"},
    "one document per forward": {"model.attention": "per_document"},
    "no recomputation": {"model.enable_gradient_checkpointing": "false"},
    "selective recomputation": {"model.enable_gradient_checkpointing": "selective"},
    "full recomputation": {"model.enable_gradient_checkpointing": "true"},
    "ZeRO-3 alone": {"model.fsdp_config.reshard_after_forward": "true"},
    "loader in the process": {"data.num_workers": "0"},
    "LoRA": LORA,
    "compiled LoRA": {**LORA, "model.compile": "true"},
    "bfloat16 state with full recomputation": {
        "optim.state_dtype": "bfloat16",
        "model.master_dtype": "bfloat16",
        "model.enable_gradient_checkpointing": "true",
    },
}


MATMUL = """
import sys, torch
from measuring import gemm_gflops
print(gemm_gflops(torch.bfloat16, int(sys.argv[1]), device=sys.argv[2]))
"""
WRITE_WEIGHTS = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.from_pretrained(sys.argv[1])
with torch.device(sys.argv[2]):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model.save_pretrained(sys.argv[1])
"""
CARD_FACTS = ("name", "driver_version", "memory.total", "power.limit", "clocks.max.sm")


def matmul_tflops(device: str) -> float:
    """Return the rate of one large square product, the highest rate that a model's products can
    reach.

    It runs in a separate process, whose CUDA context does not stay on the GPU.
    """
    size = "8192" if device == "cuda" else "1024"
    words = [sys.executable, "-c", MATMUL, size, device]
    ran = subprocess.run(words, check=True, capture_output=True, text=True, cwd=RESULTS.parent)
    return float(ran.stdout) / 1000


def card_facts() -> dict[str, Any]:
    """Return the state of the first GPU from `nvidia-smi`, and the versions of CUDA and NCCL."""
    words = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(CARD_FACTS)}", "--format=csv,noheader"]
    said = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    versions = {"CUDA": torch.version.cuda, "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    return dict(zip(CARD_FACTS, said.split(", "), strict=True)) | versions


def planned_gib(command: list[str], num_ranks: int) -> float:
    """Return the memory of a rank that `plan` predicts for a command of `our_command`."""
    return plan_memory(load_config(command[NUM_LAUNCHER_WORDS:]), num_ranks).needed_gib


def make_case(directory: Path, size: str) -> Case:
    """Write chats of random length (20 to 4,096 tokens, half of them below 400), tokenizer and
    configuration, without weights.
    """
    case = Case(directory)
    case.model.mkdir(parents=True)
    hidden, layers, heads, key_heads, intermediate, vocabulary = SHAPES[size]
    config = QUICKSTART_CONFIG | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": 128,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "tie_word_embeddings": size in TIED,
    }
    (case.model / "config.json").write_text(json.dumps(config))
    words = ENGLISH.read_text().split()
    write_tokenizer(case.model, train_tokenizer(words))
    generator = np.random.default_rng(seeding.key("benchmark", SEED))
    with case.train_file.open("w") as file:
        for length in np.clip(generator.lognormal(6.0, 0.9, NUM_CHATS), 20, 2500).astype(int):
            text = [words[i] for i in generator.integers(0, len(words), length)]
            turns = [("user", text[: length // 4] or text), ("assistant", text[length // 4 :])]
            row = {"messages": [{"role": role, "content": " ".join(part)} for role, part in turns]}
            file.write(json.dumps(row) + "\n")
    return case


def our_command(
    case: Case, run_dir: Path, arguments: argparse.Namespace, lever: dict[str, str]
) -> list[str]:
    overrides: dict[str, Any] = {
        "data.train_files": case.train_file,
        "data.cache_dir": case.cache_dir,
        "data.val_ratio": 0,
        "data.train_batch_size": BATCH,
        "data.max_length": 4096,
        "data.truncation": "right",
        "data.max_token_len_per_gpu": arguments.pack_tokens,
        "model.partial_pretrain": case.model,
        "model.random_weights": "true",
        "model.enable_gradient_checkpointing": arguments.recompute,
        "optim.lr": LR / 10,
        "trainer.device": arguments.device,
        # ended before the save of the last step, for which the disk must have room all the same
        "trainer.total_training_steps": arguments.steps + 1,
        "trainer.save_freq": -1,
        "trainer.checkpoint.save_contents": "[model,optimizer,extra]",
        "trainer.seed": SEED,
        "trainer.default_local_dir": run_dir,
        "trainer.log_every": 1,
        **lever,
    }
    launcher = [sys.executable, "-m", "trainer.launch", str(arguments.ranks)]
    return launcher + [f"{key}={value}" for key, value in overrides.items()]


def run_until(
    words: list[str], rows_file: Path, num_rows: int, *, timeout_s: float
) -> tuple[list[dict[str, Any]], str]:
    """Return the rows of the training steps, and the output.

    The processes are ended once there are `num_rows`, after `timeout_s`, or if this process is
    asked to end.
    """
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    log = (
        rows_file.parent.with_suffix(".log")
        if rows_file.name == "metrics.jsonl"
        else rows_file.with_suffix(".log")
    )
    rows: list[dict[str, Any]] = []
    with log.open("w") as output:
        process = subprocess.Popen(
            words, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        deadline = time.monotonic() + timeout_s
        try:
            while len(rows) < num_rows and process.poll() is None and time.monotonic() < deadline:
                time.sleep(POLL_S)
                rows = read_steps(rows_file) if rows_file.exists() else []
        finally:
            if process.poll() is None:
                kill_tree(process.pid)
                process.wait()
    rows = read_steps(rows_file) if rows_file.exists() else []
    return rows[:num_rows], log.read_text()


def rate(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the tokens per second of the steps after `SKIP`, by step."""
    seconds = [
        after["ts"] - before["ts"]
        for before, after in zip(rows[SKIP - 1 :], rows[SKIP:], strict=False)
    ]
    return middle(row["num_tokens"] / s for row, s in zip(rows[SKIP:], seconds, strict=True))


def measure_size(
    size: str, directory: Path, arguments: argparse.Namespace, ceiling: float
) -> Iterator[dict[str, Any]]:
    """Yield one row per run, as soon as it ends."""
    case = make_case(directory / "case", size)
    write_samples(case, prepare_tokens(case, max_length=4096, truncation="right"))
    flops = flops_per_token(case, arguments.steps, BATCH)
    if any("LoRA" in name for name in arguments.levers):  # it trains pretrained weights only
        words = [sys.executable, "-c", WRITE_WEIGHTS, str(case.model), arguments.device]
        subprocess.run(words, check=True)
    for name in arguments.levers:
        run_dir = directory / "runs" / name.replace(" ", "_")
        run_dir.parent.mkdir(exist_ok=True)
        command = our_command(case, run_dir, arguments, LEVERS[name])
        planned = planned_gib(command, arguments.ranks)
        if planned > arguments.memory_gib:
            row = {"run": f"{size} {name}", "error": f"needs {planned:.1f} GiB by the plan"}
        else:
            row = attempt(f"{size} {name}", command, run_dir / "metrics.jsonl", arguments)
        yield with_share(row | {"planned_gib": planned}, flops, ceiling)
    for micro_batch in arguments.trl:
        output = directory / f"trl_{micro_batch}.jsonl"
        command = trl_command(case, output, arguments, micro_batch)
        name = f"{size} trl, {micro_batch} samples a forward"
        yield with_share(attempt(name, command, output, arguments), flops, ceiling)


def with_share(row: dict[str, Any], flops: float, ceiling: float) -> dict[str, Any]:
    """Add a run's share of the GEMM ceiling, given the operations per token of full training.

    LoRA does about two thirds of these operations, so its runs have no share.
    """
    if "tokens_per_s" in row and "LoRA" not in row["run"]:
        row["share of the GEMM ceiling"] = row["tokens_per_s"]["median"] * flops / 1e12 / ceiling
    return row


def trl_command(
    case: Case, output: Path, arguments: argparse.Namespace, micro_batch: int
) -> list[str]:
    options = {
        "case": case.directory,
        "output": output,
        "steps": arguments.steps,
        "batch": BATCH,
        "micro-batch": micro_batch,
        "dtype": "bfloat16",
        "device": arguments.device,
    }
    words = [sys.executable, str(PEERS / "hf_trainer.py"), "--random-weights"]
    words += [f"--{key}={value}" for key, value in options.items()]
    return words + (["--option=recompute"] if arguments.recompute == "true" else [])


def attempt(
    name: str, words: list[str], rows_file: Path, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Measure one run. A failure, such as out of memory, is a result too, with the rate of the
    steps before it.
    """
    started = time.time()
    rows, output = run_until(words, rows_file, arguments.steps, timeout_s=arguments.timeout_s)
    found: dict[str, Any] = {"run": name}
    if len(rows) < arguments.steps:
        found["error"] = f"{len(rows)} of {arguments.steps} steps:\n{output[-1500:]}"
        print(f"{name}: {len(rows)} of {arguments.steps} steps", flush=True)
    if len(rows) > SKIP:
        found |= {
            "tokens_per_s": rate(rows),
            "first_step_after_s": round(rows[0]["ts"] - started, 1),
            "peak_gib": max(row.get("peak_gib", 0.0) for row in rows),
            "losses": [round(row["loss"], 4) for row in rows],
        }
        print(f"{name}: {found['tokens_per_s']['median']:.0f} tokens/s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=["0.6b", "1.7b"])
    parser.add_argument(
        "--levers", nargs="+", choices=list(LEVERS), default=[*LEVERS][:1], metavar="LEVER"
    )
    parser.add_argument(
        "--trl", nargs="+", type=int, default=[], metavar="SAMPLES", help="micro-batches of TRL"
    )
    parser.add_argument("--ranks", type=int, default=1, help="cards; TRL takes one of them")
    parser.add_argument("--memory-gib", type=float, default=75.0, help="of a card, less a margin")
    parser.add_argument("--recompute", choices=("false", "selective", "true"), default="false")
    parser.add_argument("--pack-tokens", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--timeout-s", type=float, default=300.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    # a run that outlives this process would keep the card
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    ceiling = matmul_tflops(arguments.device)
    card = card_facts() if arguments.device == "cuda" else {"name": "cpu"}
    rows: list[dict[str, Any]] = []
    result = {**header(), "card": card, "gemm_tflops": round(ceiling, 3), "rows": rows}
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as directory:
            for row in measure_size(size, Path(directory), arguments, ceiling):
                rows.append(row)
                write_result("gpu", result, arguments.output)  # an interruption loses one run
    print(table(["run", "tokens/s", "of ceiling", "peak GiB"], (cells(row) for row in rows)))


def cells(row: dict[str, Any]) -> list[str]:
    if "tokens_per_s" not in row:
        return [row["run"], "failed", "", ""]
    share = f"{row['share of the GEMM ceiling']:.0%}" if "share of the GEMM ceiling" in row else ""
    return [row["run"], f"{row['tokens_per_s']['median']:.0f}", share, f"{row['peak_gib']:.1f}"]


if __name__ == "__main__":
    main()
