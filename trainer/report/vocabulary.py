"""What metrics are: the roles that rules ask for, and each key's group, unit, good direction and meaning.

A role is named by the first of its keys that a log has; which one that is depends on the framework that wrote it.
"""

import re
from dataclasses import dataclass, replace

from trainer import metrics
from trainer.report.foreign_metrics import lookup

ROLES: dict[str, tuple[str, ...]] = {
    "loss": ("train/loss", "loss"),
    "val_loss": ("val/loss", "eval/loss"),
    "val_reward": ("val/reward_mean", "val/reward", "val/reward_total_mean", "val/score"),
    "val_accuracy": ("val/accuracy_mean", "val/accuracy"),
    "grad": ("train/grad_norm", "grad_norm"),
    "lr": ("train/lr", "learning_rate"),
    "epoch": ("progress/epoch", "train/epoch", "epoch"),
    "time": ("train/time(s)", "time/train/step_s"),
    "data_time": ("time/train/data_s",),
    "tokens_per_s": ("throughput/train/tokens_per_s", "throughput/train/valid_tokens_per_s", "system/tps"),
    "mfu": ("throughput/train/mfu",),
    "goodput": ("progress/goodput",),
    "gpu_util": ("system/gpu_util",),
    "reserved_share": ("memory/max_reserved_frac", "memory/reserved_frac"),
    "rss": ("memory/cpu/rss_gib",),
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
    "mean_length": (
        *("completions/mean_length", "tokens/response_length/mean", "train/seq_completion_len_mean"),
        "response_length/mean",
    ),
    "max_length": ("completions/max_length", "tokens/response_length/max"),
    "clipped_ratio": ("completions/clipped_ratio",),
    "clip_ratio": (
        *("clip_ratio", "clip_ratio/region_mean", "clip_ratio/mean"),
        *("actor/ppo_ratio_clipfrac", "actor/clipfrac"),
    ),
    "entropy": ("train/entropy", "entropy", "critic/entropy/mean"),
    "adv_mean": ("train/adv_mean", "critic/advantages/mean"),
    "adv_std": ("train/adv_std",),
    "reward_clip": ("critic/reward_clip_frac",),
}

_ORDER = {key: place for place, key in enumerate(key for keys in ROLES.values() for key in keys)}


def role_order(key: str) -> tuple[int, str]:
    """To sort metrics by: those that rules look at come first, then by name."""
    return _ORDER.get(key, len(_ORDER)), key


DERIVED = ("train/ppl", "train/loss_ema", "train/loss_max_rank")
"""Functions of another metric: as witnesses they would count it twice."""


@dataclass(frozen=True)
class Meaning:
    group: str
    unit: str
    direction: str
    text: str


