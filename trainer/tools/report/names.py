"""Names of metrics and options: the log keys of the metrics that findings use, the names that other
trainers use for our keys, and the names of each option in each framework.
"""

import re
from collections.abc import Iterator, Mapping


def _table(text: str) -> dict[str, tuple[str, ...]]:
    """Parse a table: each line is a name, then its alternatives. An indented line continues the
    line before it.
    """
    rows = (line.split() for line in text.replace("\n ", " ").strip().splitlines())
    return {name: tuple(others) for name, *others in rows}


def rows_of(table: str) -> Iterator[list[str]]:
    """Yield the cells of each line, which are separated by |. A line that begins with # is the
    header and is skipped.
    """
    for line in re.sub("\n +", " ", table).strip().splitlines():
        if line[0] != "#":
            yield [cell.strip() for cell in line.split("|")]


ROLES: Mapping[str, tuple[str, ...]] = _table("""
loss            train/loss loss actor/pg_loss
val_loss        val/loss eval/loss
val_reward      val/reward_mean val/reward val/reward_total_mean val/score val/score/mean
                val-core/<source>/reward/mean@<device> val/test_score/<source>
                val/<source>/avg@<device> val/<source>_pass<device> val/scores
val_accuracy    val/accuracy_mean val/accuracy val-core/<source>/acc/mean@<device>
                val/rewards/accuracy/mean val/rewards/accuracy_reward/mean val_correct/all/mean
grad            train/grad_norm grad_norm
lr              train/lr learning_rate
epoch           progress/epoch train/epoch epoch
time            train/time(s) time/train/step_s
data_time       time/train/data_s
tokens_per_s    throughput/train/tokens_per_s throughput/train/valid_tokens_per_s system/tps
                throughput/train/tokens_per_s_per_gpu
mfu             throughput/train/mfu
goodput         progress/goodput
gpu_util        system/gpu_util
reserved_share  memory/max_reserved_frac memory/reserved_frac
                memory/<infix>/end/onload/max_reserved_frac/<device>
rss             memory/cpu/rss_gib memory/cpu/<infix>/end/rss
allocated       memory/allocated_gib memory/max_allocated_gib
reserved        memory/max_reserved_gib
alloc_retries   memory/alloc_retries
ooms            memory/ooms
truncated       data/truncated_frac
empty_label     data/empty_label
total_len_max   train/seq_total_len_max
failed_saves    checkpoint/failed_in_a_row
kl              kl train/kl actor/kl_loss
update_kl       actor/approxkl actor/policykl
reward          reward train/reward train/reward_total_mean train/reward_mean reward_mean
                critic/score/mean critic/rewards/mean
format          rewards/Format/mean train/reward_format_mean train/tag_count_reward_mean
correct         train/reward_correct_mean rewards/accuracy/mean rewards/accuracy_reward/mean
                rewards/AnswerMatchCosine/mean rewards/<name>accuracy/mean
                rewards/accuracy<name>/mean rewards/correct<name>/mean rewards/<name>correct/mean
                rewards/<name>answer/mean
accuracy        train/accuracy_mean accuracy_mean train/accuracy
latency         train/latency_mean latency_mean
violation       train/budget_violation_rate budget_violation_rate
mean_length     completions/mean_length tokens/response_length/mean train/seq_completion_len_mean
max_length      completions/max_length tokens/response_length/max train/seq_completion_len_max
min_length      completions/min_length tokens/response_length/min
clipped_ratio   completions/clipped_ratio
clip_ratio      clip_ratio clip_ratio/region_mean clip_ratio/mean actor/ppo_ratio_clipfrac
                actor/clipfrac actor/pg_clipfrac policy/clipfrac_avg clip_fraction
value_loss      critic/loss critic/vf_loss
value_error     critic/error
entropy         train/entropy entropy critic/entropy/mean actor/entropy
adv_mean        train/adv_mean critic/advantages/mean
adv_std         train/adv_std
adv_max         critic/advantages/max
reward_std      reward_std train/reward_total_std
equal_groups    frac_reward_zero_std
reward_clip     critic/reward_clip_frac
""")
"""Role -> possible keys. A role is a metric that findings use; the first key in the log is used."""

