"""What metrics are: the roles that rules ask for, and each key's group, unit, good direction and meaning.

A role is named by the first of its keys that a log has; which one that is depends on the framework that wrote it.
"""

import re
from dataclasses import dataclass
from functools import cache

from trainer.report.foreign_metrics import lookup

ROLES: dict[str, tuple[str, ...]] = {
    "loss": ("train/loss", "loss", "actor/pg_loss"),
    "val_loss": ("val/loss", "eval/loss"),
    "val_reward": (
        *("val/reward_mean", "val/reward", "val/reward_total_mean", "val/score", "val/score/mean"),
        "val-core/<source>/reward/mean@<device>",
    ),
    "val_accuracy": ("val/accuracy_mean", "val/accuracy", "val-core/<source>/acc/mean@<device>"),
    "grad": ("train/grad_norm", "grad_norm"),
    "lr": ("train/lr", "learning_rate"),
    "epoch": ("progress/epoch", "train/epoch", "epoch"),
    "time": ("train/time(s)", "time/train/step_s"),
    "data_time": ("time/train/data_s",),
    "tokens_per_s": (
        *("throughput/train/tokens_per_s", "throughput/train/valid_tokens_per_s", "system/tps"),
        "throughput/train/tokens_per_s_per_gpu",
    ),
    "mfu": ("throughput/train/mfu",),
    "goodput": ("progress/goodput",),
    "gpu_util": ("system/gpu_util",),
    "reserved_share": (
        *("memory/max_reserved_frac", "memory/reserved_frac"),
        "memory/<infix>/end/onload/max_reserved_frac/<device>",
    ),
    "rss": ("memory/cpu/rss_gib", "memory/cpu/<infix>/end/rss"),
    "allocated": ("memory/allocated_gib",),
    "alloc_retries": ("memory/alloc_retries",),
    "ooms": ("memory/ooms",),
    "clipped_steps": ("optim/clipped_frac",),
    "truncated": ("data/truncated_frac",),
    "empty_label": ("data/empty_label",),
    "total_len_max": ("train/seq_total_len_max",),
    "kl": ("kl", "train/kl", "actor/approxkl", "actor/policykl", "actor/kl_loss"),
    "reward": (
        *("reward", "train/reward", "train/reward_total_mean", "train/reward_mean", "reward_mean"),
        *("critic/score/mean", "critic/rewards/mean"),
    ),
    "format": ("rewards/Format/mean", "train/reward_format_mean", "train/tag_count_reward_mean"),
    "correct": ("train/reward_correct_mean", "rewards/accuracy/mean", "rewards/AnswerMatchCosine/mean"),
    "accuracy": ("train/accuracy_mean", "accuracy_mean", "train/accuracy"),
    "latency": ("train/latency_mean", "latency_mean"),
    "violation": ("train/budget_violation_rate", "budget_violation_rate"),
    "mean_length": ("completions/mean_length", "tokens/response_length/mean", "train/seq_completion_len_mean"),
    "max_length": ("completions/max_length", "tokens/response_length/max", "train/seq_completion_len_max"),
    "min_length": ("completions/min_length", "tokens/response_length/min"),
    "clipped_ratio": ("completions/clipped_ratio",),
    "clip_ratio": (
        *("clip_ratio", "clip_ratio/region_mean", "clip_ratio/mean"),
        *("actor/ppo_ratio_clipfrac", "actor/clipfrac"),
    ),
    "entropy": ("train/entropy", "entropy", "critic/entropy/mean", "actor/entropy"),
    "adv_mean": ("train/adv_mean", "critic/advantages/mean"),
    "adv_std": ("train/adv_std",),
    "reward_std": ("reward_std", "train/reward_total_std"),
    "equal_groups": ("frac_reward_zero_std",),
    "reward_clip": ("critic/reward_clip_frac",),
}

_ORDER = {key: place for place, key in enumerate(key for keys in ROLES.values() for key in keys)}


def role_order(key: str) -> tuple[int, str]:
    """To sort metrics by: those that rules look at come first, then by name."""
    return _ORDER.get(key, len(_ORDER)), key


@dataclass(frozen=True)
class Meaning:
    group: str
    unit: str
    direction: str
    text: str


