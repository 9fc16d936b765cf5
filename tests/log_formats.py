"""Writers of the same curves in the formats of different trainers, to compare what is read of them.

Curves have our keys; each writer uses the names, the layout and the extra rows of its trainer. A
value that is NaN stays NaN. Keys that a trainer never logs are written under our name.
"""

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainer.tools.report.run_log import Series

Curves = Mapping[str, Series]
HF_NAMES = {
    "train/loss": "loss",
    "train/lr": "learning_rate",
    "train/grad_norm": "grad_norm",
    "val/loss": "eval_loss",
    "progress/epoch": "epoch",
    "train/token_accuracy": "mean_token_accuracy",
}
SWIFT_NAMES = HF_NAMES | {
    "train/token_accuracy": "token_acc",
    "memory/max_reserved_gib": "memory(GiB)",
}
STEP_S = 3
"""Seconds a step in formats that log the time since the start."""


def make_curves(*, num_steps: int = 200, seed: int = 0) -> dict[str, Series]:
    """A usual run: the loss falls with noise, a warm-up, validation every 50 steps; values
    exact in 32 bits.
    """
    generator = np.random.default_rng(seed)
    steps = np.arange(1, num_steps + 1, dtype=np.int64)
    evals = np.arange(50, num_steps + 1, 50, dtype=np.int64)
    curves = {
        "train/loss": 0.8 + np.exp(-steps / 60) + generator.normal(0, 0.03, num_steps),
        "train/lr": 1e-4 * np.minimum(1, steps / 20),
        "train/grad_norm": np.exp(generator.normal(0, 0.3, num_steps)),
        "val/loss": 0.9 + np.exp(-evals / 60),
    }
    x_axes = {key: evals if key == "val/loss" else steps for key in curves}
    return {
        key: Series(x_axes[key], values.astype(np.float32).astype(np.float64))
        for key, values in curves.items()
    }


def rows_of(
    curves: Curves, names: Mapping[str, str] | None = None
) -> Iterator[tuple[int, dict[str, float]]]:
    """(step, metrics) by rising step, training before validation of the same step, as two rows."""
    table: dict[tuple[int, bool], dict[str, float]] = {}
    for key, series in curves.items():
        for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
            table.setdefault((step, key.startswith("val/")), {})[(names or {}).get(key, key)] = (
                value
            )
    for step, is_val in sorted(table):
        yield step, table[step, is_val]


