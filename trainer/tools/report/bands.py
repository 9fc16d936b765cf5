"""The usual ranges of metrics, and the moves of levels that are faults: one row for each, judged by
one function (`checks.py`).
"""

import math
from typing import NamedTuple

INF = math.inf


class Band(NamedTuple):
    """The range of a metric, and what a finding says when its level is outside."""

    id: str
    """Id of the finding. Of two rows with one id the first that is left counts."""
    role: str
    low: float
    high: float
    level: str
    what: str
    """The metric in words, as the beginning of a sentence."""
    cause: str
    remedy: tuple[str, ...]
    """Names of `advice.ADVICE`, or sentences with {option} by purpose."""
    profiles: tuple[str, ...] = ()
    part: str = "all"
    """all, start (the first 100 steps), first or last (ten points)."""
    by: str = "level"
    """level (median of a stretch), mean (of a stretch) or point (any single one)."""
    width: int = 0
    """Points of a stretch; 0: a twentieth of the log."""

    def limit(self, side: str) -> str:
        """Return the name of one of its limits (`side`: low or high)."""
        place = "" if self.part == "all" else f"{self.part}_"
        level = "" if self.level == "note" else f"{self.level}_"
        return f"{place}{self.role}_{level}{side}"


SFT, RL = ("sft",), ("grpo",)
UNFIT = "Data and model do not fit: wrong tokenizer or chat template, or untrained weights."
GROUPS = "All rewards of a group are equal: nothing to learn from."
PENALTY = "The penalty for latency is too weak, or the budget cannot be met."
FAR = "A policy that is about to leave its reference."
VANISHED = (
    "Nothing left to learn, a loss without label tokens, dead or frozen layers, or underflow."
)
CHECK = ("Check the labels and which parameters are trained; stop if the loss no longer falls.",)
UNCLIPPED = "Updates are too large: the policy moves far within one batch."

