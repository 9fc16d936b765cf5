"""Other frameworks' metric names -> ours, with the factor to our unit. Unknown names stay as they are."""

import re

from trainer.metrics.words import split_reducer

ALIASES: dict[str, tuple[str, float]] = {
    # The learning rate in thousandths, as verl and we print it, and as MLflow and TensorBoard clean the name.
    "train/lr(1e-3)": ("train/lr", 1e-3),
    "train/lr_1e-3": ("train/lr", 1e-3),
    "train/lr_1e-3_": ("train/lr", 1e-3),
    "train/time_s": ("train/time(s)", 1.0),
    "train/time_s_": ("train/time(s)", 1.0),
    # transformers, TRL, ms-swift, LLaMA-Factory, Lightning
    "loss": ("train/loss", 1.0),
    "train_loss": ("train/loss", 1.0),
    "training_loss": ("train/loss", 1.0),
    "learning_rate": ("train/lr", 1.0),
    "train/learning_rate": ("train/lr", 1.0),
    "lr": ("train/lr", 1.0),
    "grad_norm": ("train/grad_norm", 1.0),
    "gradient_norm": ("train/grad_norm", 1.0),
    "train_grad_norm": ("train/grad_norm", 1.0),
    "entropy": ("train/entropy", 1.0),
    "token_acc": ("train/token_accuracy", 1.0),
    "mean_token_accuracy": ("train/token_accuracy", 1.0),
    "train/mean_token_accuracy": ("train/token_accuracy", 1.0),
    "val/token_acc": ("val/token_accuracy", 1.0),
    "val/mean_token_accuracy": ("val/token_accuracy", 1.0),
    "val_loss": ("val/loss", 1.0),
    "valid_loss": ("val/loss", 1.0),
    "validation_loss": ("val/loss", 1.0),
    "epoch": ("progress/epoch", 1.0),
    "train/epoch": ("progress/epoch", 1.0),
    "percentage": ("progress/pct", 1.0),
    "elapsed_time": ("progress/elapsed_s", 1.0),
    "remaining_time": ("progress/eta_s", 1.0),
    "memory(GiB)": ("memory/max_reserved_gib", 1.0),
    "total_tokens": ("progress/tokens", 1.0),
    "num_tokens": ("progress/tokens", 1.0),
    "train/num_tokens": ("progress/tokens", 1.0),
    # ROLL and verl; where several of them exist the first one wins
    "actor/lr": ("train/lr", 1.0),
    "actor/total_loss": ("train/loss", 1.0),
    "actor/sft_loss": ("train/loss", 1.0),
    "sft_train/loss": ("train/loss", 1.0),
    "sft_train/lr": ("train/lr", 1.0),
    "sft_train/grad_norm": ("train/grad_norm", 1.0),
    "actor/grad_norm": ("train/grad_norm", 1.0),
    # torchtitan
    "loss_metrics/global_avg_loss": ("train/loss", 1.0),
    "loss_metrics/global_max_loss": ("train/loss_max_rank", 1.0),
    "time_metrics/end_to_end(s)": ("train/time(s)", 1.0),
    "time_metrics/data_loading(s)": ("time/train/data_s", 1.0),
    "throughput(tps)": ("throughput/train/tokens_per_s_per_gpu", 1.0),
    "mfu(%)": ("throughput/train/mfu", 0.01),
    "memory/max_active(GiB)": ("memory/max_allocated_gib", 1.0),
    "memory/max_reserved(GiB)": ("memory/max_reserved_gib", 1.0),
    # Megatron
    "lm loss": ("train/loss", 1.0),
    "learning-rate": ("train/lr", 1.0),
    "grad-norm": ("train/grad_norm", 1.0),
    "lm loss validation": ("val/loss", 1.0),
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
