"""Two runs with their reports: fine-tuning that overfits, made by hand, and GRPO with seven bursts.

`python tests/report_examples.py DIR` writes their pages to DIR, to be looked at in a browser.
"""

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from report_curves import swift_run

from trainer.tools.report.analyse import analyse
from trainer.tools.report.result import (
    Anomaly,
    CheckItem,
    Finding,
    Generalisation,
    LearningRate,
    MetricSummary,
    Mover,
    Report,
    Throughput,
)
from trainer.tools.report.run_log import CheckpointState, RunLog, Series, ServingCheck

SEED = 3
DIRECTIONS = {
    "train/loss": "down",
    "val/loss": "down",
}

SFT_GROUPS = {
    "train": "optimisation",
    "val": "validation",
    "memory": "memory",
    "data": "data",
    "throughput": "timing",
    "time": "timing",
}
CHECKLIST = (
    CheckItem(
        "loss_falls", "start", "training loss falls in the first 100 steps", "pass", "2.15 to 1.88"
    ),
    CheckItem(
        "rate_rises", "start", "learning rate rises in warm-up", "pass", "0 to 2e-5 in 100 steps"
    ),
    CheckItem(
        "device_busy",
        "start",
        "GPU utilisation above 80 %",
        "unknown",
        "system/gpu_util was not logged",
    ),
    CheckItem(
        "val_not_rising",
        "checkpoint",
        "validation loss does not rise",
        "fail",
        "rises since step 1250",
    ),
    CheckItem("all_steps", "end", "all steps were done", "pass", "2000 of 2000"),
)


def series(steps: NDArray[np.int64], values: NDArray[np.float64]) -> Series:
    return Series(steps.astype(np.int64), values.astype(np.float64))


def summary(
    key: str, one: Series, *, group: str, unit: str = "", meaning: str = ""
) -> MetricSummary:
    low, high = int(one.values.argmin()), int(one.values.argmax())
    first, last = float(one.values[0]), float(one.values[-1])
    return MetricSummary(
        key=key,
        group=group,
        unit=unit,
        meaning=meaning or f"The {key} of the run.",
        direction=DIRECTIONS.get(key, "none"),
        num_points=len(one),
        first=first,
        last=last,
        minimum=float(one.values[low]),
        minimum_step=int(one.steps[low]),
        maximum=float(one.values[high]),
        maximum_step=int(one.steps[high]),
        median=float(np.median(one.values)),
        trend="falling" if last < 0.9 * first else "rising" if last > 1.1 * first else "flat",
        observation=f"It goes from {first:.3g} to {last:.3g}.",
    )


def summaries(log: RunLog, groups: dict[str, str]) -> tuple[MetricSummary, ...]:
    """`groups`: first part of a key -> group; other keys are rewards."""
    return tuple(
        summary(key, one, group=groups.get(key.split("/")[0], "reward"))
        for key, one in log.series.items()
    )


def sft_run() -> RunLog:
    """2000 steps; validation each 250 is best at 1000 and rises after it."""
    generator, steps = np.random.default_rng(SEED), np.arange(1, 2001)
    noise = generator.normal
    found = {
        "train/loss": 0.25
        + 1.9 * np.exp(-steps / 620) * (1 + noise(0, 0.05, 2000))
        + noise(0, 0.02, 2000),
        "train/lr": 2e-5
        * np.minimum(steps / 100, 0.5 * (1 + np.cos(np.pi * np.maximum(steps - 100, 0) / 1900))),
        "train/grad_norm": np.exp(noise(0.3, 0.25, 2000)) * (1 + 3 * np.exp(-steps / 60)),
        "memory/max_allocated_gib": 61.2 + 0.4 * np.minimum(steps / 40, 1) + noise(0, 0.02, 2000),
        "memory/cpu/rss_gib": 9.5 + steps / 9000 + noise(0, 0.01, 2000),
        "data/pad_frac": np.abs(noise(0.031, 0.006, 2000)),
        "data/truncated_frac": np.abs(noise(0.004, 0.002, 2000)),
        "train/seq_completion_len_mean": noise(310, 14, 2000),
        "throughput/train/tokens_per_s": 41_000 * (1 - 0.12 * steps / 2000) + noise(0, 500, 2000),
    }
    found["train/grad_norm"][1379] = 31.0
    found["train/loss"][1379] = 1.45
    for phase, base in {
        "data": 0.09,
        "h2d": 0.02,
        "forward": 0.78,
        "backward": 1.5,
        "optimizer": 0.21,
    }.items():
        drift = 1 + (2.5 if phase == "data" else 0.02) * steps / 2000
        found[f"time/train/{phase}_s"] = base * drift * (1 + np.abs(noise(0, 0.05, 2000)))
    at = np.arange(250, 2001, 250)
    val = np.array([1.72, 1.50, 1.36, 1.30, 1.33, 1.40, 1.50, 1.60])
    logged = {key: series(steps, values) for key, values in found.items()} | {
        "val/loss": series(at, val)
    }
    saved = tuple(
        CheckpointState(s, Path(f"runs/sft-7b/global_step_{s}"), 42 * 10**9, True)
        for s in range(500, 2001, 500)
    )
    config = {"optim.lr": 2e-5, "optim.clip_grad": 1.0, "data.max_length": 4096}
    return RunLog(
        Path("runs/sft-7b"),
        "fsdp-sft",
        logged,
        num_rows=2008,
        config=config,
        checkpoints=saved,
        total_steps=2000,
        span_s=5600.0,
        exit_code=0,
    )


