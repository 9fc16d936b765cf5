"""Writers of the same curves in the formats of different trainers.

Curves have our keys. Each writer uses the names, the layout and the extra rows of its trainer; a key
that the trainer does not log keeps our name.
"""

import csv
import json
import math
from datetime import timedelta
from itertools import starmap
from typing import Any

import numpy as np
from small_files import write_json, write_lines

from trainer.tools.report.run_log import Series

Row = dict[str, Any]
HF_NAMES = {
    "train/loss": "loss",
    "train/lr": "learning_rate",
    "train/grad_norm": "grad_norm",
    "val/loss": "eval_loss",
    "progress/epoch": "epoch",
    "train/token_accuracy": "mean_token_accuracy",
}
SWIFT_NAMES = HF_NAMES | {"memory/max_reserved_gib": "memory(GiB)"}
ROLL_NAMES = {
    "train/loss": "actor/total_loss@sum",
    "train/lr": "actor/lr",
    "train/grad_norm": "actor/grad_norm",
}
SCALED = {"train/lr": "train/lr(1e-3)"}
"""verl and our console log the learning rate in thousandths."""
STEP_S = 3
"""Seconds per step, for formats that log the time since the start."""


def make_curves(*, num_steps=200):
    """Make a usual run with validations every 50 steps; values are exact in 32 bits."""
    generator = np.random.default_rng(0)
    steps = np.arange(1, num_steps + 1)
    evals = np.arange(50, num_steps + 1, 50)
    curves = {
        "train/loss": (steps, 0.8 + np.exp(-steps / 60) + generator.normal(0, 0.03, num_steps)),
        "train/lr": (steps, 1e-4 * np.minimum(1, steps / 20)),
        "train/grad_norm": (steps, np.exp(generator.normal(0, 0.3, num_steps))),
        "val/loss": (evals, 0.9 + np.exp(-evals / 60)),
    }
    return {
        key: Series(at, values.astype(np.float32).astype(np.float64))
        for key, (at, values) in curves.items()
    }


def rows_of(curves, names):
    """Yield (step, metrics) in order of steps. A validation is a separate row after the training
    row.
    """
    table = {}
    for key, series in curves.items():
        name = names.get(key, key)
        factor = 1e3 if name == SCALED["train/lr"] else 1.0
        for step, value in series.by_step().items():
            table.setdefault((step, key.startswith("val/")), {})[name] = factor * value
    for step, is_val in sorted(table):
        yield step, table[step, is_val]


def write_own(directory, curves):
    def line(step, metrics):
        kind = "val" if "val/loss" in metrics else "train"
        nonfinite = {key: str(value) for key, value in metrics.items() if not math.isfinite(value)}
        row = {"step": step, "attempt": 1, "kind": kind, "ts": 1.7e9 + step, **metrics}
        return row | dict.fromkeys(nonfinite) | {"nonfinite": nonfinite}

    return write_lines(directory / "metrics.jsonl", starmap(line, rows_of(curves, {})))


def write_swift(directory, curves):
    total = max(series.ends[1] for series in curves.values())

    def line(step, metrics):
        hours, minutes, seconds = str(timedelta(seconds=step * STEP_S)).split(":")
        return metrics | {
            "global_step/max_steps": f"{step}/{total}",
            "percentage": f"{100 * step / total:.2f}%",
            "elapsed_time": f"{hours}h {minutes}m {seconds}s",
        }

    rows = [*starmap(line, rows_of(curves, SWIFT_NAMES)), {"train_runtime": 1.5, "train_loss": 1.0}]
    write_json(directory / "args.json", {"learning_rate": 1e-4, "train_type": "lora"})
    return write_lines(directory / "logging.jsonl", rows)


def write_transformers(directory, curves):
    history = [metrics | {"step": step} for step, metrics in rows_of(curves, HF_NAMES)]
    last = history[-1]["step"]
    history.append({"step": last, "train_runtime": 9.0, "train_loss": 1.0})
    state = {"max_steps": last, "log_history": history, "stateful": {"a": 1}}
    return write_lines(directory / "trainer_state.json", [json.dumps(state, indent=2)])


def write_verl(directory, curves):
    rows = ({"step": step, "data": metrics} for step, metrics in rows_of(curves, SCALED))
    return write_lines(directory / "run.jsonl", rows)


def write_verl_console(directory, curves):
    def line(step, metrics):
        pairs = " - ".join(f"{key}:{value!r}" for key, value in metrics.items())
        return f"(main_task pid=12) step:{step} - {pairs}\nINFO something else - a:b"

    rows = starmap(line, rows_of(curves, SCALED))
    return write_lines(directory / "console.log", ["Total steps: 200", "step: nothing", *rows])


def write_roll(directory, curves):
    rows = ({"step": step, "metrics": metrics} for step, metrics in rows_of(curves, ROLL_NAMES))
    lines = (f"[2026] metrics_tag: {json.dumps(row)}" for row in rows)
    return write_lines(directory / "worker.log", ["[INFO] start", *lines])


def write_csv(directory, curves):
    """Write both histories. Their columns have no prefix."""
    for name, prefix in (("training_history.csv", "train/"), ("validation_history.csv", "val/")):
        names = {key: key.removeprefix(prefix) for key in curves if key.startswith(prefix)}
        rows = rows_of({key: curves[key] for key in names}, names)
        with (directory / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, ["step", *names.values()])
            writer.writeheader()
            writer.writerows({"step": step} | metrics for step, metrics in rows)
    return directory / "training_history.csv"


def write_wandb_history(directory, curves):
    """Write a run of transformers, whose `_step` counts calls of log."""
    rows = enumerate(rows_of(curves, {"val/loss": "eval/loss"}))
    lines = [{"_step": 7 * n, "train/global_step": step} | row for n, (step, row) in rows]
    return write_lines(directory / "wandb-history.jsonl", lines)


def write_tensorboard(directory, curves):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(directory / "tensorboard")) as writer:
        for step, metrics in rows_of(curves, SCALED):
            for key, value in metrics.items():
                writer.add_scalar(key, value, step)
    return directory / "tensorboard"


def write_jsonl(directory, curves):
    """Write the log of an unknown trainer."""
    rows = rows_of(curves, {"train/loss": "loss", "train/lr": "lr", "val/loss": "val_loss"})
    lines = ({"iter": step, "time": "now", **metrics} for step, metrics in rows)
    return write_lines(directory / "log.jsonl", lines)


WRITERS = {
    "fsdp-sft": write_own,
    "ms-swift": write_swift,
    "transformers": write_transformers,
    "verl": write_verl,
    "verl-console": write_verl_console,
    "roll": write_roll,
    "csv": write_csv,
    "jsonl-wandb-history": write_wandb_history,
    "tensorboard": write_tensorboard,
    "jsonl": write_jsonl,
}
"""Each writer returns the file or directory to read. Its parent can be read too."""
