"""Measures the cost of a save for the steps around it, in the background and in the foreground, on
a disk of 20 MB/s.

    python benchmarks/async_save.py --steps 240 --save-freq 40

Two gloo ranks of one thread train a Qwen2-architecture model of 5.4 M parameters; every write of a
checkpoint sleeps as long as a disk of the given rate would take. One run saves behind training, one
in its way; the two alternate. Step times are those of the log; a step counts as "while saving" from
the save until it is committed.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import header, write_result
from ranks import run_ranks
from toy import write_model_config
from toy_runs import Recipe, run

from trainer.checkpoint import fsio
from trainer.runtime.distributed import World

MODEL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "head_dim": 64,
    "intermediate_size": 688,
}
BATCH = 24


def slow_run(
    world: World, run_dir: Path, source: Any, recipe: Recipe, bytes_per_s: float
) -> list[dict[str, float]]:
    """Run one rank. Return the rows of the log, with the times (monotonic) of step ends and of
    starts and ends of saves.
    """
    events: list[dict[str, float]] = []

    def throttle(operation: fsio.Operation) -> None:
        if operation.kind == "write":
            time.sleep(len(operation.data) / bytes_per_s)
        elif operation.kind == "phase" and operation.path.name in ("open.begin", "commit.agreed"):
            events.append({operation.path.name: time.monotonic()})

    fsio.observer = throttle
    result = run(world, run_dir, source, recipe)
    return [*events, *({"step": step, **row} for step, row in result.rows)]


def step_times(rows: list[dict[str, float]], save_freq: int) -> dict[str, list[float]]:
    """Return the seconds of each step, grouped by whether a save was in progress. The first steps
    of the run do not count.
    """
    times: dict[str, list[float]] = {"saving": [], "idle": []}
    is_saving = False
    for row in rows:
        if "train/time(s)" not in row:
            continue
        is_done = "time/train/checkpoint_bg_s" in row
        if row["step"] > 10:
            times["saving" if is_saving else "idle"].append(row["train/time(s)"])
        is_saving = (is_saving and not is_done) or row["step"] % save_freq == 0
    return times


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def measure(arguments: argparse.Namespace, root: Path, source: Any) -> list[dict[str, float]]:
    """Return one row per round: step times while saving and otherwise, stall and write seconds."""
    found = []
    for number in range(arguments.rounds):
        row: dict[str, float] = {}
        for name, save_freq, is_async in (
            ("async", arguments.save_freq, True),
            ("sync", arguments.save_freq, False),
        ):
            recipe = Recipe(
                total_steps=arguments.steps,
                save_freq=save_freq,
                keep=1,
                batch_size=BATCH,
                async_save=is_async,
                save_timeout_s=300,
            )
            run_dir = root / f"{name}{number}"
            rows = run_ranks(
                slow_run, 2, run_dir, source, recipe, arguments.mb_per_s * 1e6, timeout_s=3600
            )[0]
            stalls = [r["time/train/checkpoint_s"] for r in rows if "time/train/checkpoint_s" in r]
            row[f"{name}_stall_s"] = statistics.median(stalls)
            if is_async:
                times = step_times(rows, save_freq)
                row |= {
                    f"{kind}_{what}_s": f(v)
                    for kind, v in times.items()
                    for what, f in STATISTICS.items()
                }
                row |= {f"{kind}_steps": len(v) for kind, v in times.items()}
                row["write_s"] = statistics.median(
                    r["time/train/checkpoint_bg_s"]
                    for r in rows
                    if "time/train/checkpoint_bg_s" in r
                )
                size_bytes = sum(
                    f.stat().st_size for f in run_dir.glob("global_step_*/**/*") if f.is_file()
                )
                row["checkpoint_mb"] = size_bytes / 1e6
        row["p95_ratio"] = row["saving_p95_s"] / row["idle_p95_s"]
        row["median_ratio"] = row["saving_median_s"] / row["idle_median_s"]
        print(json.dumps({key: round(value, 4) for key, value in row.items()}), flush=True)
        found.append(row)
    return found


STATISTICS = {"median": statistics.median, "p95": p95}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--save-freq", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mb-per-s", type=float, default=20.0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model_dir = Path(directory, "model")
        model_dir.mkdir()
        source = write_model_config(model_dir, **MODEL)
        rounds = measure(arguments, Path(directory), source)
    medians = {key: statistics.median(row[key] for row in rounds) for key in rounds[0]}
    write_result("async_save", {**header(), "median over rounds": medians}, arguments.output)
    print(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