def sft_findings() -> tuple[Finding, ...]:
    return (
        Finding(
            "V17",
            "V17",
            "fail",
            "The model overfits since step 1500: validation rose from 1.30 to 1.60, training fell "
            "to 0.33",
            "val/loss",
            (1250, 2000),
            1.6,
            1.326,
            (
                "best validation loss 1.3 at step 1000",
                "four validations in a row above it",
                "3.1 epochs were seen",
            ),
            "The model has begun to learn its training samples by heart: more passes over the same "
            "data do not help.",
            "Use the checkpoint of step 1000; next time set trainer.total_epochs=2.",
        ),
        Finding(
            "V22",
            "V22",
            "warn",
            "Waiting for data takes 10.7 % of a step at the end, three times as much as at the "
            "start",
            "time/train/data_s",
            (1, 2000),
            0.107,
            0.1,
            ("0.09 s at the start, 0.31 s at the end",),
            "The loader does not keep up; its time grows, as with a file system whose cache runs "
            "full.",
            "Set data.num_workers=4, and keep the token cache on a local disk.",
        ),
        Finding(
            "V07-1380",
            "V07",
            "warn",
            "One loss spike at step 1380: 1.45, 3.1 times the usual level, recovered within 4 steps",
            "train/loss",
            (1380, 1380),
            1.45,
            0.7,
            ("grad_norm 31 at the same step, clipped to 1",),
            "A single batch with unusual samples.",
            "Look at the samples of step 1380; optim.clip_grad=1.0 held the damage back, keep it.",
        ),
        Finding(
            "V23",
            "V23",
            "info",
            "The first two steps are slower than the rest and left out of all judgements",
        ),
    )


def sft_report(log: RunLog) -> Report:
    findings = sft_findings()
    spike = Anomaly(
        (1380, 1383), "train/loss", 1380, 1.45, 13.2, 3.1, 69.0, True,
        (Mover("train/grad_norm", 1, 9.8, 1380, 1380, 31.0),), ("train/grad_norm", "train/loss"),
    )  # fmt: skip
    verdicts = {
        250: "ok",
        500: "ok",
        750: "ok",
        1000: "ok",
        1250: "note",
        1500: "overfit",
        1750: "overfit",
        2000: "overfit",
    }
    return Report(
        title="sft-7b",
        source=log.source,
        path=log.path,
        profile="sft",
        verdict="FAIL",
        headline="The run is complete but overfits from step 1500: use the checkpoint of step 1000.",
        facts={"steps": "2000 of 2000", "time": "1:33:20", "attempts": "1", "rows skipped": "0"},
        top=findings[:3],
        findings=findings,
        metrics=summaries(log, SFT_GROUPS),
        anomalies=(spike,),
        generalisation=Generalisation(
            "validation loss", dict(zip(verdicts, log.series["val/loss"].values.tolist(), strict=True)),
            1000, 1.30, 1.60, 1.27, verdicts, 1500, 1000, Path("runs/sft-7b/global_step_1000"),
            "The lowest validation loss of all that exist.", 0.30,
        ),
        learning_rate=LearningRate("cosine", 2e-5, 100, 0.0, 0.29, 0.0),
        serving=(ServingCheck(2000, "vllm 1", 1.1, 1.9, 0.01, is_equal=False, causes=("config.json: rope_theta",)),),
        throughput=Throughput(
            2.9, {"forward": 0.27, "backward": 0.52, "optimizer": 0.07, "data": 0.107, "h2d": 0.01, "other": 0.023},
            "Waiting for data grows and is the only phase worth changing.", 38_540.0, 0.41, 0.97,
        ),
        checklist=CHECKLIST,
        thresholds={"loss_high": 5.0, "data_share_warn": 0.1, "overfit_margin": 0.02},
        overridden=("data_share_warn",),
        insufficient=(("V24", "system/gpu_util was not logged"),),
        closing="Ship step 1000. Then shorten the run to two epochs and give the loader more "
                "workers.",
    )  # fmt: skip


def examples() -> dict[str, tuple[Report, RunLog]]:
    sft, grpo = sft_run(), swift_run(SEED)
    return {"sft": (sft_report(sft), sft), "grpo": (analyse(grpo), grpo)}


if __name__ == "__main__":
    from trainer.tools.report.page import as_page

    for name, pair in examples().items():
        Path(sys.argv[1], f"{name}.html").write_text(as_page([pair]), encoding="utf-8")
