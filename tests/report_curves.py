"""Logs with a known truth: healthy runs of each kind, and the run that analysis 002 describes,
burst by burst.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
from grpo_curves import HISTORY_COLUMNS, controller_histories
from numpy.typing import NDArray

from trainer.tools.report.run_log import CheckpointState, RunLog, Series

Values = NDArray[np.float64]
BURSTS = (
    (2800, 2800),
    (2855, 2870),
    (3140, 3145),
    (3695, 3695),
    (4155, 4155),
    (4655, 4655),
    (5145, 5145),
)
PERCENTS = (46, 48, 52, 61, 69, 77, 86)
REWARDS = ("AnswerMatchCosine", "CaptionMatchCosine", "TitleMatchCosine")
MATCHES = ("PlaneMatchString", "ModalityMatchString")
CLIPPED = ("low", "high", "region")

_KEYS = ("kl", "train/loss", "train/grad_norm", "completions/mean_length",
         "completions/clipped_ratio", "rewards/Format/mean", "reward")  # fmt: skip
_BURSTS = """
2790  6.86    -     -      -    -      -      -
2795  11.76   -     -      370  0.55   -      -
2800  19.6    0.78  4.7e6  410  0.875  0.2    0.45
2850  3.0     -     -      230  0.0    0.95   2.1
2855  7.0     -     -      305  0.35   0.95   2.1
2860  8.0     -     -      420  0.8    0.3    0.4
2865  7.0     -     -      455  0.9    0.05   0.4
2870  6.0     -     -      481  0.9    0.025  0.4
3130  6.545   -     -      -    -      -      -
3135  11.22   -     -      370  0.55   -      -
3140  18.7    0.22  7.6e6  410  0.875  0.2    0.45
3145  18.7    0.22  1.0e7  410  0.875  0.1    0.45
3685  4.76    -     -      -    -      -      -
3690  8.16    -     -      370  0.55   -      -
3695  13.6    0.54  2.4e6  410  0.875  0.2    0.45
4145  4.13    -     -      -    -      -      -
4150  7.08    -     -      370  0.55   -      -
4155  11.8    0.21  9.5e6  410  0.875  0.2    0.45
4645  3.15    -     -      -    -      -      -
4650  5.4     -     -      370  0.55   -      -
4655  9.0     0.25  2.7e7  410  0.875  0.2    0.45
5135  2.205   -     -      -    -      -      -
5140  3.78    -     -      370  0.55   -      -
5145  6.3     0.33  5.5e7  410  0.875  0.2    0.45
2715  -       -     -      345  0.4    -      -
3990  -       -     -      -    0.5    -      -
"""
"""Step, then the `_KEYS`, of the seven bursts: KL sets in first, then length, then format and reward;
last what 002 also names but counts as no burst, one group of metrics alone.
"""
_ALONE = {
    "completions/min_length": {2825: 379},
    "completions/max_length": dict.fromkeys((2555, 2795, 3105, 3995), 508),
}


def _burst(columns):
    for line in _BURSTS.strip().splitlines():
        step, *values = line.split()
        for key, value in zip(_KEYS, values, strict=True):
            if value != "-":
                columns[key][int(step) // 5 - 1] = float(value)
    for key, points in _ALONE.items():
        for at, length in points.items():
            columns[key][at // 5 - 1] = length


SWIFT_CONFIG = {
    "learning_rate": 5e-5,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.05,
    "max_completion_length": 512,
    "per_device_train_batch_size": 1,
    "beta": 0.04,
    "num_generations": 8,
}


def swift_run(seed, *, has_bursts=True):
    """6000 GRPO steps, with a point every 5 steps and 31 metrics, as 002 describes them."""
    rng = np.random.default_rng(seed)
    steps = np.arange(5, 6001, 5)
    n = len(steps)
    level = np.where(steps < 2500, 0.03, 0.15)
    decay = 0.5 * (1 + np.cos(np.pi * (steps - 300).clip(min=0) / 23_400))
    columns = {
        **{f"clip_ratio/{name}_mean": rng.normal(0.18, 0.02, n) for name in CLIPPED},
        "train/loss": rng.normal(1e-3, 1e-3, n),
        "train/grad_norm": 3e4 * np.exp(rng.normal(0, 0.25, n)),
        "train/lr": 5e-5 * np.minimum(steps / 300, decay),
        "kl": level * np.exp(rng.normal(0, 0.3, n)),
        "clip_ratio/high_max": rng.normal(0.3, 0.03, n),
        "reward": 1.5 + 0.65 * np.minimum(steps / 2500, 1) + rng.normal(0, 0.18, n),
        "reward_std": rng.normal(0.5, 0.08, n).clip(0),
        "rewards/Format/mean": (0.97 - np.abs(rng.normal(0, 0.02, n))).clip(0, 1),
        **{f"rewards/{name}/mean": rng.normal(0.6, 0.06, n).clip(0, 1) for name in REWARDS},
        **{f"rewards/{name}/mean": 1.0 * (rng.random(n) < 0.85) for name in MATCHES},
        **{
            f"rewards/{name}/std": np.abs(rng.normal(0.1, 0.03, n))
            for name in ("Format", *REWARDS, *MATCHES)
        },
        "completions/mean_length": rng.normal(220, 12, n),
        "completions/min_length": rng.normal(140, 14, n),
        "completions/max_length": rng.normal(360, 30, n).clip(max=512),
        "completions/clipped_ratio": np.where(rng.random(n) < 0.03, 0.0125, 0.0),
        "progress/epoch": steps / 3000,
        "progress/pct": steps / 60,
        "progress/elapsed_s": steps * 9.5,
        "memory/max_reserved_gib": np.full(n, 61.2),
        "train_speed(iter/s)": np.full(n, 0.105),
    }
    if has_bursts:
        _burst(columns)
    series = {key: Series(steps, values) for key, values in columns.items()}
    path = Path("output/v107-20251126-022444")
    return RunLog(path, "ms-swift", series, n, config=SWIFT_CONFIG, total_steps=6000)


OUR_CONFIG = {
    "model.partial_pretrain": "Qwen/Qwen3-8B",
    "optim.lr": 1e-5,
    "optim.clip_grad": 1.0,
    "optim.lr_scheduler": "cosine",
    "optim.lr_warmup_steps_ratio": 0.1,
    "data.train_batch_size": 32,
    "data.max_length": 2048,
    "trainer.save_freq": 100,
    "trainer.test_freq": 100,
    "trainer.max_ckpt_to_keep": 5,
    "trainer.total_epochs": 2,
}


def sft_run(seed):
    """A healthy fine-tuning run of 2000 steps with every metric that a rule reads."""
    rng = np.random.default_rng(seed)
    steps = np.arange(1, 2001)
    n = len(steps)
    course = 0.9 + 1.2 * np.exp(-steps / 300)
    columns = {
        "train/loss": course * np.exp(rng.normal(0, 0.05, n)),
        "train/grad_norm": 0.5 * np.exp(rng.normal(0, 0.25, n)),
        "train/lr": 1e-5
        * np.minimum(steps / 200, 0.5 * (1 + np.cos(np.pi * (steps - 200).clip(min=0) / 1800))),
        "train/time(s)": rng.normal(2.5, 0.05, n),
        "time/train/data_s": np.abs(rng.normal(0.05, 0.01, n)),
        "time/train/forward_s": rng.normal(0.8, 0.01, n),
        "time/train/backward_s": rng.normal(1.5, 0.01, n),
        "system/gpu_util": rng.normal(93, 2, n),
        "memory/max_reserved_frac": np.full(n, 0.8),
        "memory/cpu/rss_gib": rng.normal(12, 0.05, n),
        "memory/alloc_retries": np.zeros(n),
        "data/truncated_frac": np.zeros(n),
        "data/empty_label": np.zeros(n),
        "train/seq_total_len_max": rng.integers(1500, 2049, n).astype(np.float64),
        "train/seq_completion_len_mean": rng.normal(300, 25, n),
        "progress/goodput": np.full(n, 0.97),
        "progress/epoch": steps / 1000,
    }
    series = {key: Series(steps, values) for key, values in columns.items()}
    evals = np.arange(100, 2001, 100)
    series["val/loss"] = Series(
        evals, (1.0 + np.exp(-evals / 300)) * (1 + rng.normal(0, 0.003, len(evals)))
    )
    return RunLog(
        path=Path("checkpoints/sft/healthy"),
        source="fsdp-sft",
        series=series,
        num_rows=n,
        config=OUR_CONFIG,
        checkpoints=checkpoints(range(1600, 2001, 100)),
        total_steps=2000,
        exit_code=0,
    )


def checkpoints(steps):
    return tuple(CheckpointState(s, Path(f"run/global_step_{s}"), 42 << 30) for s in steps)


def grpo_run(seed):
    """A healthy GRPO run: the run of 002 without its bursts, clipped, with advantages and entropy."""
    rng = np.random.default_rng(seed)
    log = swift_run(seed, has_bursts=False)
    steps = log.series["kl"].steps
    n = log.num_rows
    more = {
        "train/adv_mean": rng.normal(0, 0.01, n),
        "train/adv_std": rng.normal(1, 0.05, n),
        "train/entropy": rng.normal(1.2, 0.05, n),
        "critic/reward_clip_frac": np.full(n, 0.02),
    }
    series = {**log.series, **{key: Series(steps, values) for key, values in more.items()}}
    answers = log.series["rewards/AnswerMatchCosine/mean"].values + np.linspace(-0.1, 0.1, n)
    series["rewards/AnswerMatchCosine/mean"] = Series(steps, answers)
    reward = log.series["reward"].values + np.linspace(0, 0.3, n)
    series["reward"] = Series(steps, reward)
    return replace(log, series=series, config={**SWIFT_CONFIG, "max_grad_norm": 1e6})


def controller_run(seed, *, num_epochs=30):
    """The CSV of guide 001: a run as its bands describe it (S1.28)."""
    table = controller_histories(seed)[0][:num_epochs]
    columns = dict(zip(HISTORY_COLUMNS, table.T, strict=True))
    columns["train/loss"] = columns.pop("loss")
    epochs = columns.pop("epoch").astype(np.int64)
    series = {key: Series(epochs, values) for key, values in columns.items()}
    config = {"latency_budget": 280.0}
    return RunLog(Path("checkpoints/joint_controller"), "csv", series, num_epochs, config=config)


def overfitting_example(*, kept=(500, 1000, 1500, 2000)):
    """The four points of S3.43."""
    steps = np.array([500, 1000, 1500, 2000])
    series = {
        "train/loss": Series(steps, np.array([1.2, 0.8, 0.5, 0.3])),
        "val/loss": Series(steps, np.array([1.5, 1.3, 1.4, 1.6])),
    }
    return RunLog(Path("checkpoints/phase1"), "verl", series, 4, checkpoints=checkpoints(kept))


def changed(log, **columns):
    """Return the log with a metric replaced or added, with values at the steps of its loss. `__` in
    a name stands for `/`.
    """
    steps = log.series["train/loss"].steps
    new = {
        key.replace("__", "/"): Series(
            steps, np.broadcast_to(np.asarray(values, dtype=np.float64), steps.shape).copy()
        )
        for key, values in columns.items()
    }
    return replace(log, series={**log.series, **new})
