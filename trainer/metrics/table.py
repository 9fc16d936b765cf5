"""The table of metrics that this trainer logs, in the order of a console line and of a history's
columns.
"""

from collections.abc import Collection

from trainer.metrics.words import Metric

Row = tuple[str, str, str, str]
"""Key, unit, better, meaning."""
PHASES = ("data", "shard", "forward", "backward", "optimizer", "logging", "guard", "other")
"""Phases of a step: `time/train/<phase>_s`."""
STATISTICS = {
    "mean": "mean",
    "min": "smallest",
    "max": "largest",
    "p95": "95th percentile",
    "std": "spread",
}
SPREAD = ("mean", "min", "max")
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
OF_STEP_BEFORE = "Of the step before this row's; in an attempt's first row rank 0's alone."


def entries(group: str, *rows: Row, **shared: str) -> list[Metric]:
    """Make the entries of a group; `shared` are their other fields."""
    return [
        Metric(
            *row, group=group, console=CONSOLE.get(row[0], ""), csv=CSV.get(row[0], ""), **shared
        )
        for row in rows
    ]


def statistics(
    key: str, unit: str, better: str, meaning: str, names: Collection[str] = SPREAD
) -> list[Row]:
    """Make a row for each statistic in `names`, whose place in the key is `{}`."""
    return [
        (key.format(name), unit, "none" if name == "std" else better, f"{meaning}, {word}.")
        for name, word in STATISTICS.items()
        if name in names
    ]


def _lengths(split: str, samples: str) -> list[Row]:
    parts = {"prompt": "Unsupervised", "completion": "Supervised", "total": "All"}
    return [
        row
        for part, which in parts.items()
        for row in statistics(
            f"{split}/seq_{part}_len_{{}}",
            "token",
            "none",
            f"{which} tokens of a {samples} sample",
            ("mean", "min", "max", "p95"),
        )
    ]


def _phase(phase: str, meaning: str) -> Row:
    return (f"time/train/{phase}_s", "s", "down", f"{meaning} {OF_STEP_BEFORE}")


def _slowest(phase: str) -> Metric:
    key = f"time/train/{phase}_s"
    meaning = f"{key} on the rank where it is longest."
    return Metric(f"{key}_max", "s", "down", meaning, group="timing", over_ranks="max", of=key)


