"""Tokens per second on a CPU: this trainer against TRL, transformers' Trainer and a bare loop, in
alternation.

    python benchmarks/speed_cpu.py --train-file train.jsonl --ranks 1 2 --dtypes bfloat16 float32
    --rounds 3 --model 5m --batch 32

Every contender trains the same model from the same weights on the same batches of GSM8K chats, with
AdamW, fp32 parameters (the bare loop: parameters of the compute dtype) and clipping. Rates are
tokens between the end of step `SKIP` and of the last one, over the wall time between; padding is
not counted. The share of the GEMM ceiling is 0 for models that are not dense.
`benchmarks/peers/install.sh` makes the environment of the peers.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from case import BATCH, LR, MODELS, SEED, Case, make_case
from flops import training_flops
from measuring import (
    PEERS_VENV,
    REPOSITORY,
    gemm_gflops,
    header,
    middle,
    peer_versions,
    run_command,
    table,
    write_result,
)

from trainer.tracking import read_metrics

SKIP = 4
PEERS = Path(__file__).resolve().parent / "peers"
NUM_CPUS = 2


@dataclass(frozen=True)
class Contender:
    """A peer script with its options, or (no script) our trainer with overrides."""

    name: str
    script: str | None = None
    options: tuple[str, ...] = ()
    micro_batch: int = 8


OURS = Contender("ours")
TRL = [
    Contender("trl", "hf_trainer.py", micro_batch=8),
    Contender("trl micro-batch 2", "hf_trainer.py", micro_batch=2),
    Contender("trl micro-batch 4", "hf_trainer.py", micro_batch=4),
    Contender("trl micro-batch 16", "hf_trainer.py", micro_batch=16),
    Contender("trl compile", "hf_trainer.py", ("compile",), micro_batch=8),
]
PLAIN = Contender("transformers", "hf_trainer.py", ("plain",), micro_batch=8)
BARE = Contender("bare loop", "bare_loop.py", micro_batch=32)
CONTENDERS = {contender.name: contender for contender in (OURS, *TRL, PLAIN, BARE)}


def run_one(
    contender: Contender,
    case: Case,
    *,
    ranks: int,
    dtype: str,
    steps: int,
    batch: int,
    name: str,
) -> dict[str, Any]:
    """Return rates, losses and peak memory of one run with `steps` steps."""
    log = case.directory / f"{name}.log"
    environment: dict[str, str] = {}
    if contender.script is None:
        words = [
            sys.executable,
            "-m",
            "trainer.launch",
            str(ranks),
            *our_overrides(case, dtype, steps, batch, name),
        ]
        rows_file = case.directory / "runs" / name / "metrics.jsonl"
    else:
        rows_file = case.directory / f"{name}.jsonl"
        words = peer_command(
            contender,
            case,
            ranks=ranks,
            dtype=dtype,
            steps=steps,
            batch=batch,
            output=rows_file,
        )
        environment["OMP_NUM_THREADS"] = str(NUM_CPUS // ranks)
    wall_s, usage = run_command(words, cwd=REPOSITORY, log=log, environment=environment)
    rows = read_steps(rows_file)
    timed = rows[SKIP:]
    seconds = timed[-1]["ts"] - rows[SKIP - 1]["ts"]
    return {
        "tokens_per_s": sum(row["num_tokens"] for row in timed) / seconds,
        "peak_gib": usage.ru_maxrss / 2**20,
        "wall_s": wall_s,
        "losses": [row["loss"] for row in rows],
    }


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Return the steps that our trainer or a peer has logged so far."""
    if path.name != "metrics.jsonl":
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return [
        {
            "ts": row["ts"],
            "loss": row["train/loss"],
            "num_tokens": row["train/total_token_count"],
            "peak_gib": row.get("memory/max_allocated_gib", 0.0),
        }
        for row in read_metrics(path)
        if "train/loss" in row
    ]


def our_overrides(case: Case, dtype: str, steps: int, batch: int, name: str) -> list[str]:
    overrides = {
        "data.train_files": case.train_file,
        "data.cache_dir": case.cache_dir,
        "data.val_ratio": 0,
        "data.train_batch_size": batch,
        "model.partial_pretrain": case.model,
        "model.fsdp_config.param_dtype": dtype,
        "optim.lr": LR,
        "optim.lr_scheduler": "constant",
        "optim.lr_warmup_steps_ratio": 0,
        "trainer.total_training_steps": steps,
        "trainer.save_freq": -1,
        "trainer.seed": SEED,
        "trainer.default_local_dir": case.directory / "runs" / name,
    }
    return [f"{key}={value}" for key, value in overrides.items()]


