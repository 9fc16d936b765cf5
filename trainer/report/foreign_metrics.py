"""Metrics that other trainers log: names and meanings for reading their logs, and for who logs them through `Tracking`.

This trainer computes none of them; what it does stands in `trainer.metrics`.
"""

from dataclasses import dataclass

from trainer import metrics
from trainer.metrics.words import Better, Metric, pattern, split_reducer


@dataclass(frozen=True)
class Foreign:
    key: str
    """May hold placeholders, as those of `trainer.metrics`."""
    unit: str
    group: str
    better: Better
    meaning: str


# fmt: off
FOREIGN: tuple[Foreign, ...] = (
    # optimisation
    Foreign("train/token_accuracy", "share", "optimisation", "up",
            "Share of supervised tokens to which the model gives the highest probability of all."),
    Foreign("train/entropy", "nat/token", "optimisation", "middle",
            "Mean entropy of the predicted next-token distribution: near 0, the model has become certain of "
            "everything."),
    Foreign("optim/lr/<group>", "1", "optimisation", "none",
            "Learning rate of one parameter group, where groups differ."),
    Foreign("optim/grad_norm/<block>", "1", "optimisation", "middle",
            "Gradient norm of one layer block: shows where a spike comes from."),
    Foreign("optim/loss_scale", "1", "optimisation", "none",
            "Factor on the loss that keeps float16 gradients from vanishing; 1 where no scaling is needed."),
    Foreign("actor/lr", "1", "optimisation", "none", "Learning rate of the policy, ROLL's name."),
    Foreign("actor/total_loss", "1", "optimisation", "down",
            "The loss that is really back-propagated: policy loss and all additional terms."),
    Foreign("actor/positive_sft_loss", "nat/token", "optimisation", "down",
            "SFT loss over samples with a positive reward."),
    Foreign("actor/negative_sft_loss", "nat/token", "optimisation", "none",
            "SFT loss over samples with a negative reward, which are to become less likely."),
    Foreign("actor/pg_loss", "1", "optimisation", "none",
            "Policy gradient loss; its sign and level mean little, near 0 is normal."),
    Foreign("actor/weighted_pg_loss", "1", "optimisation", "none", "Policy gradient loss with each sample's weight."),
    Foreign("actor/kl_loss", "nat", "optimisation", "down",
            "Loss term that holds the policy near the reference policy."),
    Foreign("actor/approxkl", "nat", "optimisation", "middle",
            "Estimated KL divergence between the policy before and after the update."),
    Foreign("actor/policykl", "nat", "optimisation", "middle",
            "KL divergence between the policy that sampled and the one now trained."),
    Foreign("actor/clipfrac", "share", "optimisation", "middle",
            "Share of tokens whose probability ratio hit the clip range of PPO."),
    Foreign("actor/ppo_ratio_clipfrac", "share", "optimisation", "middle",
            "Share of tokens clipped at either end of the PPO range."),
    Foreign("actor/ppo_ratio_high_clipfrac", "share", "optimisation", "middle",
            "Share of tokens clipped at the upper end of the PPO range."),
    Foreign("actor/ppo_ratio_low_clipfrac", "share", "optimisation", "middle",
            "Share of tokens clipped at the lower end of the PPO range."),
    Foreign("actor/ratio_mean", "ratio", "optimisation", "middle",
            "New over old probability of the sampled tokens, mean: 1 = unchanged policy."),
    Foreign("actor/ratio_max", "ratio", "optimisation", "middle",
            "New over old probability of the sampled tokens, largest."),
    Foreign("actor/ratio_min", "ratio", "optimisation", "middle",
            "New over old probability of the sampled tokens, smallest."),
    Foreign("actor/sample_weights_mean", "1", "optimisation", "none", "Weight of a sample in the policy loss, mean."),
    Foreign("actor/sample_weights_min", "1", "optimisation", "none",
            "Weight of a sample in the policy loss, smallest."),
    Foreign("actor/sample_weights_max", "1", "optimisation", "none", "Weight of a sample in the policy loss, largest."),
    Foreign("critic/lr", "1", "optimisation", "none", "Learning rate of the value model."),
    Foreign("critic/loss", "1", "optimisation", "down",
            "Loss of the value model: how far its predictions are from the returns."),
    Foreign("critic/value", "1", "optimisation", "none", "Value that the model predicted while sampling, mean."),
    Foreign("critic/vpred", "1", "optimisation", "none", "Value that the model predicts now, mean."),
    Foreign("critic/clipfrac", "share", "optimisation", "middle",
            "Share of value predictions that hit their clip range."),
    Foreign("critic/error", "1", "optimisation", "down",
            "Squared difference between predicted value and return, mean."),
    Foreign("critic/ref_log_prob/mean", "nat", "optimisation", "none",
            "Log probability of the sampled tokens under the reference policy, mean."),
    Foreign("critic/old_log_prob/mean", "nat", "optimisation", "none",
            "Log probability of the sampled tokens under the policy that sampled them, mean."),
    Foreign("critic/entropy/mean", "nat/token", "optimisation", "middle",
            "Entropy of the policy: high = it still explores, near 0 = it has collapsed."),
    Foreign("kl", "nat/token", "optimisation", "middle",
            "Divergence of the policy from the reference policy: 0.01 to 5 is healthy, above 10 it has run away."),
    Foreign("clip_ratio", "share", "optimisation", "middle",
            "Share of tokens whose probability ratio was clipped: 0.1 to 0.3 is normal."),
    Foreign("clip_ratio/low_mean", "share", "optimisation", "middle",
            "Share of tokens clipped at the lower end, mean over the batch."),
    Foreign("clip_ratio/low_min", "share", "optimisation", "middle",
            "Share of tokens clipped at the lower end, smallest."),
    Foreign("clip_ratio/high_mean", "share", "optimisation", "middle",
            "Share of tokens clipped at the upper end, mean over the batch."),
    Foreign("clip_ratio/high_max", "share", "optimisation", "middle",
            "Share of tokens clipped at the upper end, largest."),
    Foreign("clip_ratio/region_mean", "share", "optimisation", "middle",
            "Share of tokens clipped at either end, mean over the batch."),
    # validation
    Foreign("val/entropy", "nat/token", "validation", "middle",
            "Mean entropy of the predictions on the validation set."),
    # reward
    Foreign("reward", "1", "reward", "up",
            "Total reward of a generated answer, mean: the goal; its trend counts, not its sign."),
    Foreign("reward_std", "1", "reward", "middle",
            "Spread of the rewards: near 0, all answers of a group are alike and nothing can be learned."),
    Foreign("rewards/<name>/mean", "1", "reward", "up", "Reward of one reward function, mean."),
    Foreign("rewards/<name>/std", "1", "reward", "middle", "Reward of one reward function, spread."),
    Foreign("frac_reward_zero_std", "share", "reward", "down",
            "Share of groups in which all rewards are equal: those teach nothing."),
    Foreign("train/reward_total_mean", "1", "reward", "up", "Total reward of the training batch, mean."),
    Foreign("train/reward_total_std", "1", "reward", "middle", "Total reward of the training batch, spread."),
    Foreign("train/reward_total_min", "1", "reward", "up", "Total reward of the training batch, smallest."),
    Foreign("train/reward_total_max", "1", "reward", "up", "Total reward of the training batch, largest."),
    Foreign("train/reward_correct_mean", "1", "reward", "up",
            "Share of correct answers times the weight of that reward (weight 0.5 halves it)."),
    Foreign("train/reward_format_mean", "1", "reward", "up",
            "Weighted reward for the demanded format, mean; rising while correctness is flat = format hacking."),
    Foreign("train/tag_count_reward_mean", "1", "reward", "up", "Weighted reward for the right number of tags, mean."),
    Foreign("val/reward_total_mean", "1", "reward", "up", "Total reward in validation, mean."),
    Foreign("val/reward_total_std", "1", "reward", "middle", "Total reward in validation, spread."),
    Foreign("val/reward_total_min", "1", "reward", "up", "Total reward in validation, smallest."),
    Foreign("val/reward_total_max", "1", "reward", "up", "Total reward in validation, largest."),
    Foreign("val/reward_correct_mean", "1", "reward", "up", "Weighted share of correct answers in validation."),
    Foreign("val/reward_format_mean", "1", "reward", "up", "Weighted format reward in validation, mean."),
    Foreign("val/tag_count_reward_mean", "1", "reward", "up", "Weighted tag-count reward in validation, mean."),
    Foreign("train/adv_mean", "1", "reward", "middle",
            "Group-normalised advantage, mean: about 0, otherwise grouping or reward is wrong."),
    Foreign("train/adv_std", "1", "reward", "middle",
            "Group-normalised advantage, spread: about 1; near 0 all rewards are equal."),
    Foreign("train/adv_min", "1", "reward", "none", "Group-normalised advantage, smallest."),
    Foreign("train/adv_max", "1", "reward", "none", "Group-normalised advantage, largest."),
    Foreign("val/score/mean", "1", "reward", "up", "Score of a validation episode, mean."),
    Foreign("val/score/max", "1", "reward", "up", "Score of a validation episode, largest."),
    Foreign("val/score/min", "1", "reward", "up", "Score of a validation episode, smallest."),
    Foreign("critic/score/mean", "1", "reward", "up", "Raw reward of the environment per episode, mean."),
    Foreign("critic/score/max", "1", "reward", "up", "Raw reward of the environment per episode, largest."),
    Foreign("critic/score/min", "1", "reward", "up", "Raw reward of the environment per episode, smallest."),
    Foreign("critic/rewards/mean", "1", "reward", "up", "Reward after normalising and clipping, mean."),
    Foreign("critic/rewards/max", "1", "reward", "up", "Reward after normalising and clipping, largest."),
    Foreign("critic/rewards/min", "1", "reward", "up", "Reward after normalising and clipping, smallest."),
    Foreign("critic/reward_clip_frac", "share", "reward", "down",
            "Share of rewards that were clipped: too high, adjust the reward range or threshold."),
    Foreign("critic/advantages/mean", "1", "reward", "middle", "How much better an action was than expected, mean."),
    Foreign("critic/advantages/max", "1", "reward", "none", "How much better an action was than expected, largest."),
    Foreign("critic/advantages/min", "1", "reward", "none", "How much better an action was than expected, smallest."),
    Foreign("critic/returns/mean", "1", "reward", "up", "Discounted sum of the rewards to come, mean."),
    Foreign("critic/returns/max", "1", "reward", "up", "Discounted sum of the rewards to come, largest."),
    Foreign("critic/returns/min", "1", "reward", "up", "Discounted sum of the rewards to come, smallest."),
    Foreign("critic/values/mean", "1", "reward", "none", "Value estimated for a state, mean."),
    Foreign("critic/values/max", "1", "reward", "none", "Value estimated for a state, largest."),
    Foreign("critic/values/min", "1", "reward", "none", "Value estimated for a state, smallest."),
    Foreign("reward_mean", "1", "reward", "up",
            "Accuracy minus latency penalty minus budget penalty, mean of the epoch: negative early, then it rises."),
    Foreign("accuracy_mean", "share", "reward", "up", "Share of right answers, mean of the epoch."),
    Foreign("accuracy_std", "share", "reward", "none", "Share of right answers, spread over the epoch."),
    Foreign("latency_mean", "ms", "reward", "down",
            "Time of an answer, mean of the epoch: settles near the budget, not above it."),
    Foreign("latency_std", "ms", "reward", "down", "Time of an answer, spread over the epoch."),
    Foreign("budget_violation_rate", "share", "reward", "down",
            "Share of answers that took longer than the budget: below 0.1 late in training, ideally below 0.05."),
    # length
    Foreign("completions/mean_length", "token", "length", "middle",
            "Length of a generated answer, mean: a jump is over-generation, a fall an early end."),
    Foreign("completions/min_length", "token", "length", "middle",
            "Length of a generated answer, smallest: a jump shows a disturbed stop condition."),
    Foreign("completions/max_length", "token", "length", "none",
            "Length of a generated answer, largest: again and again at the cap, generation does not stop by itself."),
    Foreign("completions/clipped_ratio", "share", "length", "down",
            "Share of answers cut at the longest length: above 0.3 format and reward break."),
    Foreign("completions/mean_terminated_length", "token", "length", "middle",
            "Length of the answers that ended by themselves, mean."),
    Foreign("completions/min_terminated_length", "token", "length", "middle",
            "Length of the answers that ended by themselves, smallest."),
    Foreign("completions/max_terminated_length", "token", "length", "none",
            "Length of the answers that ended by themselves, largest."),
    Foreign("tokens/response_length/mean", "token", "length", "middle",
            "Length of a generated response, mean; ROLL's name."),
    Foreign("tokens/response_length/max", "token", "length", "none", "Length of a generated response, largest."),
    Foreign("tokens/response_length/min", "token", "length", "middle", "Length of a generated response, smallest."),
    Foreign("tokens/prompt_length/mean", "token", "length", "none", "Length of a prompt, mean; ROLL's name."),
    Foreign("tokens/prompt_length/max", "token", "length", "none", "Length of a prompt, largest."),
    Foreign("tokens/prompt_length/min", "token", "length", "none", "Length of a prompt, smallest."),
    # timing
    Foreign("time/train/rollout_s", "s", "timing", "down", "Generating answers for the training batch."),
    Foreign("time/train/reward_s", "s", "timing", "down", "Computing rewards."),
    Foreign("time/train/advantages_s", "s", "timing", "down", "Computing advantages."),
    Foreign("time/eval/rollout_s", "s", "timing", "down", "Validation: generating answers."),
    Foreign("time/eval/reward_s", "s", "timing", "down", "Validation: computing rewards."),
    Foreign("time/rollout", "s", "timing", "down", "Generating answers; ROLL's name."),
    Foreign("time/ref_log_probs_values_reward", "s", "timing", "down",
            "Reference log probabilities, values and rewards."),
    Foreign("time/old_log_probs_values", "s", "timing", "down",
            "Log probabilities and values under the policy that sampled."),
    Foreign("time/adv", "s", "timing", "down", "Computing advantages; ROLL's name."),
    Foreign("weights/sync_s", "s", "timing", "down", "Bringing new weights to the engine that generates."),
    # memory
    Foreign("memory(GiB)", "GiB", "memory", "down", "Running maximum of device memory, ms-swift's name."),
    # state
    Foreign("epoch", "epoch", "state", "none",
            "Passes over the training data with their fraction, name in ms-swift, transformers and histories."),
    Foreign("global_step/max_steps", "step", "state", "none",
            "Finished and planned steps as text ('2800/6000'), ms-swift's name."),
    Foreign("percentage", "%", "state", "none", "Finished part of the run, ms-swift's name."),
    Foreign("elapsed_time", "s", "state", "none", "Time since the start as text ('1h 2m 3s'), ms-swift's name."),
    Foreign("train_speed", "s/step", "state", "down",
            "Elapsed time / steps since the start, so that stalls hide in it, ms-swift's name."),
    Foreign("weights/version", "count", "state", "none", "How often the engine that generates got new weights."),
    Foreign("weights/bytes", "byte", "state", "none", "Size of the weights sent to it."),
)
# fmt: on
_EXACT = {metric.key: metric for metric in FOREIGN}
_PATTERNS = [metric for metric in FOREIGN if "<" in metric.key]


def lookup(key: str) -> Metric | Foreign | None:
    """What is known about a key in any log: of our own metrics, else of other trainers'.

    `eval/` is another spelling of `val/`; some trainers put either or `train/` before names that stand here without. A
    suffix such as `@sum` is taken off.
    """
    name, _ = split_reducer(key)
    place, _, rest = name.partition("/")
    found = _find(name) or (_find(f"val/{rest}") if place == "eval" else None)
    return found or (_foreign(rest) if place in ("train", "val", "eval") else None)


def _find(name: str) -> Metric | Foreign | None:
    return metrics.find(name) or _foreign(name)


def _foreign(name: str) -> Foreign | None:
    return _EXACT.get(name) or next((metric for metric in _PATTERNS if pattern(metric.key).fullmatch(name)), None)
