"""The table of metrics that this trainer logs, and a table of other trainers' metrics.

Console lines and history files show metrics in the order of these entries. `words.Metric` explains
the fields.
"""

from collections.abc import Mapping

from trainer.tracking.metrics.words import Metric

PHASES = ("data", "shard", "forward", "backward", "optimizer", "logging", "guard", "other")
"""The phases of a step, whose times are logged as `time/train/<phase>_s`."""
CONSOLE = {
    "train/loss": "loss {:.4f}",
    "train/lr(1e-3)": "lr {:.2e}",
    "train/grad_norm": "grad_norm {:.2f}",
    "val/loss": "val/loss {:.4f}",
    "val/loss_stderr": "± {:.4f}",
    "val/token_accuracy": "accuracy {:.3f}",
    "val/best_loss": "best {:.4f}",
    "val/best_step": "at step {:.0f}",
    "val/samples": "{:,.0f} samples",
    "throughput/train/tokens_per_s": "{:,.0f} tok/s",
    "train/time(s)": "{:.2f} s",
    "memory/max_reserved_gib": "{:.1f} GiB",
    "throughput/train/mfu": "mfu {:.0%}",
    "progress/eta_s": "eta {duration}",
}
CSV = {
    "train/total_token_count": "tokens sum",
    "train/lr(1e-3)": "lr last",
    "train/grad_norm": "grad_norm median",
    "val/samples": "samples last",
    "val/total_valid_token_count": "valid_tokens last",
    "train/time(s)": "seconds sum",
    "time/eval/total_s": "seconds last",
}


def entries(over_ranks: str, every: str, *rows: tuple[str, str, str, str]) -> list[Metric]:
    """Make entries that share a reduction over ranks and a frequency.

    Each row holds the key, the unit, the better direction, and the meaning.
    """
    return [
        Metric(
            key,
            unit,
            better,
            meaning,
            over_ranks=over_ranks,
            every=every,
            console=CONSOLE.get(key, ""),
            csv=CSV.get(key, ""),
        )
        for key, unit, better, meaning in rows
    ]


def foreign(unit: str, better: str, meanings: Mapping[str, str]) -> list[Metric]:
    """Make entries for other trainers' metrics that share a unit and a better direction.

    `meanings` maps a key to its meaning.
    """
    return [
        Metric(key, unit, better, meaning, over_ranks="main") for key, meaning in meanings.items()
    ]


def lengths(split: str, every: str) -> list[Metric]:
    """Make the entries for the sample lengths of a split."""
    parts = {"prompt": "Unsupervised", "completion": "Supervised", "total": "All"}
    statistics = {"mean": "mean", "min": "smallest", "max": "largest", "p95": "95th percentile"}
    return [
        Metric(
            f"{split}/seq_{part}_len_{statistic}",
            "token",
            "none",
            f"{tokens} tokens of a sample, {word}.",
            every=every,
        )
        for part, tokens in parts.items()
        for statistic, word in statistics.items()
    ]


def slowest(phase: str) -> Metric:
    """Make the entry for the time of a phase on the slowest rank."""
    key = f"time/train/{phase}_s"
    meaning = f"{key} on the slowest rank."
    return Metric(f"{key}_max", "s", "down", meaning, over_ranks="max", of=key)