_FAMILIES = (
    ("(train|val)/(ppl|loss_.*)", "optimisation", "", "down", "the loss in another form"),
    ("train/lr.*|.*/lr", "optimisation", "", "none", "step size of the optimizer"),
    (".*/(kl|approxkl|policykl|kl_loss)", "optimisation", "nat", "middle", "distance of policy and reference"),
    ("clip_ratio.*|actor/.*clipfrac", "optimisation", "share", "middle", "share of clipped probability ratios"),
    ("(.*/)?entropy(/mean)?", "optimisation", "nat", "middle", "how undecided the model is about a token"),
    ("(optim|guard|actor)/.*", "optimisation", "", "none", "state of the optimizer or of its guard"),
    ("(train/)?reward.*[_/](std|min|max)", "reward", "", "none", "spread of the rewards in a batch"),
    ("(train/)?(reward|tag_count).*", "reward", "", "up", "what the reward functions gave"),
    ("critic/(score|rewards?)[_/].*|val/(score|reward).*", "reward", "", "up", "what the reward functions gave"),
    ("(.*/)?accuracy", "reward", "share", "up", "share of right answers"),
    ("completions/.*|tokens/.*|.*response_length.*|(train|val)/seq_.*", "length", "token", "none", "length of texts"),
    ("val/runtime", "timing", "s", "down", "wall time of a validation"),
    ("val/(samples|steps)_per_second", "timing", "1/s", "up", "how much is processed per second"),
    ("(val/|weights/)?num_tokens|ckpt/.*|obs/.*", "state", "", "none", "how far the run is"),
    ("val/.*", "optimisation", "", "none", "measured on samples that are not trained on"),
    ("time/.*", "timing", "s", "down", "wall time of a phase"),
    ("throughput/.*|system/(tps|samples)", "timing", "1/s", "up", "how much is processed per second"),
    ("memory.*|train_memory.*", "memory", "GiB", "down", "memory in use"),
    ("system/.*", "memory", "", "none", "state of the machine"),
    ("data/.*|train/(total|.*_count).*", "data", "", "none", "what the batches hold"),
    ("progress/.*|.*elapsed_time.*|remaining_time.*", "state", "", "none", "how far the run is"),
    (".*max_steps|train_speed.*", "state", "", "none", "how far the run is"),
)
"""Of names that stand in no table: pattern, group, unit, good direction, meaning."""
_GROUPS = {"validation": "optimisation", "guard": "optimisation"}
"""Groups of the table of metrics that a report shows as another."""


@cache
def meaning(key: str) -> Meaning:
    """Of a key: what a table of metrics says of it, ours or that of other trainers, else what its family is.

    Group `other` stands for one nothing is known about.
    """
    if (known := lookup(key) or lookup(f"train/{key}")) is not None:
        unit = "" if known.unit == "1" else known.unit
        return Meaning(_GROUPS.get(known.group, known.group), unit, known.better, known.meaning)
    families = (Meaning(*words) for pattern, *words in _FAMILIES if re.fullmatch(pattern, key))
    return next(families, Meaning("other", "", "none", "nothing is known about it"))


_WITNESSES = {
    "rate": ROLES["lr"],
    "loss": ROLES["loss"],
    "gradient": ROLES["grad"],
    "kl": ROLES["kl"],
    "policy": (*ROLES["clip_ratio"], *ROLES["entropy"]),
}
_OF_GENERATION = re.compile(
    r"(?P<length>completions/.*|tokens/.*|train/seq_(?!prompt|total).*|.*response_length.*)|"
    r"(?P<reward>(?!.*([_/]std|_min|_max)$)((train/)?(reward|tag_count).*|critic/(score|rewards?)[_/].*"
    r"|(.*/)?(accuracy(_mean)?|budget_violation_rate|latency_mean)))"
)
"""Lengths and rewards are the model's doing only where it generates; otherwise they describe the batch."""


def witness_group(key: str, *, is_generating: bool) -> str | None:
    """What a metric testifies to when it jumps: rate, loss, gradient, kl, length, reward, policy; None: bookkeeping."""
    group = next((group for group, keys in _WITNESSES.items() if key in keys), None)
    if group is None and not key.startswith(("val/", "eval/")) and (match := _OF_GENERATION.fullmatch(key)):
        group = match.lastgroup
    return group if is_generating or group in ("rate", "loss", "gradient", "kl") else None


CHAIN_GROUPS = ("rate", "kl", "policy", "length", "reward", "gradient", "loss")
"""In the order in which one is known to cause the next, for those that set in at the same point."""