ALIASES: Mapping[str, tuple[str, ...]] = _table("""
train/loss        loss train_loss train_loss_step training_loss actor/total_loss actor/sft_loss
                  sft_train/loss loss/policy_avg
train/lr          learning_rate train/learning_rate lr actor/lr sft_train/lr
                  lr-AdamW lr-Adam lr-SGD
train/grad_norm   grad_norm gradient_norm grad_2.0_norm_total train_grad_norm sft_train/grad_norm
                  actor/grad_norm
train/entropy     entropy entropy/mean policy/entropy_avg
kl                objective/kl objective/kl_avg
actor/approxkl    policy/approxkl_avg
reward            objective/rlhf_reward objective/scores scores
tokens/response_length/mean  response_length/mean val/sequence_lengths
tokens/response_length/max   response_length/max val/sequence_lengths_max
tokens/response_length/min   response_length/min val/sequence_lengths_min
completions/clipped_ratio    response_length/clip_ratio
train/token_accuracy  token_acc mean_token_accuracy train/mean_token_accuracy
train/time(s)         train/time_s train/time_s_ timing_s/step step_time train/step_time
                      perf/step_time time_per_step perf/time_per_step
time/train/data_s     data_time train/data_time perf/data_time
throughput/train/tokens_per_s  tokens_per_s tokens_per_sec tokens_per_second
                               train/tokens_per_sec train/tokens_per_second
                               train_tokens_per_second
critic/vf_loss        value_loss critic_loss vf_loss train/value_loss losses/value_loss
val/loss              val_loss valid_loss validation_loss
val/token_accuracy    val/token_acc val/mean_token_accuracy
progress/epoch        epoch train/epoch
progress/pct          percentage
progress/elapsed_s    elapsed_time _runtime
progress/eta_s        remaining_time
progress/tokens       total_tokens num_tokens train/num_tokens
memory/allocated_gib      gpu_mem_gb train/gpu_mem_gb perf/gpu_mem_gb
memory/max_allocated_gib  perf/max_memory_allocated_gb train/max_memory_allocated_gb
memory/max_reserved_gib   memory(GiB) perf/max_memory_reserved_gb memory/device_reserved_gib
memory/cpu/rss_gib        perf/cpu_memory_used_gb
throughput/train/tokens_per_s_per_gpu  perf/throughput tokens/train_per_sec_per_gpu
""")
"""Our key -> names in transformers, TRL, ms-swift, verl, ROLL and W&B."""

_WORDS = """
# our key                             | one word of each group    | may have, too
train/loss                            | loss                      | batch ce lm nll running total global reduced
 metrics
train/loss                            | cross entropy             | language loss metrics
val/loss                              | lm loss value             |
val/loss                              | val loss                  | epoch lm global metrics
train/lr                              | lr                        | adamw adam sgd pg group current actor ppo policy
 update
train/grad_norm                       | grad norm                 | global total l actor policy ppo update
train/grad_norm                       | gnorm                     |
train/time(s)                         | iter/step/batch time/sec  | total in
train/time(s)                         | end to time               | metrics sec
time/train/data_s                     | data/loader/fetch time/wait/sec | load loading data metrics
throughput/train/tokens_per_s         | tokens sec                | throughput learner
throughput/train/tokens_per_s_per_gpu | tokens sec gpu            | throughput
throughput/train/tokens_per_s_per_gpu | tgs                       | throughput
throughput/train/tokens_per_s_per_gpu | tps gpu                   | throughput
throughput/train/tokens_per_s_per_gpu | throughput gpu            |
throughput/train/tokens_per_s         | tps/wps                   | throughput
memory/cpu/rss_gib                    | cpu/host mem/ram          | gb used max process system
memory/cpu/rss_gib                    | rss/ram                   | cpu host mem gb process proc system
memory/max_reserved_gib               | reserved                  | gpu mem gb max system
memory/allocated_gib                  | mem gpu/allocated/active  | gpu allocated active gb used max system
memory/allocated_gib                  | mem                       | gb used max system
kl                                    | kl                        | actor critic policy rollout to ref divergence
 loss penalty
actor/approxkl                        | kl ppo                    | actor policy
train/entropy                         | entropy                   | actor policy ppo update token loss approx all
clip_ratio                            | clipfrac                  | pg ppo actor policy
clip_ratio                            | clip share                | pg ppo actor policy
completions/clipped_ratio             | truncated                 | is all share rollout response
completions/clipped_ratio             | clipped share             | rollout response
completions/clipped_ratio             | no eos share              | actor policy ppo
completions/clipped_ratio             | capped share              | rollout response length
completions/clipped_ratio             | hit limit/cap/max share   | rollout response length
reward                                | reward                    | total raw rollout all task actor policy ppo
reward_std                            | reward std                | total rollout group
tokens/response_length/mean           | gen tokens sample         |
tokens/response_length/max            | gen tokens sample max     |
tokens/response_length/min            | gen tokens sample min     |
tokens/response_length/mean           | seq length                | all
tokens/response_length/mean           | gen length                | rollout
tokens/response_length/mean           | response length/tokens    | rollout
tokens/response_length/max            | response length max       | rollout
tokens/response_length/min            | response length min       | rollout
val/reward                            | val reward                | out
val/accuracy                          | val accuracy              |
val/accuracy                          | val aime/amc/math/gsm/gpqa/mmlu/humaneval/mbpp/livecodebench/ifeval | k
critic/advantages/max                 | advantage max             | val
checkpoint/failed_in_a_row            | failed save               | checkpoint
"""
"""Words that identify a metric that is in no other table: the name must have one word of each
group, and otherwise only words from the last column and `FILLERS`.
"""
FILLERS = {"train", "step", "mean", "per", "perf", "optim"}
"""Words that carry no information about a metric."""
_SYNONYMS = _table("""
val       valid validation eval evaluation test dev heldout held
loss      nll
policy    pi
ref       reference
gen       generation generated
std       stdev stddev
grad      gradient gradients
iter      iteration
sec       s secs seconds second
tokens    token tok toks
gpu       device cuda vram
mem       memory
gb        gib mb mib bytes
loader    dataloader dataload
max       peak
mean      avg average
train     training
time      timing
perf      performance
optim     optimizer
truncated truncation
allocated alloc
reward    rewards return returns
response  completion completions answer answers output
length    len lengths
accuracy  acc
share     frac fraction ratio ratios rate
advantage advantages
failed    failures failure
save      saves saving
checkpoint ckpt checkpoints
seq       sequence
""")
SYNONYMS = {other: word for word, others in _SYNONYMS.items() for other in others}
"""Word in the name of a metric -> the corresponding word in `WORDS`."""

