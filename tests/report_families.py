"""Twelve families of training logs: healthy curves with noise and length drawn by a seed, in the
format of a trainer.

Curves have roles (`loss`, `kl`, `reward`, ...); a family says under which keys, in which file and
how often its trainer logs them. Families `HELD_OUT` were never looked at while the rules were made:
other shapes, other formats.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import log_formats as formats
import numpy as np
from grpo_curves import HISTORY_COLUMNS, controller_histories, write_history
from numpy.typing import NDArray
from small_files import write_json

from trainer.tools.report.run_log import Series

Floats = NDArray[np.float64]
Generator = np.random.Generator
Columns = dict[str, Floats]
"""Role -> values at the logged steps. Held-out results (`val_...`) are at `Curves.evals`."""
NUM_EVALS = 20


@dataclass
class Curves:
    """The metrics that a run logs. Faults change `columns` in place."""

    steps: NDArray[np.int64]
    columns: Columns
    evals: NDArray[np.int64]

    def at(self, role):
        return self.evals if role.startswith("val_") else self.steps

    def scale(self, role, factors, at=0, stop=None):
        """Multiply a metric from the point `at` to the one before `stop`, if it is logged."""
        if role in self.columns:
            self.columns[role][at:stop] *= factors


@dataclass(frozen=True)
class Family:
    """`keys`: role -> key in this trainer's log, for everything that it logs."""

    name: str
    kind: str
    """sft, grpo or controller."""
    keys: Mapping[str, str]
    write: Callable[[Path, Mapping[str, Series]], Path]
    shape: str = "exponential"
    log_every: int = 1
    noise: tuple[float, float] = (0.02, 0.1)
    """The relative noise of the loss, drawn by the seed."""
    config: Mapping[str, Any] | None = None

    def healthy(self, rng, *, least_points=300):
        if self.kind == "controller":
            return _controller(rng)
        num_points = int(rng.integers(least_points, 1500))
        steps = self.log_every * np.arange(1, num_points + 1)
        evals = np.unique(np.linspace(steps[-1] / NUM_EVALS, steps[-1], NUM_EVALS).astype(np.int64))
        evals = steps[np.searchsorted(steps, evals)]
        columns = SHAPED[self.kind](rng, steps, evals, self)
        return Curves(steps, {role: columns[role] for role in self.keys}, evals)

    def save(self, directory, curves):
        """The log to read."""
        directory.mkdir(parents=True)
        series = {
            self.keys[role]: Series(curves.at(role), values)
            for role, values in curves.columns.items()
        }
        path = self.write(directory, series)
        if self.config is not None:
            write_json(path.parent / "args.json", self.config)
        return path


def _course(rng, x, shape):
    start = rng.uniform(1.6, 2.8)
    floor = rng.uniform(0.6, 1.1)
    falls = {
        "exponential": lambda: np.exp(-x / rng.uniform(0.05, 0.25)),
        "power": lambda: (1 + 40 * x) ** -rng.uniform(0.5, 0.9),
        "stairs": lambda: (
            (0.6 * np.exp(-x / 0.06) + 0.4)
            * np.array([1.0, 0.8, 0.68])[np.minimum(3 * x, 2).astype(int)]
        ),
        "sigmoid": lambda: 1 / (1 + np.exp((x - rng.uniform(0.1, 0.25)) / 0.05)),
    }
    return floor + (start - floor) * falls[shape]()


def _rate(rng, x):
    warmup = rng.uniform(0.02, 0.1)
    place = ((x - warmup) / (1 - warmup)).clip(0, 1)
    decay = (0.5 * (1 + np.cos(np.pi * place)), 1 - 0.99 * place)[rng.integers(2)]
    return 10 ** rng.uniform(-5.3, -4) * np.minimum(x / warmup, decay)


def _noise(rng, sigma, num_points):
    """Return factors around 1."""
    return np.exp(rng.normal(0, sigma, num_points))


