"""Metrics of other trainers, which this one does not compute: their names, units and meanings, for
reading logs and for users who log them through `Tracking`.
"""

from trainer.metrics.table import SPREAD, entries, statistics
from trainer.metrics.words import Metric

FOREIGN: dict[str, Metric] = {
    metric.key: metric
    for metric in (
        *entries(
            "optimisation",
            ("train/entropy", "nat/token", "middle", "Mean entropy of the predicted distribution."),
            ("val/entropy", "nat/token", "middle", "Mean entropy on the validation set."),
            ("optim/lr/<group>", "1", "none", "Learning rate of one parameter group."),
            ("train/lr", "1", "none", "Learning rate of the step."),
            ("actor/lr", "1", "none", "Learning rate of the policy."),
            ("actor/total_loss", "1", "down", "The loss that is back-propagated, with all terms."),
            (
                "actor/positive_sft_loss",
                "nat/token",
                "down",
                "SFT loss over samples with a positive reward.",
            ),
            (
                "actor/negative_sft_loss",
                "nat/token",
                "none",
                "SFT loss over samples with a negative reward, which are to become less likely.",
            ),
            ("actor/pg_loss", "1", "none", "Policy gradient loss; near 0 is normal."),
            ("actor/weighted_pg_loss", "1", "none", "Policy gradient loss with sample weights."),
            ("actor/kl_loss", "nat", "down", "Loss term that keeps the policy near the reference."),
            (
                "actor/approxkl",
                "nat",
                "middle",
                "Estimated KL divergence of the policy before and after the update.",
            ),
            (
                "actor/policykl",
                "nat",
                "middle",
                "KL divergence of the sampling policy and the trained one.",
            ),
            ("actor/clipfrac", "share", "middle", "Share of tokens clipped by PPO."),
            ("actor/ppo_ratio_clipfrac", "share", "middle", "Share of tokens clipped by PPO."),
            (
                "actor/ppo_ratio_high_clipfrac",
                "share",
                "middle",
                "Share of tokens clipped at the upper end.",
            ),
            (
                "actor/ppo_ratio_low_clipfrac",
                "share",
                "middle",
                "Share of tokens clipped at the lower end.",
            ),
            *statistics(
                "actor/ratio_{}",
                "ratio",
                "middle",
                "New over old probability of the sampled tokens, 1 = unchanged",
            ),
            *statistics("actor/sample_weights_{}", "1", "none", "Weight in the policy loss"),
            ("critic/lr", "1", "none", "Learning rate of the value model."),
            ("critic/loss", "1", "down", "Loss of the value model: its distance from the returns."),
            ("critic/value", "1", "none", "Value predicted while sampling, mean."),
            ("critic/vpred", "1", "none", "Value predicted now, mean."),
            ("critic/clipfrac", "share", "middle", "Share of clipped value predictions."),
            ("critic/error", "1", "down", "Squared difference of value and return, mean."),
            ("critic/ref_log_prob/mean", "nat", "none", "Log probability under the reference."),
            ("critic/old_log_prob/mean", "nat", "none", "Log probability while sampling."),
            (
                "critic/entropy/mean",
                "nat/token",
                "middle",
                "Entropy of the policy: high = it still explores, near 0 = it has collapsed.",
            ),
            *statistics("critic/advantages/{}", "1", "middle", "Action better than expected by"),
            (
                "kl",
                "nat/token",
                "middle",
                "Divergence from the reference policy: 0.01 to 5 is healthy, above 10 is not.",
            ),
            ("clip_ratio", "share", "middle", "Share of clipped tokens: 0.1 to 0.3 is normal."),
            *(
                (f"clip_ratio/{name}", "share", "middle", f"Share of clipped tokens, {place}.")
                for name, place in {
                    "low_mean": "lower end",
                    "low_min": "lower end, smallest",
                    "high_mean": "upper end",
                    "high_max": "upper end, largest",
                    "region_mean": "either end",
                }.items()
            ),
            *statistics(
                "train/adv_{}", "1", "middle", "Advantage within its group", (*SPREAD, "std")
            ),
        ),
        *entries(
            "data",
            ("actor/valid_samples", "sample", "up", "Samples with a supervised token."),
            ("actor/total_samples", "sample", "none", "Samples of the step."),
            ("actor/valid_sample_ratio", "share", "up", "valid_samples / total_samples."),
        ),
        *entries(
            "reward",
            (
                "reward",
                "1",
                "up",
                "Reward of a generated answer, mean: its trend counts, not its sign.",
            ),
            ("reward_std", "1", "middle", "Spread of rewards: near 0, nothing can be learned."),
            *statistics("rewards/<name>/{}", "1", "up", "Reward of one function", ("mean", "std")),
            ("frac_reward_zero_std", "share", "down", "Share of groups with equal rewards."),
            *(
                row
                for split in ("train", "val")
                for row in (
                    *statistics(
                        f"{split}/reward_total_{{}}", "1", "up", "Total reward", (*SPREAD, "std")
                    ),
                    (f"{split}/reward_correct_mean", "1", "up", "Weighted share of right answers."),
                    (f"{split}/reward_format_mean", "1", "up", "Weighted reward for the format."),
                    (f"{split}/tag_count_reward_mean", "1", "up", "Weighted reward for the tags."),
                )
            ),
            *statistics("val/score/{}", "1", "up", "Score of a validation episode"),
            *statistics("critic/score/{}", "1", "up", "Raw reward of an episode"),
            *statistics("critic/rewards/{}", "1", "up", "Normalised and clipped reward"),
            ("critic/reward_clip_frac", "share", "down", "Share of clipped rewards."),
            *statistics("critic/returns/{}", "1", "up", "Discounted sum of rewards"),
            *statistics("critic/values/{}", "1", "none", "Estimated value of a state"),
            (
                "reward_mean",
                "1",
                "up",
                "Accuracy minus penalties for latency and budget, mean of the epoch.",
            ),
            ("accuracy", "share", "up", "Share of right answers."),
            *statistics("accuracy_{}", "share", "up", "Share of right answers", ("mean", "std")),
            *statistics("latency_{}", "ms", "down", "Time of an answer", ("mean", "std")),
            (
                "budget_violation_rate",
                "share",
                "down",
                "Share of answers slower than the budget: below 0.1 late in training.",
            ),
        ),
        *entries(
            "length",
            *statistics("completions/{}_length", "token", "middle", "Length of a generated answer"),
            (
                "completions/clipped_ratio",
                "share",
                "down",
                "Share of answers cut at the longest length: above 0.3 format and reward break.",
            ),
            *statistics(
                "completions/{}_terminated_length",
                "token",
                "middle",
                "Length of an answer that ended by itself",
            ),
            *statistics("tokens/response_length/{}", "token", "middle", "Response length"),
            *statistics("tokens/prompt_length/{}", "token", "none", "Prompt length"),
        ),
        *entries(
            "timing",
            *(
                (f"time/{split}/{phase}_s", "s", "down", f"Time of {phase} in {split}.")
                for split, phases in {
                    "train": ("rollout", "reward", "advantages"),
                    "eval": ("rollout", "reward"),
                }.items()
                for phase in phases
            ),
            ("time/<infix>/total", "s", "down", "Wall time of one operation."),
            ("time/<infix>/execute", "s", "down", "An operation's own work."),
            ("time/rollout", "s", "down", "Generating answers."),
            ("time/ref_log_probs_values_reward", "s", "down", "Reference log probabilities."),
            ("time/old_log_probs_values", "s", "down", "Log probabilities while sampling."),
            ("time/adv", "s", "down", "Computing advantages."),
            ("weights/sync_s", "s", "down", "Bringing new weights to the generating engine."),
        ),
        *entries(
            "memory",
            *(
                (
                    f"memory/<infix>/end/onload/max_{kind}_frac/<device>",
                    "share",
                    "down",
                    f"Peak of {kind} memory in one operation / memory of the device.",
                )
                for kind in ("allocated", "reserved")
            ),
        ),
        *entries(
            "state",
            ("weights/version", "count", "none", "Number of weight updates of the engine."),
            ("weights/bytes", "byte", "none", "Size of the weights sent to the engine."),
        ),
    )
}