_OPTIONS = """
clip         | max_grad_norm | optim.clip_grad
lr           | learning_rate | optim.lr
warmup       | warmup_ratio | optim.lr_warmup_steps_ratio | optim.warmup_steps_ratio
schedule     | lr_scheduler_type | optim.lr_scheduler
batch        | per_device_train_batch_size | data.train_batch_size
eval         | eval_steps | trainer.test_freq | trainer.test_freq | test_freq
save         | save_steps | trainer.save_freq | trainer.save_freq | save_freq
workers      | dataloader_num_workers | data.num_workers
max_length   | max_length | data.max_length
epochs       | num_train_epochs | trainer.total_epochs
memory       | gradient_checkpointing=true
             | model.enable_gradient_checkpointing=true, a smaller data.max_token_len_per_gpu
             | model.enable_gradient_checkpointing=true
accumulation | gradient_accumulation_steps | the number of accumulated batches
beta         | beta | the weight of the KL penalty | actor_rollout_ref.actor.kl_loss_coef
epsilon_low  | epsilon | the lower clip range | actor_rollout_ref.actor.clip_ratio_low
epsilon_high | epsilon_high | the upper clip range | actor_rollout_ref.actor.clip_ratio_high
group        | num_generations | the number of answers to a prompt | actor_rollout_ref.rollout.n
completion   | max_completion_length | the longest answer allowed | data.max_response_length
"""
STEP_KEYS = _table("""
steps global_step/max_steps step global_step trainer/step trainer/global_step train/global_step _step
  current_steps current_iteration iteration iter last_step steps Step num_updates update epoch
""")["steps"]
"""Columns that can serve as the x axis, best first."""
OPTIONS: Mapping[str, tuple[str, ...]] = {
    purpose: tuple(names) for purpose, *names in rows_of(_OPTIONS)
}
"""Purpose -> option in transformers, then in this trainer, then in verl if its name differs.

In this trainer, reinforcement learning runs in the user's own loop, so its options are given in
words instead of keys.
"""


def _recognised(text: str) -> Iterator[tuple[str, list[set[str]], set[str]]]:
    for key, joined, more in rows_of(text):
        groups = [set(group.split("/")) for group in joined.split()]
        yield key, groups, FILLERS.union(more.split(), *groups)


WORDS = list(_recognised(_WORDS))
"""Our key, groups of words (a name must have one word of each group), and all words that the name
may have.
"""
_COLUMNS = {"fsdp-sft": 1, "verl": 2}
"""Source of a log -> column of the table above. Other sources use the names of transformers."""


def options_of(source: str) -> dict[str, str]:
    """Return purpose -> option in the framework that wrote a log."""
    column = _COLUMNS.get(source, 0)
    return {purpose: names[min(column, len(names) - 1)] for purpose, names in OPTIONS.items()}