def write_own(directory: Path, curves: Curves) -> Path:
    lines = []
    for step, metrics in rows_of(curves):
        row: dict[str, Any] = {
            "step": step,
            "attempt": 1,
            "kind": "val" if "val/loss" in metrics else "train",
        }
        row["ts"] = 1.7e9 + step
        row |= {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        nonfinite = {key: str(value) for key, value in metrics.items() if not math.isfinite(value)}
        lines.append(row | ({"nonfinite": nonfinite} if nonfinite else {}))
    return write_lines(directory / "metrics.jsonl", lines)


def write_swift(directory: Path, curves: Curves) -> Path:
    total = int(max(series.steps[-1] for series in curves.values()))
    lines: list[dict[str, Any]] = []
    for step, metrics in rows_of(curves, SWIFT_NAMES):
        minutes, seconds = divmod(step * STEP_S, 60)
        hours, minutes = divmod(minutes, 60)
        lines.append(
            metrics
            | {
                "global_step/max_steps": f"{step}/{total}",
                "percentage": f"{100 * step / total:.2f}%",
                "elapsed_time": f"{hours}h {minutes}m {seconds}s"
                if hours
                else f"{minutes}m {seconds}s",
                "remaining_time": "1d 2h 3m 4s",
                "train_speed(s/it)": float(STEP_S),
            }
        )
    lines.append(
        {"train_runtime": 1.5, "train_loss": 1.0, "global_step/max_steps": f"{total}/{total}"}
    )
    lines.append(
        {
            "last_model_checkpoint": "/out/checkpoint-200",
            "best_metric": 0.5,
            "log_history": [{"loss": 1}],
        }
    )
    (directory / "args.json").write_text(json.dumps({"learning_rate": 1e-4, "train_type": "lora"}))
    return write_lines(directory / "logging.jsonl", lines)


def write_transformers(directory: Path, curves: Curves) -> Path:
    history = [metrics | {"step": step} for step, metrics in rows_of(curves, HF_NAMES)]
    last = history[-1]["step"]
    history.append({"step": last, "train_runtime": 9.0, "train_loss": 1.0, "total_flos": 1e15})
    state = {
        "global_step": last,
        "max_steps": last,
        "logging_steps": 1,
        "log_history": history,
        "stateful": {"a": 1},
    }
    path = directory / "trainer_state.json"
    path.write_text(json.dumps(state, indent=2))
    return path


def write_verl(directory: Path, curves: Curves) -> Path:
    return write_lines(
        directory / "run.jsonl", [{"step": s, "data": m} for s, m in rows_of(scaled_lr(curves))]
    )


def write_verl_console(directory: Path, curves: Curves) -> Path:
    lines = ["Total training steps: 200", "step: nothing"]
    for step, metrics in rows_of(scaled_lr(curves)):
        pairs = " - ".join(f"{key}:{value!r}" for key, value in metrics.items())
        lines += [f"(main_task pid=12) step:{step} - {pairs}", "INFO something else - a:b"]
    path = directory / "console.log"
    path.write_text("\n".join(lines) + "\n")
    return path


def write_roll(directory: Path, curves: Curves) -> Path:
    names = {
        "train/loss": "actor/total_loss@sum",
        "train/lr": "actor/lr",
        "train/grad_norm": "actor/grad_norm",
    }
    lines = ["[INFO] start"]
    for step, metrics in rows_of(curves, names):
        lines.append(
            f"[2026-01-01 00:00:00] metrics_tag: {json.dumps({'step': step, 'metrics': metrics})}"
        )
    path = directory / "worker.log"
    path.write_text("\n".join(lines) + "\n")
    return path


def write_csv(directory: Path, curves: Curves) -> Path:
    """Write the pair of histories; columns of a history lack its prefix."""
    for name, prefix in (("training_history.csv", "train/"), ("validation_history.csv", "val/")):
        own = {
            key: series
            for key, series in curves.items()
            if key.startswith("val/") == (prefix == "val/")
        }
        names = {key: key.removeprefix(prefix) for key in own}
        write_table(directory / name, rows_of(own, names), ["step", *names.values()])
    return directory / "training_history.csv"


def write_wandb_panel(directory: Path, curves: Curves) -> Path:
    """Write a panel's export: the columns of a run, each with its range."""
    names = {key: f"run 7 - {key}" for key in curves}
    rows = (
        (step, row | {f"{name}__MIN": -9.0 for name in row}) for step, row in rows_of(curves, names)
    )
    columns = ["Step", *(f"{name}{part}" for name in names.values() for part in ("", "__MIN"))]
    return write_table(directory / "wandb_export.csv", rows, columns)


def write_wandb_history(directory: Path, curves: Curves) -> Path:
    """Write a run of transformers, whose `_step` counts calls of log."""
    names = {key: f"eval/{key[4:]}" if key.startswith("val/") else key for key in curves}
    rows = [
        {"_step": 7 * call, "_timestamp": 1.7e9 + call, "train/global_step": step} | row
        for call, (step, row) in enumerate(rows_of(curves, names))
    ]
    return write_lines(directory / "wandb-history.jsonl", rows)


def write_table(
    path: Path, rows: Iterator[tuple[int, dict[str, float]]], columns: list[str]
) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for step, metrics in rows:
            writer.writerow({columns[0]: step} | metrics)
    return path


def write_tensorboard(directory: Path, curves: Curves) -> Path:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(directory / "tensorboard")) as writer:
        for step, metrics in rows_of(scaled_lr(curves)):
            for key, value in metrics.items():
                writer.add_scalar(key, value, step)
    return directory / "tensorboard"


def write_jsonl(directory: Path, curves: Curves) -> Path:
    """Some trainer of one's own."""
    names = {"train/loss": "loss", "train/lr": "lr", "val/loss": "val_loss"}
    return write_lines(
        directory / "log.jsonl",
        [{"iter": s, "time": "now", **m} for s, m in rows_of(curves, names)],
    )


def scaled_lr(curves: Curves) -> Curves:
    """As verl and we log it: `train/lr(1e-3)`."""
    scaled = dict(curves)
    if rates := scaled.pop("train/lr", None):
        scaled["train/lr(1e-3)"] = Series(rates.steps, rates.values * 1e3)
    return scaled


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


WRITERS: dict[str, Callable[[Path, Curves], Path]] = {
    "fsdp-sft": write_own,
    "ms-swift": write_swift,
    "transformers": write_transformers,
    "verl": write_verl,
    "verl-console": write_verl_console,
    "roll": write_roll,
    "csv": write_csv,
    "csv-wandb-panel": write_wandb_panel,
    "jsonl-wandb-history": write_wandb_history,
    "tensorboard": write_tensorboard,
    "jsonl": write_jsonl,
}
"""Each returns the file or directory to read; its parent may be read too."""