TABLE = (
    *lengths("train", "step"),
    *lengths("val", "eval"),
    *map(slowest, PHASES),
    *entries(
        "global",
        "step",
        (
            "train/total_token_count",
            "token",
            "none",
            "Tokens of this step's batch over all ranks, without padding.",
        ),
        (
            "train/total_valid_token_count",
            "token",
            "none",
            "Supervised tokens of this step's batch over all ranks; 0: the step learns nothing.",
        ),
        (
            "data/valid_token_frac",
            "share",
            "middle",
            "Supervised tokens / all tokens without padding.",
        ),
        ("data/pad_frac", "share", "down", "Padding / all computed token slots."),
        (
            "data/packing_efficiency",
            "share",
            "up",
            "Tokens without padding / capacity of the micro-batches.",
        ),
        (
            "data/empty_label",
            "sample",
            "down",
            "Samples of this step without a supervised token: the model learns nothing from them.",
        ),
        (
            "data/token_imbalance",
            "ratio",
            "down",
            "Tokens of the rank with the most tokens / mean over ranks: 1 = even. The other ranks "
            "wait for that rank.",
        ),
        (
            "train/loss",
            "nat/token",
            "down",
            "Mean cross-entropy of the step's supervised tokens on all ranks, regardless of "
            "model.loss.",
        ),
        (
            "train/objective",
            "nat/token",
            "down",
            "Mean of the training loss over the step's supervised tokens, if model.loss is not "
            "cross_entropy.",
        ),
        (
            "train/objective/<term>",
            "nat/token",
            "down",
            "Mean of an additional term of the training loss over the step's supervised tokens, "
            "without its weight.",
        ),
        (
            "train/loss_ema",
            "nat/token",
            "down",
            "Bias-corrected exponential mean of train/loss with decay 0.98: the trend without the "
            "noise.",
        ),
        (
            "train/loss_by/<source>",
            "nat/token",
            "down",
            "train/loss over the tokens of one data source, at steps with tokens from it.",
        ),
        (
            "train/ppl",
            "1",
            "down",
            "Perplexity, exp(train/loss), capped: the number of equally likely tokens.",
        ),
        (
            "train/token_accuracy",
            "share",
            "up",
            "Fraction of supervised tokens that the model predicts correctly (top-1).",
        ),
        (
            "train/lr(1e-3)",
            "1e-3",
            "none",
            "Learning rate that this step used (not the next step's), in thousandths: 0.01 means "
            "1e-5.",
        ),
        (
            "train/grad_norm",
            "1",
            "middle",
            "L2 norm of the whole gradient over all ranks, before clipping; sudden multiples of "
            "its usual level are spikes.",
        ),
        (
            "moe/router_loss",
            "1",
            "down",
            "Auxiliary loss of a mixture of experts' routers, without its coefficient: 0 in a "
            "run's first step, later about the number of experts chosen per token if the load is "
            "balanced.",
        ),
        (
            "moe/load_max_over_mean",
            "ratio",
            "down",
            "Tokens of the busiest expert / mean over experts, in the layer where this is largest: "
            "1 = even. Experts have no capacity limit and drop no tokens.",
        ),
        ("progress/step", "step", "none", "Finished optimizer steps, starting at 1."),
        ("progress/epoch", "epoch", "none", "Passes over the training data, starting at 0."),
        ("progress/tokens", "token", "none", "Tokens trained on so far, without padding."),
        ("progress/pct", "%", "none", "Finished part of the run."),
    ),
    *entries(
        "global",
        "rare",
        ("data/truncated", "sample", "down", "Training samples that were cut to data.max_length."),
        ("data/truncated_frac", "share", "down", "Share of training samples that were cut."),
        (
            "data/dropped",
            "sample",
            "down",
            "Rows dropped during data preparation: too long or unusable.",
        ),
        (
            "optim/grad_norm/<block>",
            "1",
            "middle",
            "train/grad_norm of one block of the model: shows in which layer a spike arises.",
        ),
        (
            "optim/param_norm",
            "1",
            "none",
            "L2 norm of all trained weights: steady growth without bound is a sign of trouble.",
        ),
    ),
    *entries(
        "max",
        "step",
        (
            "train/loss_max_rank",
            "nat/token",
            "down",
            "Mean loss of the rank with the highest loss: far above train/loss means that one "
            "rank has unusual data.",
        ),
        (
            "memory/allocated_gib",
            "GiB",
            "down",
            "Device memory in tensors before the update, with gradients, on the rank with the most.",
        ),
        (
            "memory/max_allocated_gib",
            "GiB",
            "down",
            "Peak of allocated memory since the last step, on the rank with the highest peak.",
        ),
        (
            "memory/max_reserved_gib",
            "GiB",
            "down",
            "Peak of reserved memory since the last step, on the rank with the highest peak. The "
            "GPU must have at least this much.",
        ),
        (
            "memory/max_reserved_frac",
            "share",
            "down",
            "max_reserved / memory of the device: above 0.95 the next long batch may not fit.",
        ),
        (
            "memory/cpu/rss_gib",
            "GiB",
            "down",
            "Host memory of the training process, on the rank that uses most; steady growth is a "
            "leak.",
        ),
    ),
    *entries(
        "sum",
        "step",
        (
            "train/nonfinite",
            "count",
            "down",
            "Micro-batches of this step, on any rank, whose loss (or the rank's share of it) was "
            "NaN or infinite.",
        ),
        (
            "memory/alloc_retries",
            "count",
            "down",
            "Allocations that succeeded only after emptying the cache: memory is nearly full, and "
            "steps are slow.",
        ),
        ("memory/ooms", "count", "down", "Allocations that failed: out of memory."),
    ),
    *entries(
        "global",
        "eval",
        (
            "val/loss",
            "nat/token",
            "down",
            "Mean cross-entropy of the supervised validation tokens; rising while train/loss "
            "falls: overfitting.",
        ),
        (
            "val/loss_stderr",
            "nat/token",
            "down",
            "Standard error of val/loss over samples, if there are several: smaller differences are noise.",
        ),
        ("val/ppl", "1", "down", "Perplexity on the validation set, exp(val/loss), capped."),
        (
            "val/token_accuracy",
            "share",
            "up",
            "Fraction of supervised validation tokens that the model predicts correctly (top-1).",
        ),
        (
            "val/loss_by/<source>",
            "nat/token",
            "down",
            "val/loss over the tokens of one of several data sources.",
        ),
        ("val/best_loss", "nat/token", "down", "Lowest val/loss so far."),
        ("val/best_step", "step", "none", "Step of the lowest val/loss: use its checkpoint."),
        ("val/gap", "nat/token", "down", "val/loss - train/loss_ema: growing means memorisation."),
        ("val/samples", "sample", "none", "Validation samples that were measured."),
        (
            "val/total_valid_token_count",
            "token",
            "none",
            "Supervised tokens of the validation set.",
        ),
    ),
    *entries(
        "main",
        "step",
        (
            "throughput/train/tokens_per_s",
            "1/s",
            "up",
            "Tokens of all ranks, without padding, / train/time(s).",
        ),
        (
            "throughput/train/valid_tokens_per_s",
            "1/s",
            "up",
            "Supervised tokens of all ranks / train/time(s).",
        ),
        (
            "throughput/train/valid_tokens_per_s_update",
            "1/s",
            "up",
            "Supervised tokens of all ranks / time of this step's forward pass, backward pass and "
            "update, without waiting for data.",
        ),
        ("throughput/train/tokens_per_s_per_gpu", "1/s", "up", "tokens_per_s / number of devices."),
        (
            "throughput/train/tflops_per_gpu",
            "TFLOP/s",
            "up",
            "Arithmetic that the model needs, per device: (6 N T + 6 M S + 12 L H d sum(len^2)) / "
            "train/time(s) with N matrix parameters for T tokens, M of the head for S supervised "
            "ones, L layers of H heads of size d, 4 instead of 6 for frozen parameters; within a "
            "sliding window w len^2 is len^2 - (len - w)^2; recomputation not counted.",
        ),
        (
            "throughput/train/mfu",
            "share",
            "up",
            "tflops_per_gpu / the device's peak in bfloat16; absent for a device whose peak is "
            "unknown.",
        ),
        (
            "train/time(s)",
            "s",
            "down",
            "Wall time of this step, including its wait for data but not validation and "
            "checkpoint. Ranks wait for each other in every step, so the slowest rank determines "
            "it.",
        ),
        (
            "progress/eta_s",
            "s",
            "down",
            "Seconds left: remaining steps times the median step, without validations and saves.",
        ),
        ("progress/elapsed_s", "s", "none", "Seconds trained so far, over all attempts."),
        (
            "progress/goodput",
            "share",
            "up",
            "Time of steps that counted / wall time of all attempts.",
        ),
        (
            "ckpt/age_steps",
            "step",
            "down",
            "Steps since the last good checkpoint, which a crash would lose.",
        ),
    ),
    *entries(
        "mean",
        "step",
        (
            "time/train/data_s",
            "s",
            "down",
            "Time spent waiting for the next batch: above a tenth of the step, the loader slows "
            "training.",
        ),
        ("time/train/shard_s", "s", "down", "Copying the batch from host to device."),
        ("time/train/forward_s", "s", "down", "Forward pass over all micro-batches."),
        (
            "time/train/backward_s",
            "s",
            "down",
            "Backward pass over all micro-batches, with the gradient reduction.",
        ),
        ("time/train/optimizer_s", "s", "down", "Clipping and update of the weights."),
        ("time/train/logging_s", "s", "down", "Passing the metrics on to files and trackers."),
        ("time/train/guard_s", "s", "down", "Checking for anomalies."),
        ("time/train/other_s", "s", "down", "step_s minus all other phases: unaccounted time."),
        ("time/train/step_s", "s", "down", "Sum of the phases of this row."),
        ("time/train/update_s", "s", "down", "Forward, backward and optimizer together."),
    ),
    *entries(
        "slowest",
        "step",
        (
            "time/train/slowest_rank",
            "rank",
            "none",
            "Rank with the longest data, copy, logging and guard time in the previous step: the "
            "other ranks wait for it.",
        ),
    ),
    *entries(
        "main",
        "checkpoint",
        ("time/train/checkpoint_s", "s", "down", "Time for which the last save stopped training."),
        (
            "time/train/checkpoint_bg_s",
            "s",
            "down",
            "Time for which the last save wrote in the background.",
        ),
        ("ckpt/bytes", "byte", "none", "Size of the last checkpoint."),
        ("ckpt/save_s", "s", "down", "Time from the start of the last save to its commit."),
        ("ckpt/kept", "count", "none", "Checkpoints on disk."),
    ),
    *entries(
        "main",
        "eval",
        ("time/eval/step_s", "s", "down", "Validation: one batch, mean over the batches."),
        ("time/eval/total_s", "s", "down", "Validation: total time."),
        (
            "throughput/eval/tokens_per_s",
            "1/s",
            "up",
            "Validation: tokens of all ranks, without padding, / time/eval/total_s.",
        ),
        (
            "throughput/eval/valid_tokens_per_s",
            "1/s",
            "up",
            "Validation: supervised tokens of all ranks / time/eval/total_s.",
        ),
    ),
    *entries(
        "main",
        "event",
        (
            "checkpoint/failed_in_a_row",
            "count",
            "down",
            "Failed saves since the last successful one.",
        ),
    ),
    *entries(
        "guard",
        "step",
        (
            "guard/loss_z",
            "1",
            "middle",
            "Distance of train/loss from its recent median in robust standard deviations: above 8 "
            "is a spike.",
        ),
        (
            "guard/grad_z",
            "1",
            "middle",
            "Distance of train/grad_norm from its recent median in robust standard deviations: "
            "above 6 is a spike.",
        ),
        (
            "optim/skipped_steps",
            "step",
            "down",
            "Updates skipped so far: loss or gradient not finite, or above the guard's limits.",
        ),
        (
            "data/skipped_batches",
            "count",
            "down",
            "Batches skipped after rollbacks so far.",
        ),
    ),
    *entries(
        "mean",
        "timer",
        (
            "system/gpu_util",
            "%",
            "up",
            "Share of time in which the GPU was busy, from `nvidia-smi`: below 80 % it is often "
            "waiting.",
        ),
    ),
    *entries(
        "max",
        "timer",
        ("system/gpu_temp_c", "degC", "down", "Temperature of the hottest GPU."),
        ("system/gpu_power_w", "W", "none", "Power draw of the GPU that draws most."),
    ),
)
FOREIGN = (
    *foreign(
        "nat/token",
        "middle",
        {
            "train/entropy": "Mean entropy of the predicted distribution.",
            "critic/entropy/mean": (
                "Entropy of the policy: high = still exploring, near 0 = collapsed."
            ),
            "kl": "Divergence from the reference policy: 0.01 to 5 is healthy, above 10 is not.",
        },
    ),
    *foreign(
        "1",
        "none",
        {
            "train/lr": "Learning rate of the step.",
            "actor/lr": "Learning rate of the policy.",
            "critic/lr": "Learning rate of the value model.",
            "actor/pg_loss": "Policy gradient loss; near 0 is normal.",
            "actor/weighted_pg_loss": "Policy gradient loss with sample weights.",
            "actor/sample_weights_<statistic>": "Weight in the policy loss.",
            "critic/value": "Mean value predicted while sampling.",
            "critic/vpred": "Mean value predicted now.",
            "critic/values/<statistic>": "Estimated value of a state.",
            "train/adv_std": "Spread of advantages within their group.",
            "rewards/<name>/std": "Spread of the reward of one function.",
            "<split>/reward_total_std": "Spread of the total reward.",
        },
    ),
    *foreign(
        "1",
        "down",
        {
            "actor/total_loss": "The loss that is back-propagated, with all terms.",
            "critic/loss": "Loss of the value model: its distance from the returns.",
            "critic/error": "Mean squared difference between value and return.",
        },
    ),
    *foreign(
        "nat/token",
        "down",
        {
            "actor/positive_sft_loss": "SFT loss over samples with a positive reward.",
        },
    ),
    *foreign(
        "nat/token",
        "none",
        {
            "actor/negative_sft_loss": (
                "SFT loss over samples with a negative reward, which training makes less likely."
            ),
        },
    ),
    *foreign(
        "nat",
        "down",
        {
            "actor/kl_loss": "Loss term that keeps the policy near the reference.",
        },
    ),
    *foreign(
        "nat",
        "middle",
        {
            "actor/approxkl": "Estimated KL divergence between the policy before and after the update.",
            "actor/policykl": "KL divergence between the sampling policy and the trained policy.",
        },
    ),
    *foreign(
        "share",
        "middle",
        {
            "actor/clipfrac": "Share of tokens clipped by PPO.",
            "actor/ppo_ratio_clipfrac": "Share of tokens clipped by PPO.",
            "actor/ppo_ratio_high_clipfrac": "Share of tokens clipped at the upper end.",
            "actor/ppo_ratio_low_clipfrac": "Share of tokens clipped at the lower end.",
            "critic/clipfrac": "Share of clipped value predictions.",
            "clip_ratio": "Share of clipped tokens: 0.1 to 0.3 is normal.",
            "clip_ratio/<end>_<statistic>": "Share of tokens clipped at either end.",
        },
    ),
    *foreign(
        "ratio",
        "middle",
        {
            "actor/ratio_<statistic>": (
                "Ratio of new to old probability of the sampled tokens; 1 = unchanged."
            ),
        },
    ),
    *foreign(
        "nat",
        "none",
        {
            "critic/ref_log_prob/mean": "Log probability under the reference policy.",
            "critic/old_log_prob/mean": "Log probability while sampling.",
        },
    ),
    *foreign(
        "1",
        "middle",
        {
            "critic/advantages/<statistic>": "Advantage: how much better than expected an action "
            "was.",
            "train/adv_<statistic>": "Advantage within its group.",
            "reward_std": "Spread of rewards: near 0, there is nothing to learn.",
        },
    ),
    *foreign(
        "1",
        "up",
        {
            "critic/score/<statistic>": "Raw reward of an episode.",
            "critic/rewards/<statistic>": "Normalised and clipped reward.",
            "critic/returns/<statistic>": "Discounted sum of rewards.",
            "val/score/<statistic>": "Score of a validation episode.",
            "reward": "Mean reward of a generated answer: its trend matters, not its sign.",
            "reward_mean": "Accuracy minus penalties for latency and budget, mean of the epoch.",
            "rewards/<name>/mean": "Mean reward of one function.",
            "<split>/reward_total_<statistic>": "Total reward.",
            "<split>/reward_correct_mean": "Weighted share of right answers.",
            "<split>/reward_format_mean": "Weighted reward for the format.",
            "<split>/tag_count_reward_mean": "Weighted reward for the tags.",
        },
    ),
    *foreign(
        "share",
        "down",
        {
            "critic/reward_clip_frac": "Share of clipped rewards.",
            "frac_reward_zero_std": "Share of groups with equal rewards.",
            "budget_violation_rate": (
                "Share of answers slower than the budget: below 0.1 late in training."
            ),
            "completions/clipped_ratio": (
                "Share of answers cut at the length limit: above 0.3, format and reward break."
            ),
            "memory/<infix>/end/onload/max_allocated_frac/<device>": (
                "Peak allocated memory in one operation / device memory."
            ),
            "memory/<infix>/end/onload/max_reserved_frac/<device>": (
                "Peak reserved memory in one operation / device memory."
            ),
        },
    ),
    *foreign(
        "share",
        "up",
        {
            "accuracy": "Share of right answers.",
            "accuracy_mean": "Mean share of right answers.",
        },
    ),
    *foreign(
        "share",
        "none",
        {
            "accuracy_std": "Spread of the share of right answers.",
        },
    ),
    *foreign(
        "ms",
        "down",
        {
            "latency_mean": "Mean time per answer.",
        },
    ),
    *foreign(
        "ms",
        "none",
        {
            "latency_std": "Standard deviation of the time per answer.",
        },
    ),
    *foreign(
        "token",
        "middle",
        {
            "completions/<statistic>_length": "Length of a generated answer.",
            "completions/<statistic>_terminated_length": (
                "Length of the answers that ended with an end token."
            ),
            "tokens/response_length/<statistic>": "Response length.",
        },
    ),
    *foreign(
        "token",
        "none",
        {
            "tokens/prompt_length/<statistic>": "Prompt length.",
        },
    ),
    *foreign(
        "s",
        "down",
        {
            "time/train/<operation>_s": "Time of one operation of a training step.",
            "time/eval/<operation>_s": "Time of one operation of a validation.",
            "time/<infix>/total": "Wall time of one operation.",
            "time/<infix>/execute": "Time of an operation's own work.",
            "time/rollout": "Generating answers.",
            "time/ref_log_probs_values_reward": "Reference log probabilities.",
            "time/old_log_probs_values": "Log probabilities while sampling.",
            "time/adv": "Computing advantages.",
            "weights/sync_s": "Sending new weights to the generation engine.",
        },
    ),
    *foreign(
        "count",
        "none",
        {
            "weights/version": "Number of times the generation engine received new weights.",
        },
    ),
    *foreign(
        "byte",
        "none",
        {
            "weights/bytes": "Size of the weights sent to the generation engine.",
        },
    ),
)
"""Metrics of other trainers: the report explains them, and users log them through `Tracking`."""