def _sft(rng, steps, evals, family):
    n = len(steps)
    x = steps / steps[-1]
    course = _course(rng, x, family.shape)
    sigma = rng.uniform(*family.noise)
    time = rng.uniform(0.5, 6) * (1 + rng.normal(0, rng.uniform(0.01, 0.06), n))
    held_out = course[np.searchsorted(steps, evals)] + rng.uniform(0.02, 0.15)
    return {
        "loss": course * _noise(rng, sigma, n),
        "grad": rng.uniform(0.3, 3)
        * _noise(rng, rng.uniform(0.1, 0.35), n)
        * (1 + np.exp(-x / 0.02)),
        "lr": _rate(rng, x),
        "time": time,
        "tokens_per_s": rng.uniform(2e3, 5e4) * float(np.median(time)) / time,
        "rss": rng.uniform(4, 40) + rng.normal(0, 0.05, n),
        "epoch": 3 * x,
        "entropy": course * rng.uniform(0.8, 1.1) * _noise(rng, sigma, n),
        "val_loss": held_out * (1 + rng.normal(0, rng.uniform(0.001, 0.004), len(evals))),
    }


def _grpo(rng, steps, evals, family):
    n = len(steps)
    x = steps / steps[-1]
    rise = 1 - np.exp(-x / rng.uniform(0.15, 0.5)) if family.shape == "exponential" else x**0.7
    lengths = rng.uniform(150, 300) * (1 + rng.uniform(-0.15, 0.2) * x)
    accuracy = 0.2 + 0.5 * rise
    spread = rng.uniform(0.02, 0.08)
    times = rng.uniform(5, 60) * _noise(rng, 0.05, n)
    return {
        "loss": rng.normal(0, 1, n) * 10 ** rng.uniform(-3.5, -1.5),
        "grad": rng.uniform(0.05, 2) * _noise(rng, 0.25, n),
        "lr": _rate(rng, x),
        "epoch": 2 * x,
        "kl": np.geomspace(2e-3, rng.uniform(0.03, 0.4), n) * _noise(rng, 0.3, n),
        "reward": accuracy + 0.3 + rng.normal(0, spread, n),
        "correct": accuracy + rng.normal(0, spread, n),
        "reward_std": rng.uniform(0.3, 0.5) * (1 - 0.3 * rise) * _noise(rng, 0.1, n),
        "adv_std": rng.normal(1, 0.04, n),
        "entropy": (0.4 + 0.6 * np.exp(-x / 0.6)) * rng.uniform(0.8, 1.4) * _noise(rng, 0.05, n),
        "mean_length": lengths * (1 + rng.normal(0, 0.05, n)),
        "max_length": (1.6 * lengths * (1 + rng.normal(0, 0.06, n))).clip(max=1024),
        "min_length": 0.55 * lengths * (1 + rng.normal(0, 0.08, n)),
        "clipped_ratio": np.where(rng.random(n) < 0.04, 1 / 64, 0.0),
        "time": times,
        "tokens_per_s": 64 * lengths / times,
        "rss": rng.uniform(20, 90) + rng.normal(0, 0.2, n),
        "val_reward": (0.5 + 0.5 * rise)[np.searchsorted(steps, evals)]
        + rng.normal(0, 0.02, len(evals)),
    }


CONTROLLER_ROLES = [
    *("loss", "reward", "reward_std", "accuracy", "accuracy_std"),
    *("latency", "latency_std", "violation"),
]
"""Of the columns of a history without the epoch."""


def _controller(rng):
    train, val = controller_histories(int(rng.integers(2**31)))
    columns = dict(zip(CONTROLLER_ROLES, train.T[1:].copy(), strict=True))
    columns |= {f"val_{r}": one for r, one in zip(CONTROLLER_ROLES, val.T[1:], strict=True)}
    return Curves(train[:, 0].astype(np.int64), columns, val[:, 0].astype(np.int64))


def write_histories(directory, curves):
    """The pair of S1: `training_history.csv` and `validation_history.csv`."""
    for name, prefix in (("training_history.csv", ""), ("validation_history.csv", "val_")):
        columns = [curves[prefix + column].values for column in HISTORY_COLUMNS[1:]]
        epochs = np.arange(1, len(columns[0]) + 1)
        write_history(directory / name, np.stack([epochs, *columns], axis=1))
    return directory


