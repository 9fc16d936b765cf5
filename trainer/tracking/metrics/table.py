"""The table of metrics that this trainer logs, and a table of other trainers' metrics.

Console lines and history files show metrics in the order of these entries. `words.Metric` explains
the columns. An indented line continues the line before it.
"""

from trainer.tracking.metrics.words import Metric, rows_of

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


def slowest(phase: str) -> Metric:
    """Make the entry for the time of a phase on the rank where it takes longest."""
    key = f"time/train/{phase}_s"
    meaning = f"{key} on the rank where it is longest."
    return Metric(f"{key}_max", "s", "down", meaning, over_ranks="max", of=key)


OWN_TABLE = """
# key | unit | better | over ranks | every | meaning
train/seq_prompt_len_mean | token | none | global | step | Unsupervised tokens of a sample, mean.
train/seq_prompt_len_min | token | none | global | step | Unsupervised tokens of a sample, smallest.
train/seq_prompt_len_max | token | none | global | step | Unsupervised tokens of a sample, largest.
train/seq_prompt_len_p95 | token | none | global | step | Unsupervised tokens of a sample, 95th
 percentile.
train/seq_completion_len_mean | token | none | global | step | Supervised tokens of a sample, mean.
train/seq_completion_len_min | token | none | global | step | Supervised tokens of a sample,
 smallest.
train/seq_completion_len_max | token | none | global | step | Supervised tokens of a sample,
 largest.
train/seq_completion_len_p95 | token | none | global | step | Supervised tokens of a sample, 95th
 percentile.
train/seq_total_len_mean | token | none | global | step | All tokens of a sample, mean.
train/seq_total_len_min | token | none | global | step | All tokens of a sample, smallest.
train/seq_total_len_max | token | none | global | step | All tokens of a sample, largest.
train/seq_total_len_p95 | token | none | global | step | All tokens of a sample, 95th percentile.
val/seq_prompt_len_mean | token | none | global | eval | Unsupervised tokens of a sample, mean.
val/seq_prompt_len_min | token | none | global | eval | Unsupervised tokens of a sample, smallest.
val/seq_prompt_len_max | token | none | global | eval | Unsupervised tokens of a sample, largest.
val/seq_prompt_len_p95 | token | none | global | eval | Unsupervised tokens of a sample, 95th
 percentile.
val/seq_completion_len_mean | token | none | global | eval | Supervised tokens of a sample, mean.
val/seq_completion_len_min | token | none | global | eval | Supervised tokens of a sample, smallest.
val/seq_completion_len_max | token | none | global | eval | Supervised tokens of a sample, largest.
val/seq_completion_len_p95 | token | none | global | eval | Supervised tokens of a sample, 95th
 percentile.
val/seq_total_len_mean | token | none | global | eval | All tokens of a sample, mean.
val/seq_total_len_min | token | none | global | eval | All tokens of a sample, smallest.
val/seq_total_len_max | token | none | global | eval | All tokens of a sample, largest.
val/seq_total_len_p95 | token | none | global | eval | All tokens of a sample, 95th percentile.
train/total_token_count | token | none | global | step | Tokens of this step's batch over all ranks,
 without padding.
train/total_valid_token_count | token | none | global | step | Supervised tokens of this step's
 batch over all ranks; 0 = nothing to learn from.
data/valid_token_frac | share | middle | global | step | Supervised tokens / all tokens without
 padding.
data/pad_frac | share | down | global | step | Padding / all token slots that were computed.
data/packing_efficiency | share | up | global | step | Tokens without padding / slots of the
 micro-batches at their largest size.
data/empty_label | sample | down | global | step | Samples of this step without a supervised token:
 nothing is learned from them.
data/token_imbalance | ratio | down | global | step | Tokens of the rank with the most tokens / mean
 over ranks: 1 = even. The others wait for that rank.
train/loss | nat/token | down | global | step | Summed cross-entropy of all supervised tokens of the
 step, on all ranks, / their number, whatever model.loss trains.
train/objective | nat/token | down | global | step | Mean of the training loss over the step's
 supervised tokens, where model.loss is not cross_entropy.
train/objective/<term> | nat/token | down | global | step | Mean of a further term of the training
 loss over the step's supervised tokens, without its weight.
train/loss_ema | nat/token | down | global | step | Bias-corrected exponential mean of train/loss
 with decay 0.98: the trend without the noise.
train/loss_by/<source> | nat/token | down | global | step | train/loss over the tokens of one data
 source, at steps with tokens from it.
train/ppl | 1 | down | global | step | Perplexity, exp(train/loss), capped: the number of equally
 likely tokens.
train/token_accuracy | share | up | global | step | Fraction of supervised tokens that the model
 predicts correctly (top-1).
train/lr(1e-3) | 1e-3 | none | global | step | Learning rate that this step used (not the next
 step's), in thousandths: 0.01 means 1e-5.
train/grad_norm | 1 | middle | global | step | L2 norm of the whole gradient over all ranks, before
 clipping; sudden multiples of its usual level are spikes.
moe/router_loss | 1 | down | global | step | Auxiliary loss of a mixture of experts' routers,
 without its coefficient: 0 in a run's first step, later about the number of experts chosen per
 token if the load is balanced.
moe/load_max_over_mean | ratio | down | global | step | Tokens of the busiest expert / mean over
 experts, in the layer where this is largest: 1 = even. Experts have no capacity limit and drop no
 tokens.
progress/step | step | none | global | step | Finished optimizer steps, from 1.
progress/epoch | epoch | none | global | step | Passes over the training data, from 0.
progress/tokens | token | none | global | step | Tokens trained on so far, without padding.
progress/pct | % | none | global | step | Finished part of the run.
data/truncated | sample | down | global | rare | Training samples that were cut to data.max_length.
data/truncated_frac | share | down | global | rare | Share of training samples that were cut.
data/dropped | sample | down | global | rare | Rows dropped when the data was prepared: too long or
 unusable.
optim/grad_norm/<block> | 1 | middle | global | rare | train/grad_norm of one block of the model:
 shows in which layer a spike arises.
optim/param_norm | 1 | none | global | rare | L2 norm of all weights: steady growth without bound is
 a sign of trouble.
train/loss_max_rank | nat/token | down | max | step | Mean loss of the rank where it is highest: far
 above train/loss, one rank has odd data.
memory/allocated_gib | GiB | down | max | step | Device memory in tensors at the end of the step, on
 the rank with the most.
memory/max_allocated_gib | GiB | down | max | step | Peak of allocated memory since the last step,
 on the rank with the highest peak.
memory/max_reserved_gib | GiB | down | max | step | Peak of reserved memory since the last step, on
 the rank with the highest peak. The card must have at least this much.
memory/max_reserved_frac | share | down | max | step | max_reserved / memory of the device: above
 0.95 the next long batch may not fit.
memory/cpu/rss_gib | GiB | down | max | step | Host memory of the training process, largest rank;
 steady growth is a leak.
train/nonfinite | count | down | sum | step | Micro-batches of this step, on any rank, whose loss
 (or the rank's share of it) was NaN or infinite.
memory/alloc_retries | count | down | sum | step | Allocations that succeeded only after emptying
 the cache: memory is nearly full, steps are slow.
memory/ooms | count | down | sum | step | Allocations that failed: out of memory.
val/loss | nat/token | down | global | eval | Summed cross-entropy of validation samples / their
 supervised tokens; rising while train/loss falls: overfitting.
val/loss_stderr | nat/token | down | global | eval | Standard error of val/loss over samples:
 smaller differences are noise.
val/ppl | 1 | down | global | eval | Perplexity on the validation set, exp(val/loss), capped.
val/token_accuracy | share | up | global | eval | Fraction of supervised validation tokens that the
 model predicts correctly (top-1).
val/loss_by/<source> | nat/token | down | global | eval | val/loss over the tokens of one of several
 data sources.
val/best_loss | nat/token | down | global | eval | Lowest val/loss so far.
val/best_step | step | none | global | eval | Step of the lowest val/loss: use its checkpoint.
val/gap | nat/token | down | global | eval | val/loss - train/loss_ema: growing means memorisation.
val/samples | sample | none | global | eval | Validation samples that were measured.
val/total_valid_token_count | token | none | global | eval | Supervised tokens of the validation
 set.
throughput/train/tokens_per_s | 1/s | up | main | step | Tokens of all ranks, without padding, /
 train/time(s).
throughput/train/valid_tokens_per_s | 1/s | up | main | step | Supervised tokens of all ranks /
 train/time(s).
throughput/train/valid_tokens_per_s_update | 1/s | up | main | step | Supervised tokens of all ranks
 / the time of this step's forward, backward and update: without waiting for data.
throughput/train/tokens_per_s_per_gpu | 1/s | up | main | step | tokens_per_s / number of devices.
throughput/train/tflops_per_gpu | TFLOP/s | up | main | step | Arithmetic that the model needs, per
 device: (6 N T + 6 M S + 6 L H d sum(len^2)) / train/time(s) with N matrix parameters for T tokens,
 M of the head for S supervised ones, 4 instead of 6 for frozen ones; within a sliding window w
 len^2 is len^2 - (len - w)^2; recomputation not counted.
throughput/train/mfu | share | up | main | step | tflops_per_gpu / the device's peak in bfloat16;
 absent for a device whose peak is unknown.
train/time(s) | s | down | main | step | Wall time of this step with its wait for data, without
 validation and checkpoint. Ranks wait for each other in every step: the slowest sets it.
progress/eta_s | s | down | main | step | Seconds left: remaining steps times the median step,
 without validations and saves.
progress/elapsed_s | s | none | main | step | Seconds trained so far, over all attempts.
progress/goodput | share | up | main | step | Time of steps that counted / wall time of all
 attempts.
ckpt/age_steps | step | down | main | step | Steps since the last good checkpoint: what a crash
 would cost.
time/train/data_s | s | down | mean | step | Waiting for the next batch: above a tenth of the step,
 the loader slows training.
time/train/shard_s | s | down | mean | step | Copying the batch from host to device.
time/train/forward_s | s | down | mean | step | Forward pass over all micro-batches.
time/train/backward_s | s | down | mean | step | Backward pass over all micro-batches, with the
 gradient reduction.
time/train/optimizer_s | s | down | mean | step | Clipping and update of the weights.
time/train/logging_s | s | down | mean | step | Handing the metrics over.
time/train/guard_s | s | down | mean | step | Looking for anomalies.
time/train/other_s | s | down | mean | step | step_s minus all other phases: unaccounted time.
time/train/step_s | s | down | mean | step | Sum of the phases of this row.
time/train/update_s | s | down | mean | step | Forward, backward and optimizer together.
time/train/slowest_rank | rank | none | slowest | step | Rank whose data, copy, logging and guard
 time of the step before is longest: the others wait for it.
time/train/checkpoint_s | s | down | main | checkpoint | How long the last save stopped training.
time/train/checkpoint_bg_s | s | down | main | checkpoint | How long the last save wrote in the
 background.
ckpt/bytes | byte | none | main | checkpoint | Size of the last checkpoint.
ckpt/save_s | s | down | main | checkpoint | Time from the start of the last save to its commit.
ckpt/kept | count | none | main | checkpoint | Checkpoints on disk.
time/eval/step_s | s | down | main | eval | Validation: one batch, mean over the batches.
time/eval/total_s | s | down | main | eval | Validation: total time.
throughput/eval/tokens_per_s | 1/s | up | main | eval | Validation: tokens of all ranks, without
 padding, / time/eval/total_s.
throughput/eval/valid_tokens_per_s | 1/s | up | main | eval | Validation: supervised tokens of all
 ranks / time/eval/total_s.
checkpoint/failed_in_a_row | count | down | main | event | Saves that failed since the last good
 one.
guard/loss_z | 1 | middle | guard | step | Distance of train/loss from its recent median in robust
 standard deviations: above 8 is a spike.
guard/grad_z | 1 | middle | guard | step | Distance of train/grad_norm from its recent median in
 robust standard deviations: above 6 is a spike.
optim/skipped_steps | step | down | guard | step | Updates skipped so far: loss or gradient not
 finite, or above the guard's limits.
data/skipped_batches | count | down | guard | step | Batches skipped after rollbacks so far.
system/gpu_util | % | up | mean | timer | Time in which the GPU computed anything: below 80 %
 something slows it. Read from `nvidia-smi`.
system/gpu_temp_c | degC | down | max | timer | Temperature of the hottest GPU.
system/gpu_power_w | W | none | max | timer | Power of the GPU that draws most.
"""
FOREIGN_TABLE = """
# key | unit | better | meaning
train/entropy | nat/token | middle | Mean entropy of the predicted distribution.
critic/entropy/mean | nat/token | middle | Entropy of the policy: high = it still explores, near 0 =
 it has collapsed.
kl | nat/token | middle | Divergence from the reference policy: 0.01 to 5 is healthy, above 10 is
 not.
train/lr | 1 | none | Learning rate of the step.
actor/lr | 1 | none | Learning rate of the policy.
critic/lr | 1 | none | Learning rate of the value model.
actor/pg_loss | 1 | none | Policy gradient loss; near 0 is normal.
actor/weighted_pg_loss | 1 | none | Policy gradient loss with sample weights.
actor/sample_weights_<statistic> | 1 | none | Weight in the policy loss.
critic/value | 1 | none | Value predicted while sampling, mean.
critic/vpred | 1 | none | Value predicted now, mean.
critic/values/<statistic> | 1 | none | Estimated value of a state.
train/adv_std | 1 | none | Spread of advantages within their group.
rewards/<name>/std | 1 | none | Reward of one function, spread.
<split>/reward_total_std | 1 | none | Spread of the total reward.
actor/total_loss | 1 | down | The loss that is back-propagated, with all terms.
critic/loss | 1 | down | Loss of the value model: its distance from the returns.
critic/error | 1 | down | Squared difference of value and return, mean.
actor/positive_sft_loss | nat/token | down | SFT loss over samples with a positive reward.
actor/negative_sft_loss | nat/token | none | SFT loss over samples with a negative reward, which are
 to become less likely.
actor/kl_loss | nat | down | Loss term that keeps the policy near the reference.
actor/approxkl | nat | middle | Estimated KL divergence between the policy before and after the
 update.
actor/policykl | nat | middle | KL divergence between the sampling policy and the trained one.
actor/clipfrac | share | middle | Share of tokens clipped by PPO.
actor/ppo_ratio_clipfrac | share | middle | Share of tokens clipped by PPO.
actor/ppo_ratio_high_clipfrac | share | middle | Share of tokens clipped at the upper end.
actor/ppo_ratio_low_clipfrac | share | middle | Share of tokens clipped at the lower end.
critic/clipfrac | share | middle | Share of clipped value predictions.
clip_ratio | share | middle | Share of clipped tokens: 0.1 to 0.3 is normal.
clip_ratio/<end>_<statistic> | share | middle | Share of clipped tokens at one end or either.
actor/ratio_<statistic> | ratio | middle | New over old probability of the sampled tokens, 1 =
 unchanged.
critic/ref_log_prob/mean | nat | none | Log probability under the reference.
critic/old_log_prob/mean | nat | none | Log probability while sampling.
critic/advantages/<statistic> | 1 | middle | How much better than expected an action is.
train/adv_<statistic> | 1 | middle | Advantage within its group.
reward_std | 1 | middle | Spread of rewards: near 0, nothing can be learned.
critic/score/<statistic> | 1 | up | Raw reward of an episode.
critic/rewards/<statistic> | 1 | up | Normalised and clipped reward.
critic/returns/<statistic> | 1 | up | Discounted sum of rewards.
val/score/<statistic> | 1 | up | Score of a validation episode.
reward | 1 | up | Reward of a generated answer, mean: its trend counts, not its sign.
reward_mean | 1 | up | Accuracy minus penalties for latency and budget, mean of the epoch.
rewards/<name>/mean | 1 | up | Reward of one function, mean.
<split>/reward_total_<statistic> | 1 | up | Total reward.
<split>/reward_correct_mean | 1 | up | Weighted share of right answers.
<split>/reward_format_mean | 1 | up | Weighted reward for the format.
<split>/tag_count_reward_mean | 1 | up | Weighted reward for the tags.
critic/reward_clip_frac | share | down | Share of clipped rewards.
frac_reward_zero_std | share | down | Share of groups with equal rewards.
budget_violation_rate | share | down | Share of answers slower than the budget: below 0.1 late in
 training.
completions/clipped_ratio | share | down | Share of answers cut at the longest length: above 0.3
 format and reward break.
memory/<infix>/end/onload/max_allocated_frac/<device> | share | down | Peak of allocated memory in
 one operation / memory of the device.
memory/<infix>/end/onload/max_reserved_frac/<device> | share | down | Peak of reserved memory in one
 operation / memory of the device.
accuracy | share | up | Share of right answers.
accuracy_mean | share | up | Share of right answers, mean.
accuracy_std | share | none | Share of right answers, spread.
latency_mean | ms | down | Mean time per answer.
latency_std | ms | none | Standard deviation of the time per answer.
completions/<statistic>_length | token | middle | Length of a generated answer.
completions/<statistic>_terminated_length | token | middle | Length of the answers that ended with
 an end token.
tokens/response_length/<statistic> | token | middle | Response length.
tokens/prompt_length/<statistic> | token | none | Prompt length.
time/train/<operation>_s | s | down | Time of one operation of a training step.
time/eval/<operation>_s | s | down | Time of one operation of a validation.
time/<infix>/total | s | down | Wall time of one operation.
time/<infix>/execute | s | down | An operation's own work.
time/rollout | s | down | Generating answers.
time/ref_log_probs_values_reward | s | down | Reference log probabilities.
time/old_log_probs_values | s | down | Log probabilities while sampling.
time/adv | s | down | Computing advantages.
weights/sync_s | s | down | Bringing new weights to the generating engine.
weights/version | count | none | Number of times the generation engine received new weights.
weights/bytes | byte | none | Size of the weights sent to the engine.
"""
TABLE = (
    *map(slowest, PHASES),
    *(
        Metric(
            key,
            unit,
            better,
            meaning,
            over_ranks,
            every,
            console=CONSOLE.get(key, ""),
            csv=CSV.get(key, ""),
        )
        for key, unit, better, over_ranks, every, meaning in rows_of(OWN_TABLE)
    ),
)
FOREIGN = tuple(
    Metric(key, unit, better, meaning, over_ranks="main")
    for key, unit, better, meaning in rows_of(FOREIGN_TABLE)
)
"""Metrics of other trainers: the report explains them, and users log them through `Tracking`."""
