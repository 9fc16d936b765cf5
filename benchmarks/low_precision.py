"""Measures the effect of moments and parameters in bfloat16 on the loss, and whether they take the
planned memory.

    python benchmarks/low_precision.py

The quickstart's model from random weights, each way with the same data in the same order: the
difference to float32 of the same seed stands beside the spread between seeds.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import REPOSITORY, header, run_command, table, write_result
from memory_plan import GIB, Case, extremes, run_case

from trainer.tracking import read_metrics

STATES = "optim.state_dtype=bfloat16"
MASTER = "model.master_dtype=bfloat16"
KINDS = {
    "float32": (),
    "moments in bfloat16": (STATES,),
    "moments and parameters in bfloat16": (STATES, MASTER),
}
OFFLOAD = "layer inputs in host memory"
EVERY = 10
"""Number of steps whose mean loss is one point of the curve."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    runs = [
        {"kind": kind, "seed": seed, **train(words, seed, arguments)}
        for seed in arguments.seeds
        for kind, words in KINDS.items()
    ]
    cases = {(kind, ranks): case_of(kind, ranks) for kind in (*KINDS, OFFLOAD) for ranks in (1, 2)}
    memory = [{"kind": kind, **run_case(case)} for (kind, _), case in cases.items()]
    peaks = [
        {key: row[key] for key in ("kind", "ranks", "planned_peak_bytes", "measured_peak_bytes")}
        for row in memory
    ]
    result = {**header(), "runs": runs, "memory": peaks, "planned_over_measured": extremes(memory)}
    write_result("low_precision", result, arguments.output)
    print(readable(result))


def train(words: tuple[str, ...], seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the mean loss of the last `EVERY` steps, and the loss of the held-out rows at the end."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        values = {
            "data.train_batch_size": arguments.batch,
            "trainer.total_training_steps": arguments.steps,
            "trainer.seed": seed,
            "trainer.device": "cpu",
            "trainer.save_freq": -1,
            "trainer.test_freq": -1,
            "trainer.default_local_dir": directory / "run",
        }
        command = [
            sys.executable,
            "-m",
            "trainer",
            *(f"{key}={value}" for key, value in values.items()),
            *words,
        ]
        one_thread = {"OMP_NUM_THREADS": "1"}
        run_command(command, cwd=REPOSITORY, log=directory / "log", environment=one_thread)
        rows = read_metrics(directory / "run" / "metrics.jsonl")
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    found = {
        "last_loss": statistics.fmean(losses[-EVERY:]),
        "val_loss": [row["val/loss"] for row in rows if "val/loss" in row][-1],
    }
    print(seed, words, found["val_loss"], flush=True)
    return found


def case_of(kind: str, ranks: int) -> Case:
    recompute = "offload" if kind == OFFLOAD else "true"
    return Case(
        512,
        8,
        2048,
        512,
        ranks=ranks,
        dtype="bfloat16",
        recompute=recompute,
        more=KINDS.get(kind, ()),
    )


def readable(result: dict[str, Any]) -> str:
    """Print the table for README.md."""
    rows = []
    for kind in KINDS:
        runs = [run for run in result["runs"] if run["kind"] == kind]
        base = [run for run in result["runs"] if run["kind"] == "float32"]
        values = [run["val_loss"] for run in runs]
        differences = [
            run["val_loss"] - other["val_loss"] for run, other in zip(runs, base, strict=True)
        ]
        seeds = ", ".join(f"{value:.4f}" for value in values)
        change = ", ".join(f"{value:+.4f}" for value in differences)
        last = ", ".join(f"{run['last_loss']:.3f}" for run in runs)
        rows.append([kind, last, seeds, change])
    curves = table(
        ["kept", f"mean loss of the last {EVERY} steps, by seed", "val/loss", "difference"], rows
    )
    cells = [
        [
            row["kind"],
            row["ranks"],
            f"{row['planned_peak_bytes'] / GIB * 1024:.1f}",
            f"{row['measured_peak_bytes'] / GIB * 1024:.1f}",
            f"{row['planned_peak_bytes'] / row['measured_peak_bytes']:.4f}",
        ]
        for row in result["memory"]
    ]
    return curves + "\n\n" + table(["kept", "ranks", "planned MiB", "measured MiB", "ratio"], cells)


if __name__ == "__main__":
    main()