def peer_command(
    contender: Contender,
    case: Case,
    *,
    ranks: int,
    dtype: str,
    steps: int,
    batch: int,
    output: Path,
) -> list[str]:
    assert contender.script is not None
    python = PEERS_VENV / "bin" / "python"
    launcher = [str(python)]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    options = {"--case": case.directory, "--steps": steps, "--dtype": dtype, "--output": output}
    options |= {"--micro-batch": min(contender.micro_batch, batch), "--batch": batch}
    words = [str(word) for pair in options.items() for word in pair]
    return [
        *launcher,
        str(PEERS / contender.script),
        *words,
        *(f"--option={name}" for name in contender.options),
    ]


def flops_per_token(case: Case, steps: int, batch: int) -> float:
    """Return the operations per token of the timed batches, in a dense model with full attention."""
    data = np.load(case.samples)
    part = slice(SKIP * batch, steps * batch)
    lengths = np.diff(data["offsets"])[part]
    first = data["offsets"][part.start]
    last = data["offsets"][part.stop]
    config = json.loads((case.model / "config.json").read_text())
    num_labels = int(data["loss_mask"][first:last].sum())
    return training_flops(config, lengths.tolist(), num_labels=num_labels) / float(lengths.sum())


def loss_gap(found: list[float], ours: list[float]) -> float:
    """Return the largest relative difference over the steps."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, ours, strict=True))


def measure(arguments: argparse.Namespace, case: Case) -> list[dict[str, Any]]:
    cells = list(itertools.product(arguments.dtypes, arguments.ranks, arguments.contenders))
    runs: dict[tuple[str, int, str], list[dict[str, Any]]] = {cell: [] for cell in cells}
    for number in range(arguments.rounds):
        for dtype, ranks, name in cells if number % 2 == 0 else reversed(cells):
            contender = CONTENDERS[name]
            if contender is BARE and ranks > 1:
                continue
            label = f"{name.replace(' ', '_')}-{dtype}-{ranks}-{number}"
            run = run_one(
                contender,
                case,
                ranks=ranks,
                dtype=dtype,
                steps=arguments.steps,
                batch=arguments.batch,
                name=label,
            )
            runs[dtype, ranks, name].append(run)
            print(
                f"{label}: {run['tokens_per_s']:.0f} tokens/s, {run['peak_gib']:.2f} GiB",
                flush=True,
            )
    rows = []
    for (dtype, ranks, name), found in runs.items():
        if not found:
            continue
        ours = runs.get((dtype, ranks, "ours")) or found
        ratios = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(ours, found, strict=True)]
        rows.append(
            {
                "contender": name,
                "dtype": dtype,
                "ranks": ranks,
                "tokens_per_s": middle(run["tokens_per_s"] for run in found),
                "ours is faster by": middle(ratios),
                "peak_gib": statistics.median(run["peak_gib"] for run in found),
                "largest loss difference": loss_gap(found[0]["losses"], ours[0]["losses"]),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train-file", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument(
        "--contenders", nargs="+", choices=list(CONTENDERS), default=["ours", "trl", BARE.name]
    )
    parser.add_argument("--model", choices=list(MODELS), default="5m")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    ceilings = {name: gemm_gflops(getattr(torch, name)) for name in arguments.dtypes}
    with tempfile.TemporaryDirectory() as directory:
        case = make_case(Path(directory, "case"), arguments.train_file, arguments.model)
        is_dense = arguments.model in ("5m", "149m")
        flops = flops_per_token(case, arguments.steps, arguments.batch) if is_dense else 0.0
        rows = measure(arguments, case)
    for row in rows:
        row["share of the GEMM ceiling"] = (
            row["tokens_per_s"]["median"] * flops / 1e9 / ceilings[row["dtype"]]
        )
    result = {
        **header(),
        "peers": peer_versions("trl", "transformers", "torch", "accelerate"),
        "gemm_gflops": {name: round(ceiling) for name, ceiling in ceilings.items()},
        "flops_per_token": round(flops),
        "rows": rows,
    }
    columns = [
        "dtype",
        "ranks",
        "contender",
        "tokens/s",
        "min to max",
        "ours is faster by",
        "of ceiling",
        "peak GiB",
        "loss difference",
    ]
    print(table(columns, (cells(row) for row in rows)))
    write_result("speed_cpu", result, arguments.output)


def cells(row: dict[str, Any]) -> list[str]:
    rate = row["tokens_per_s"]
    ratio = row["ours is faster by"]
    return [
        row["dtype"],
        str(row["ranks"]),
        row["contender"],
        f"{rate['median']:.0f}",
        f"{rate['min']:.0f} to {rate['max']:.0f}",
        f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})",
        f"{row['share of the GEMM ceiling']:.0%}",
        f"{row['peak_gib']:.2f}",
        f"{row['largest loss difference']:.0e}",
    ]


if __name__ == "__main__":
    main()