_TABLE: tuple[tuple[str, Meaning], ...] = tuple(
    (pattern, Meaning(group, unit, direction, text))
    for pattern, group, unit, direction, text in (
        ("(train/)?loss", "optimisation", "nat/token", "down", "what training minimises: cross entropy per token"),
        ("(val|eval)/loss", "optimisation", "nat/token", "down", "the loss on samples that are not trained on"),
        ("(train|val|eval)/(ppl|loss_.*)", "optimisation", "", "down", "the loss in another form"),
        (r"(train/)?grad_norm", "optimisation", "", "middle", "L2 norm of all gradients, before clipping"),
        ("train/lr.*|learning_rate|(actor|critic)/lr", "optimisation", "", "none", "step size of the optimizer"),
        ("(.*/)?(kl|approxkl|policykl|kl_loss)", "optimisation", "nat", "middle", "distance of policy and reference"),
        ("clip_ratio.*|actor/.*clipfrac", "optimisation", "share", "middle", "share of clipped probability ratios"),
        ("(.*/)?entropy(/mean)?", "optimisation", "nat", "middle", "how undecided the model is about a token"),
        ("train/adv_.*|critic/advantages/.*", "optimisation", "", "middle", "advantages: mean near 0, spread near 1"),
        ("(optim|guard|actor)/.*", "optimisation", "", "none", "state of the optimizer or of its guard"),
        ("reward.*[_/]std", "reward", "", "none", "spread of the rewards in a batch"),
        ("train/reward.*_(std|min|max)", "reward", "", "none", "spread of the rewards in a batch"),
        ("reward|rewards?[_/].*|train/(reward|tag_count).*", "reward", "", "up", "what the reward functions gave"),
        ("critic/(score|rewards?)[_/].*|val/(score|reward).*", "reward", "", "up", "what the reward functions gave"),
        ("(train|val)/token_accuracy", "optimisation", "share", "up", "share of label tokens that come first"),
        ("(.*/)?accuracy(_(mean|std))?", "reward", "share", "up", "share of right answers"),
        ("(.*/)?budget_violation_rate", "reward", "share", "down", "share of answers over the latency budget"),
        ("(.*/)?latency_(mean|std)", "reward", "ms", "down", "time per answer: near, not above its budget"),
        ("completions/clipped_ratio", "length", "share", "down", "share of answers cut at the length limit"),
        ("completions/.*|tokens/.*|.*response_length.*", "length", "token", "none", "length of generated text"),
        ("(train|val|eval)/seq_.*", "length", "token", "none", "length of the samples"),
        ("(val|eval)/runtime", "timing", "s", "down", "wall time of a validation"),
        ("(val|eval)/(samples|steps)_per_second", "timing", "1/s", "up", "how much is processed per second"),
        ("(val|eval)/num_tokens", "state", "", "none", "how far the run is"),
        ("(val|eval)/.*", "optimisation", "", "none", "measured on samples that are not trained on"),
        (r"train/time\(s\)|time/.*", "timing", "s", "down", "wall time of a phase"),
        ("throughput/.*|system/(tps|samples)", "timing", "1/s", "up", "how much is processed per second"),
        ("memory.*|train_memory.*", "memory", "GiB", "down", "memory in use"),
        ("system/.*", "memory", "", "none", "state of the machine"),
        ("data/.*|train/(total|.*_count).*", "data", "", "none", "what the batches hold"),
        ("(train/)?epoch|progress/.*|percentage|.*elapsed_time.*", "state", "", "none", "how far the run is"),
        ("remaining_time.*|global_step.*|.*max_steps|train_speed.*", "state", "", "none", "how far the run is"),
        ("ckpt/.*|obs/.*|num_tokens", "state", "", "none", "how far the run is"),
    )
)
_OTHER = Meaning("other", "", "none", "nothing is known about it")


_GROUPS = {"validation": "optimisation", "guard": "optimisation"}
"""Groups of the table of metrics that a report shows as another."""


def meaning(key: str) -> Meaning:
    """Of a key: our own metrics' is that of their table; group `other` stands for one nothing is known about."""
    if (own := metrics.find(key)) is not None:
        return Meaning(_GROUPS.get(own.group, own.group), _unit(own.unit), own.better, own.meaning)
    entry, known = _entry(key), lookup(key)
    return entry if known is None else replace(entry, unit=_unit(known.unit), text=known.meaning)


def _unit(unit: str) -> str:
    return "" if unit == "1" else unit


def _entry(key: str) -> Meaning:
    return next((entry for pattern, entry in _TABLE if re.fullmatch(pattern, key)), _OTHER)


def witness_group(key: str, *, is_generating: bool) -> str | None:
    """What a metric testifies to when it jumps: rate, loss, gradient, kl, length, reward, policy; None: bookkeeping.

    Lengths and rewards are the model's doing only where it generates; otherwise they describe the batch.
    """
    for role, group in (("lr", "rate"), ("loss", "loss"), ("grad", "gradient"), ("kl", "kl")):
        if key in ROLES[role]:
            return group
    entry = _entry(key)
    if key in DERIVED or not is_generating or key.startswith(("val/", "eval/", "train/seq_prompt", "train/seq_total")):
        return None
    if entry.group in ("reward", "length"):
        return None if entry.direction == "none" and entry.group == "reward" else entry.group
    return "policy" if key in (*ROLES["clip_ratio"], *ROLES["entropy"]) else None


CHAIN_GROUPS = ("rate", "kl", "policy", "length", "reward", "gradient", "loss")
"""In the order in which one is known to cause the next, for those that set in at the same point."""