BANDS: tuple[Band, ...] = (
    # losses of a pretrained language model, nat/token
    Band("loss_start_high", "loss", -INF, 5.0, "warn", "The first loss", UNFIT,
         ("Read a tokenized sample back, and check which weights were loaded.",), SFT, "first"),
    Band("loss_start_high", "loss", 1.5, 3.0, "note", "The first loss", UNFIT, (), SFT, "first"),
    Band("loss_final", "loss", 0.1, INF, "warn", "The last loss",
         "The samples are probably known by heart: too many passes over too few samples.",
         ("Fewer {epochs}, more data, an earlier checkpoint.",), SFT, "last"),
    Band("loss_final", "loss", 0.5, 1.5, "note", "The last loss", "", (), SFT, "last"),
    Band("val_final", "val_loss", 0.8, 2.0, "note", "The last validation loss", "", (), SFT, "last"),
    # gradients
    Band("grad_high:sustained", "grad", -INF, 100.0, "warn", "The gradient norm",
         "Training is unstable: the learning rate is too high.", ("lower_rate", "clip"), SFT,
         width=10),
    Band("grad_range", "grad", 0.1, 10.0, "note", "The gradient norm",
         "An unusual scale of the loss or of the model; by itself no fault.",
         ("None needed where the loss falls steadily.",), SFT),
    Band("grad_range:start", "grad", 0.1, 10.0, "note", "The gradient norm",
         "An unusual scale of the loss or of the model; by itself no fault.",
         ("None needed where the loss falls steadily.",), SFT, "start", width=50),
    Band("grad_vanish", "grad", 0.001, INF, "warn", "The gradient norm", VANISHED, CHECK, width=20),
    # time and machines
    Band("data_bound", "data_share", -INF, 0.3, "fail", "The share of a step that waits for data",
         "Loading and preparing samples is slower than training on them.", ("loading",)),
    Band("data_bound", "data_share", -INF, 0.1, "warn", "The share of a step that waits for data",
         "Loading and preparing samples is slower than training on them.", ("loading",)),
    Band("time_high", "ordinary_time", -INF, 30.0, "warn", "A step's time in seconds",
         "Slow data loading or storage, too little parallelism, or simply a large model: 2 to 5 s "
         "is usual for 7B on 8 A100 at 4096 tokens.", ("loading",), SFT),
    Band("gpu_util", "warm_gpu_util", 80.0, INF, "warn", "The use of the devices in %",
         "Batches too small, waiting for data, or waiting for other ranks.",
         ("larger_batch", "loading"), by="mean"),
    Band("memory:headroom", "reserved_share", -INF, 0.95, "warn", "The share of device memory in use",
         "No headroom for fragmentation or longer batches: one longer sample may not fit.",
         ("memory",), by="point"),
    Band("truncation", "truncated", -INF, 0.05, "warn", "The share of samples cut at the length limit",
         "{max_length} is shorter than the data: answers lose their ends.",
         ("Raise {max_length}, or leave long samples out.",), by="mean"),
    Band("truncation:empty", "empty_label", -INF, 0, "warn", "The number of samples without a label",
         "Empty answers, or prompts that fill the length limit: they teach nothing.",
         ("Remove them, or raise {max_length}.",), by="point"),
    # controllers
    Band("accuracy:zero", "accuracy", 0.001, INF, "warn", "The accuracy",
         "Often the answers are missing from the metadata; else the metric does not match the texts.",
         ("Check the answers field, read generated texts, check the metric; early in training wait.",),
         ("controller",), width=21),
    Band("budget:stuck", "violation", -INF, 0.5, "warn", "The share of answers over the budget",
         PENALTY, ("Raise the violation penalty, or the budget.",), ("controller",), width=21),
    Band("budget:final", "violation", -INF, 0.05, "note", "The last share of answers over the budget",
         "Training is not finished, or the penalty is weak.",
         ("Train on while it falls; else raise the violation penalty.",), ("controller",), "last"),
    # policies
    Band("kl", "kl", -INF, 5.0, "note", "KL to the reference", FAR, ("stronger_kl",), by="point"),
    Band("kl", "kl", 0.01, INF, "note", "KL to the reference", "A policy that hardly moves.",
         ("None needed where the reward rises.",)),
    Band("clipped_ratio", "clipped_ratio", -INF, 0.3, "fail",
         "The share of answers cut off at the length limit",
         "The distribution of lengths has moved: answers run on to the limit, their format breaks "
         "and their reward is 0.", ("shorter_completions",), RL, by="point"),
    Band("clip_ratio", "clip_ratio", -INF, 0.5, "warn", "The share of clipped probability ratios",
         UNCLIPPED, ("tighter_ratio", "lower_rate")),
    Band("clip_ratio", "clip_ratio", 0.1, 0.3, "note", "The share of clipped probability ratios",
         "Above: updates are too large. Below: each batch is used once, so that ratios stay at 1.",
         ("tighter_ratio",)),
    Band("adv_shape:std", "equal_groups", -INF, 0.9, "warn", "The share of groups with equal rewards",
         GROUPS, ("larger_group",)),
    Band("adv_shape:std", "adv_std", 0.05, INF, "fail", "The spread of advantages", GROUPS,
         ("larger_group",)),
    Band("adv_shape:std", "relative_reward_std", 0.05, INF, "fail",
         "The spread of rewards, as a share of its usual size,", GROUPS, ("larger_group",)),
    Band("adv_shape:std", "adv_std", 0.5, 2.0, "warn", "The spread of advantages",
         "Wrong normalisation: about 1 is expected.", ("Check how advantages are normalised.",)),
    Band("adv_shape:mean", "adv_mean", -0.1, 0.1, "warn", "The mean of advantages",
         "Groups are formed wrongly, or the normalisation is missing.",
         ("Check that a group holds the samples of one prompt.",)),
    Band("reward_clip", "reward_clip", -INF, 0.4, "warn", "The share of clipped rewards",
         "The range or threshold of the reward is too narrow.",
         ("Widen the reward's clipping range, or scale the reward down.",)),
    Band("reward_clip", "reward_clip", -INF, 0.2, "note", "The share of clipped rewards",
         "The range or threshold of the reward is too narrow.",
         ("Widen the reward's clipping range, or scale the reward down.",)),
)  # fmt: skip


