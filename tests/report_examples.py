"""Two runs made by hand, with the reports they deserve: fine-tuning that overfits, and GRPO with
seven bursts.

`python tests/report_examples.py DIR` writes their pages to DIR, to be looked at in a browser.
"""

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.report.result import (
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
from trainer.report.run_log import CheckpointState, RunLog, Series, ServingCheck

SEED = 3
BURSTS = (2800, 2860, 3145, 3695, 4155, 4655, 5145)
MOVERS = (
    ("kl", 1, 2),
    ("completions/mean_length", 1, 1),
    ("rewards/Format/mean", -1, 0),
    ("reward", -1, 0),
)
"""Metric, sign, rows before the peak."""
DIRECTIONS = {
    "train/loss": "down",
    "val/loss": "down",
    "reward": "up",
    "kl": "middle",
    "train/mfu": "up",
}

SFT_GROUPS = {
    "train": "optimisation",
    "val": "validation",
    "memory": "memory",
    "data": "data",
    "throughput": "timing",
    "time": "timing",
}
GRPO_GROUPS = {
    "kl": "optimisation",
    "train": "optimisation",
    "completions": "length",
    "memory(GiB)": "memory",
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


def grpo_run() -> RunLog:
    """6000 steps, a row each 5, calm until seven bursts of KL that drag length, format and
    reward along.
    """
    generator, steps = np.random.default_rng(SEED), np.arange(5, 6001, 5)
    noise, size = generator.normal, len(steps)
    burst = sum(np.exp(-np.abs(steps - at) / 9.0) for at in BURSTS)
    late = np.minimum(np.maximum(steps - 2500, 0) / 300, 1)
    rewards = {
        f"rewards/{name}/mean": np.clip(base + noise(0, 0.06, size) - drop * burst, 0, 1)
        for name, base, drop in (
            ("Format", 0.96, 0.85),
            ("AnswerMatchCosine", 0.62, 0.4),
            ("PlaneMatchString", 0.8, 0.5),
        )
    }
    found = {
        "train/loss": noise(1e-3, 6e-4, size) + 0.6 * burst * np.abs(noise(1, 0.2, size)),
        "train/lr": 5e-5
        * np.minimum(steps / 300, 0.5 * (1 + np.cos(np.pi * np.maximum(steps - 300, 0) / 5700))),
        "train/grad_norm": np.exp(noise(10.4, 0.3, size)) * (1 + 300 * burst),
        "kl": np.abs(noise(0.05, 0.02, size)) + 0.4 * late + 16 * burst,
        "reward": 1.6 + 0.7 * steps / 6000 + noise(0, 0.12, size) - 1.4 * burst,
        **rewards,
        "completions/mean_length": noise(220, 10, size) + 230 * burst,
        "completions/clipped_ratio": np.clip(np.abs(noise(0.0, 0.01, size)) + 0.8 * burst, 0, 1),
        "memory(GiB)": np.full(size, 71.4),
    }
    logged = {key: series(steps, values) for key, values in found.items()}
    return RunLog(
        Path("output/v3/logging.jsonl"),
        "ms-swift",
        logged,
        num_rows=size,
        num_unparsed=1,
        total_steps=6000,
    )


def grpo_anomaly(log: RunLog, at: int) -> Anomaly:
    """What the seven bursts look like from the outside, read off the curves."""
    place = int(np.searchsorted(log.series["kl"].steps, at))
    movers = tuple(
        Mover(key, sign, 20.0, at - 10 * lead, at, float(log.series[key].values[place]))
        for key, sign, lead in MOVERS
    )
    peak = float(log.series["train/loss"].values[place])
    chain = ("kl", "completions/mean_length", "reward")
    ends = (2855, 2870) if at == 2860 else (at, at + 5)
    return Anomaly(ends, "train/loss", at, peak, 640.0, peak / 1e-3, at / 60, True, movers, chain)


def grpo_report(log: RunLog) -> Report:
    anomalies = tuple(grpo_anomaly(log, at) for at in BURSTS)
    evidence = (
        "peaks of 10 to 17 at seven places",
        "max_grad_norm is not in args.json",
        "the learning rate is 4.8e-5 at step 2800",
    )
    finding = Finding(
        "V31",
        "V31",
        "fail",
        "KL jumps to 16 in seven short bursts from step 2800 on, and length, format and reward "
        "follow each time",
        "kl",
        (2800, 5150),
        16.9,
        10.0,
        evidence,
        "The policy moves far from its reference while the learning rate is high; the update is "
        "not clipped.",
        "learning_rate=5e-6, max_grad_norm=0.5, beta=0.1.",
    )
    return Report(
        title="v3",
        source=log.source,
        path=log.path,
        profile="grpo",
        verdict="FAIL",
        headline="Seven bursts of KL from step 2800 on; reward still rises from 1.6 to 2.3.",
        facts={"steps": "6000 of 6000", "rows": "1200", "rows skipped": "1"},
        top=(finding,),
        findings=(finding,),
        metrics=summaries(log, GRPO_GROUPS),
        anomalies=anomalies,
        generalisation=None,
        learning_rate=LearningRate("cosine", 5e-5, 300, 0.0, 0.41, 0.57),
        throughput=None,
        serving=(),
        checklist=(),
        thresholds={"kl_high": 10.0},
        overridden=(),
        insufficient=(("V17", "no validation was logged"),),
        closing="Lower the learning rate and clip the gradient first; both act on the first link "
        "of the chain.",
    )


def examples() -> dict[str, tuple[Report, RunLog]]:
    sft, grpo = sft_run(), grpo_run()
    return {"sft": (sft_report(sft), sft), "grpo": (grpo_report(grpo), grpo)}


if __name__ == "__main__":
    from trainer.report.page import as_page

    for name, pair in examples().items():
        Path(sys.argv[1], f"{name}.html").write_text(as_page([pair]), encoding="utf-8")
