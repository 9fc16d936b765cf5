"""Other frameworks' metric names -> ours, with the factor to our unit. Unknown names stay as they are."""

import re

from trainer.metrics.words import split_reducer

NAMES: dict[str, tuple[str, ...]] = {
    "train/loss": (
        *("loss", "train_loss", "training_loss", "actor/total_loss", "actor/sft_loss", "sft_train/loss"),
        *("loss_metrics/global_avg_loss", "lm loss", "loss/policy_avg"),
    ),
    "train/loss_max_rank": ("loss_metrics/global_max_loss",),
    "train/lr": ("learning_rate", "train/learning_rate", "lr", "actor/lr", "sft_train/lr", "learning-rate"),
    "train/grad_norm": (
        *("grad_norm", "gradient_norm", "train_grad_norm", "sft_train/grad_norm", "actor/grad_norm", "grad-norm"),
    ),
    "train/entropy": ("entropy", "policy/entropy_avg"),
    "kl": ("objective/kl",),
    "reward": ("objective/rlhf_reward",),
    "tokens/response_length/mean": ("response_length/mean",),
    "tokens/response_length/max": ("response_length/max",),
    "tokens/response_length/min": ("response_length/min",),
    "completions/clipped_ratio": ("response_length/clip_ratio",),
    "train/token_accuracy": ("token_acc", "mean_token_accuracy", "train/mean_token_accuracy"),
    "train/time(s)": ("train/time_s", "train/time_s_", "time_metrics/end_to_end(s)", "timing_s/step"),
    "val/loss": ("val_loss", "valid_loss", "validation_loss", "lm loss validation"),
    "val/token_accuracy": ("val/token_acc", "val/mean_token_accuracy"),
    "progress/epoch": ("epoch", "train/epoch"),
    "progress/pct": ("percentage",),
    "progress/elapsed_s": ("elapsed_time",),
    "progress/eta_s": ("remaining_time",),
    "progress/tokens": ("total_tokens", "num_tokens", "train/num_tokens"),
    "memory/max_allocated_gib": ("memory/max_active(GiB)", "perf/max_memory_allocated_gb"),
    "memory/max_reserved_gib": ("memory(GiB)", "memory/max_reserved(GiB)", "perf/max_memory_reserved_gb"),
    "memory/cpu/rss_gib": ("perf/cpu_memory_used_gb",),
    "time/train/data_s": ("time_metrics/data_loading(s)",),
    "throughput/train/tokens_per_s_per_gpu": ("throughput(tps)", "perf/throughput"),
}
"""Our key <- names in transformers, TRL, ms-swift, LLaMA-Factory, Lightning, verl, ROLL, torchtitan, Megatron."""
ALIASES: dict[str, tuple[str, float]] = {name: (key, 1.0) for key, names in NAMES.items() for name in names} | {
    "mfu(%)": ("throughput/train/mfu", 0.01),
    # The learning rate in thousandths, as verl and we print it, and as MLflow and TensorBoard clean the name.
    "train/lr(1e-3)": ("train/lr", 1e-3),
    "train/lr_1e-3": ("train/lr", 1e-3),
    "train/lr_1e-3_": ("train/lr", 1e-3),
}
_RL = re.compile(r"train/(kl$|reward$|reward_std$|frac_reward_zero_std$|rewards/|completions/|clip_ratio)")
"""TRL and ms-swift log these without a prefix in files and with `train/` in TensorBoard; without it is their name."""


def canonical(name: str) -> tuple[str, float]:
    """Our key for a name in any log, and the factor that brings its values to our unit."""
    name, _ = split_reducer(name)
    if name.startswith(("Train/", "Val/", "Eval/", "Validation/")):
        name = name.lower()
    for prefix in ("eval/", "eval_", "validation/"):
        if name.startswith(prefix):
            name = "val/" + name.removeprefix(prefix)
    if name.startswith("token/"):
        name = "tokens/" + name.removeprefix("token/")
    if _RL.match(name):
        name = name.removeprefix("train/")
    return ALIASES.get(name, (name, 1.0))