SHAPED = {"sft": _sft, "grpo": _grpo}


def _keys(text):
    """Role -> key, from words in turn."""
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


TRAINERS = _keys("""
    loss train/loss  grad train/grad_norm  lr train/lr  val_loss val/loss  epoch progress/epoch
""")
"""Writers of `log_formats` rename these to their trainer's keys."""
OURS = {**TRAINERS, "time": "train/time(s)"}
OWN = {**OURS, "tokens_per_s": "throughput/train/tokens_per_s", "rss": "memory/cpu/rss_gib"}
SWIFT = _keys("""
    loss train/loss  grad train/grad_norm  lr train/lr  epoch progress/epoch  kl kl  reward reward
    reward_std reward_std  correct rewards/Accuracy/mean  mean_length completions/mean_length
    max_length completions/max_length  min_length completions/min_length
    clipped_ratio completions/clipped_ratio
""")
ROLL = _keys("""
    loss train/loss  grad train/grad_norm  lr train/lr  kl actor/kl_loss  reward critic/score/mean
    entropy critic/entropy/mean  tokens_per_s system/tps  mean_length tokens/response_length/mean
    max_length tokens/response_length/max  min_length tokens/response_length/min
    val_reward val/score/mean
""")
VERL_RL = _keys("""
    loss actor/pg_loss  grad actor/grad_norm  lr actor/lr  kl actor/kl_loss
    reward critic/rewards/mean  entropy actor/entropy  mean_length response_length/mean
    max_length response_length/max  min_length response_length/min
    clipped_ratio response_length/clip_ratio  time timing_s/step  tokens_per_s perf/throughput
    val_reward val-core/openai/gsm8k/reward/mean@1  rss perf/cpu_memory_used_gb
""")
JAX = _keys("""
    loss train/loss  entropy train/entropy  reward train/reward_total_mean
    reward_std train/reward_total_std  correct train/reward_correct_mean  adv_std train/adv_std
    mean_length train/seq_completion_len_mean  max_length train/seq_completion_len_max
    time time/train/step_s  tokens_per_s throughput/train/valid_tokens_per_s
    val_reward eval/reward_total_mean
""")
PPO = _keys("""
    loss loss/policy_avg  kl objective/kl  reward objective/rlhf_reward  lr lr
    entropy policy/entropy_avg  epoch epoch
""")
CONTROLLER = {
    prefix + role: prefix + column
    for prefix in ("", "val_")
    for role, column in zip(CONTROLLER_ROLES, HISTORY_COLUMNS[1:], strict=True)
}
TUNED = (
    Family("fsdp-sft small", "sft", OWN, formats.write_own, noise=(0.04, 0.12)),
    Family("verl sft large", "sft", OURS, formats.write_verl, noise=(0.01, 0.04)),
    Family("transformers", "sft", TRAINERS, formats.write_transformers, log_every=10),
    Family(
        "ms-swift grpo",
        "grpo",
        SWIFT,
        formats.write_swift,
        log_every=5,
        config={"max_completion_length": 1024},
    ),
    Family("roll ppo", "grpo", ROLL, formats.write_roll),
    Family("verl grpo console", "grpo", VERL_RL, formats.write_verl_console),
    Family("controller csv", "controller", CONTROLLER, write_histories),
)
HELD_OUT = (
    Family("trl sft", "sft", {**TRAINERS, "entropy": "entropy"}, formats.write_transformers,
           "power", 10, (0.03, 0.1)),
    Family("axolotl tensorboard", "sft", TRAINERS, formats.write_tensorboard, "stairs", 1,
           (0.03, 0.1)),
    Family("torchtune jsonl", "sft", OWN, formats.write_jsonl, "sigmoid", 1, (0.02, 0.08)),
    Family("mllm-jax", "grpo", JAX, formats.write_jsonl, "straight"),
    Family("trl ppo", "grpo", PPO, formats.write_transformers, "straight", 5),
)  # fmt: skip
FAMILIES = (*TUNED, *HELD_OUT)