TABLE = (
    *entries(
        "data",
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
            "Supervised tokens of this step's batch over all ranks; 0 = nothing to learn from.",
        ),
        (
            "data/valid_token_frac",
            "share",
            "middle",
            "Supervised tokens / all tokens without padding.",
        ),
        ("data/pad_frac", "share", "down", "Padding / all token slots that were computed."),
        (
            "data/packing_efficiency",
            "share",
            "up",
            "Tokens without padding / slots of the micro-batches at their largest size.",
        ),
        (
            "data/empty_label",
            "sample",
            "down",
            "Samples of this step without one supervised token: they teach nothing.",
        ),
        (
            "data/token_imbalance",
            "ratio",
            "down",
            "Tokens of the fullest rank / mean over ranks: 1 = even, others wait for that rank.",
        ),
    ),
    *entries(
        "data",
        ("data/truncated", "sample", "down", "Training samples that were cut to data.max_length."),
        ("data/truncated_frac", "share", "down", "Share of training samples that were cut."),
        (
            "data/dropped",
            "sample",
            "down",
            "Rows left out of training when the data was prepared: too long, or unusable.",
        ),
        ("data/rows_by/<source>", "row", "none", "Training rows of one of several data sources."),
        ("data/tokens_by/<source>", "token", "none", "Tokens of one of several data sources."),
        (
            "data/valid_token_frac_by/<source>",
            "share",
            "middle",
            "Supervised tokens / tokens of one of several data sources.",
        ),
        (
            "data/repeat_by/<source>",
            "1/epoch",
            "none",
            "How often an epoch trains a row of the source, on average.",
        ),
        (
            "data/times_by/<source>",
            "count",
            "none",
            "How often the whole run trains a row of the source, on average.",
        ),
        every="rare",
    ),
    *entries(
        "length",
        *_lengths("train", "training"),
    ),
    *entries(
        "length",
        *_lengths("val", "validation"),
        every="eval",
    ),
    *entries(
        "optimisation",
        (
            "train/loss",
            "nat/token",
            "down",
            "Summed cross-entropy of all supervised tokens of the step, on all ranks, / their "
            "number, whatever model.loss trains.",
        ),
        (
            "train/objective",
            "nat/token",
            "down",
            "Mean of the trained loss over the step's supervised tokens, where model.loss is not "
            "cross_entropy.",
        ),
        (
            "train/loss_ema",
            "nat/token",
            "down",
            "Bias-corrected exponential mean of train/loss with decay 0.98: the trend without "
            "the noise.",
        ),
        (
            "train/loss_by/<source>",
            "nat/token",
            "down",
            "train/loss over the tokens of one of several data sources, where this step has some.",
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
            "run's first step, about the number of experts chosen for a token where these are "
            "even.",
        ),
        (
            "moe/load_max_over_mean",
            "ratio",
            "down",
            "Tokens of the fullest expert / mean over experts, in the layer where that is "
            "largest: 1 = even. No expert has a capacity: none drops tokens.",
        ),
        (
            "optim/clipped_frac",
            "share",
            "down",
            "Share of the last 100 steps whose gradient was clipped: near 1, the clip sets the "
            "step size, not optim.lr.",
        ),
    ),
    *entries(
        "optimisation",
        (
            "train/loss_max_rank",
            "nat/token",
            "down",
            "Mean loss of the rank where it is highest: far above train/loss, one rank has odd "
            "data.",
        ),
        over_ranks="max",
    ),
    *entries(
        "optimisation",
        (
            "train/nonfinite",
            "count",
            "down",
            "Micro-batches of this step, on any rank, whose loss (or the rank's share of it) was "
            "NaN or infinite.",
        ),
        over_ranks="sum",
    ),
    *entries(
        "optimisation",
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
            "L2 norm of all weights: steady growth without bound is a sign of trouble.",
        ),
        every="rare",
    ),
    *entries(
        "validation",
        (
            "val/loss",
            "nat/token",
            "down",
            "Summed cross-entropy of validation samples / their supervised tokens; rising while "
            "train/loss falls: overfitting.",
        ),
        (
            "val/loss_stderr",
            "nat/token",
            "down",
            "Standard error of val/loss over samples: smaller differences are noise.",
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
        ("val/best_step", "step", "none", "Step of the lowest val/loss: whose checkpoint to take."),
        ("val/gap", "nat/token", "down", "val/loss - train/loss_ema: growing means memorisation."),
        ("val/samples", "sample", "none", "Validation samples that were measured."),
        ("val/tokens", "token", "none", "Tokens of the validation set, supervised or not."),
        (
            "val/total_valid_token_count",
            "token",
            "none",
            "Supervised tokens of the validation set.",
        ),
        every="eval",
    ),
    *entries(
        "timing",
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
            "Supervised tokens of all ranks / the time of this step's forward, backward and "
            "update: without waiting for data.",
        ),
        (
            "throughput/train/tokens_per_s_per_gpu",
            "1/s",
            "up",
            "tokens_per_s / number of devices.",
        ),
        (
            "throughput/train/tflops_per_gpu",
            "TFLOP/s",
            "up",
            "Arithmetic that the model needs, per device: (6 N T + 6 M S + 6 L H d sum(len^2)) / "
            "train/time(s) with N matrix parameters for T tokens, M of the head for S supervised "
            "ones; within a sliding window w len^2 is len^2 - (len - w)^2; recomputation not "
            "counted.",
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
            "Wall time of this step with its wait for data, without validation and checkpoint. "
            "Ranks wait for each other in every step: the slowest sets it.",
        ),
        over_ranks="main",
    ),
    *entries(
        "timing",
        _phase(
            "data",
            "Waiting for the next batch: above a tenth of the step, the loader slows training.",
        ),
        _phase("shard", "Copying the batch from host to device."),
        _phase("forward", "Forward pass over all micro-batches."),
        _phase("backward", "Backward pass over all micro-batches, with the gradient reduction."),
        _phase("optimizer", "Clipping and update of the weights."),
        _phase("logging", "Handing the metrics over."),
        _phase("guard", "Looking for anomalies."),
        _phase("other", "step_s minus all other phases: unaccounted time."),
        _phase("step", "Sum of the phases of this row."),
        _phase("update", "Forward, backward and optimizer together."),
        over_ranks="mean",
    ),
    *map(_slowest, PHASES),
    *entries(
        "timing",
        (
            "time/train/slowest_rank",
            "rank",
            "none",
            "Rank whose data, copy, logging and guard time of the step before is longest: the "
            "others wait for it.",
        ),
        over_ranks="slowest",
    ),
    *entries(
        "timing",
        (
            "time/train/rank_skew",
            "ratio",
            "down",
            "The slowest rank's time / median over ranks: 1 = all alike.",
        ),
        over_ranks="skew",
        of="time/train/slowest_rank",
    ),
    *entries(
        "timing",
        ("time/train/checkpoint_s", "s", "down", "How long the last save stopped training."),
        (
            "time/train/checkpoint_bg_s",
            "s",
            "down",
            "How long the last save wrote in the background.",
        ),
        over_ranks="main",
        every="checkpoint",
    ),
    *entries(
        "timing",
        ("time/train/eval_s", "s", "down", "How long the last validation stopped training."),
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
        over_ranks="main",
        every="eval",
    ),
    *entries(
        "memory",
        (
            "memory/allocated_gib",
            "GiB",
            "down",
            "Device memory in tensors at the end of the step, fullest rank.",
        ),
        (
            "memory/reserved_gib",
            "GiB",
            "down",
            "Device memory that the allocator holds at the end of the step, fullest rank.",
        ),
        (
            "memory/max_allocated_gib",
            "GiB",
            "down",
            "Peak of allocated memory since the last step, fullest rank.",
        ),
        (
            "memory/max_reserved_gib",
            "GiB",
            "down",
            "Peak of reserved memory since the last step, fullest rank: what the card must have.",
        ),
        ("memory/allocated_frac", "share", "down", "allocated / memory of the device."),
        ("memory/reserved_frac", "share", "down", "reserved / memory of the device."),
        ("memory/max_allocated_frac", "share", "down", "max_allocated / memory of the device."),
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
            "Host memory of the training process, largest rank; steady growth is a leak.",
        ),
        over_ranks="max",
    ),
    *entries(
        "memory",
        (
            "memory/alloc_retries",
            "count",
            "down",
            "Allocations that succeeded only after emptying the cache: memory is nearly full, "
            "steps are slow.",
        ),
        ("memory/ooms", "count", "down", "Allocations that failed for want of memory."),
        over_ranks="sum",
    ),
    *entries(
        "memory",
        over_ranks="max",
        every="rare",
    ),
    *entries(
        "state",
        ("progress/step", "step", "none", "Finished optimizer steps, from 1."),
        ("progress/epoch", "epoch", "none", "Passes over the training data, from 0."),
        ("progress/tokens", "token", "none", "Tokens trained on so far, without padding."),
        ("progress/pct", "%", "none", "Finished part of the run."),
    ),
    *entries(
        "state",
        (
            "progress/eta_s",
            "s",
            "down",
            "Seconds left: remaining steps times the median step, plus the validations and saves "
            "to come.",
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
            "Steps since the last good checkpoint: what a crash would cost.",
        ),
        over_ranks="main",
    ),
    *entries(
        "state",
        ("ckpt/bytes", "byte", "none", "Size of the last checkpoint."),
        ("ckpt/save_s", "s", "down", "Time from the start of the last save to its commit."),
        ("ckpt/kept", "count", "none", "Checkpoints on disk."),
        over_ranks="main",
        every="checkpoint",
    ),
    *entries(
        "state",
        (
            "checkpoint/failed_in_a_row",
            "count",
            "down",
            "Saves that failed since the last good one.",
        ),
        over_ranks="main",
        every="event",
    ),
    *entries(
        "guard",
        (
            "guard/loss_z",
            "1",
            "middle",
            "Distance of train/loss from its recent median in robust standard deviations: above "
            "8 is a spike.",
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
            "Updates left out so far, because loss or gradient was not finite or the guard said "
            "so.",
        ),
        (
            "data/skipped_batches",
            "count",
            "down",
            "Batches that the guard's skip list left out so far.",
        ),
    ),
    *entries(
        "other",
        (
            "system/gpu_util",
            "%",
            "up",
            "Time in which the GPU computed anything: below 80 % something slows it. Read from "
            "NVML (the extra `gpu`), else from `nvidia-smi`.",
        ),
        (
            "system/gpu_mem_util",
            "%",
            "none",
            "Time in which the GPU's memory was read or written.",
        ),
        over_ranks="mean",
        every="timer",
    ),
    *entries(
        "other",
        ("system/gpu_util_min", "%", "up", "system/gpu_util of the GPU where it is lowest."),
        over_ranks="min",
        every="timer",
        of="system/gpu_util",
    ),
    *entries(
        "other",
        ("system/gpu_temp_c", "degC", "down", "Temperature of the hottest GPU."),
        ("system/gpu_power_w", "W", "none", "Power of the GPU that draws most."),
        over_ranks="max",
        every="timer",
    ),
    *entries(
        "other",
        ("obs/queue_depth", "count", "down", "Rows that wait for the slowest tracker."),
        (
            "obs/dropped_trackers",
            "count",
            "down",
            "Trackers that failed or hung and get nothing more; metrics.jsonl has every row.",
        ),
        over_ranks="main",
        every="rare",
    ),
    *entries(
        "other",
        over_ranks="main",
    ),
)