class Move(NamedTuple):
    """A level that moves, to stay, and what a finding says of it."""

    id: str
    role: str
    sign: int
    """1 up, -1 down."""
    ratio: float
    """The move is at least by this factor; 1: more than noise, and a quarter of the range."""
    what: str
    """What it means, as the end of a sentence."""
    cause: str
    remedy: tuple[str, ...]
    """{checkpoint} is the newest before the move."""
    profiles: tuple[str, ...] = ()
    level: str = "warn"
    least: int = 1
    """Points that it has lasted for."""
    is_sudden: bool = False
    """A slow move is no fault."""


POLICY, CONTROLLER = ("grpo", "controller"), ("controller",)
DIVERGES = "Training diverges, or the policy has found a dead end."
BACK = ("Stop, go back to {checkpoint}.", "lower_rate")
SLOW = (
    "A slower or hotter device, another process on it, a slow disk or network, or longer samples."
)
COMPARE = ("Compare sequence lengths, memory and device clocks before and after that step.",)
ENDLESS = (
    "The policy no longer stops where it should: long answers are cut off and lose their reward."
)
SHORT = "Answers end early: degeneration, or an end-of-text token that is rewarded too much."
VALUES = "The value network no longer foretells the rewards: advantages are noise."

MOVES: tuple[Move, ...] = (
    Move("reward_trend:collapse", "reward", -1, 1, "the reward falls", DIVERGES, BACK, POLICY),
    Move("reward_trend:scatter", "reward_std", 1, 2, "rewards scatter",
         "Sampling has become unstable, or a reward function gives extreme values.",
         ("Read answers from after that step with their rewards.", "larger_group"), RL),
    Move("accuracy:collapse", "accuracy", -1, 1, "the accuracy falls", DIVERGES, BACK, CONTROLLER),
    Move("val_results:reward", "val_reward", -1, 1, "the held-out reward falls", DIVERGES, BACK),
    Move("val_results:accuracy", "val_accuracy", -1, 1, "the held-out accuracy falls", DIVERGES, BACK),
    Move("budget:rising", "violation", 1, 1, "more and more answers miss the budget", PENALTY,
         ("Raise the violation penalty, or the budget.", *BACK), CONTROLLER),
    Move("budget:latency_rising", "latency", 1, 1, "answers take longer and longer", PENALTY,
         ("Raise the weight of the latency penalty.",), CONTROLLER),
    Move("loss_diverging:epochs", "loss", 1, 1, "the loss rises: stop or change course",
         "Training diverges.", BACK, CONTROLLER, "fail", least=11),
    Move("grad_vanish", "grad", -1, 100, "the gradient vanishes", VANISHED, CHECK),
    Move("entropy_collapse", "entropy", -1, 8, "the policy stops exploring",
         "The reward pulls too hard, or the sampling temperature is too low.",
         ("Raise the temperature or an entropy bonus.", "lower_rate")),
    Move("value_network:loss", "value_loss", 1, 10, "the value network fails", VALUES,
         ("Lower its learning rate, or go back to {checkpoint}.", "clip")),
    Move("value_network:error", "value_error", 1, 10, "the value network fails", VALUES,
         ("Lower its learning rate, or go back to {checkpoint}.", "clip")),
    Move("length_shift", "mean_length", 1, 1.4, "answers grow", ENDLESS, ("shorter_completions",), RL,
         is_sudden=True),
    Move("length_shift", "mean_length", -1, 1.4, "answers shrink", SHORT, ("watch",), RL,
         is_sudden=True),
    Move("length_shift", "mean_length", -1, 2, "answers shrink", SHORT, ("watch",), RL),
    Move("time_growth:slowdown", "tokens_per_s", -1, 1.5, "training gets slower", SLOW, COMPARE),
    Move("time_growth:slowdown", "ordinary_time", 1, 1.5, "training gets slower", SLOW, COMPARE),
)  # fmt: skip
