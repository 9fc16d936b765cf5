"""Causes and remedies as text, with the option names of the framework that wrote the log."""

from collections.abc import Mapping

from trainer.tools.report.analysed_run import AnalysedRun
from trainer.tools.report.formatting import number
from trainer.tools.report.learning_rate import scheduled
from trainer.tools.report.names import rows_of

_ADVICE = """
clip
  | Set {new_clip}, and skip the optimizer step when the norm is far above it.
  | Clipping limits how far a batch can move the weights; too low a limit slows all learning.
lower_rate
  | Lower {new_lr} and set {warmup} to 0.1.
  | Smaller updates stay in the range where the loss still falls; training takes more steps.
decay
  | Let the learning rate decay: {schedule}=cosine or linear.
  | Small final updates average out noise; a run that is extended later continues at a low rate.
larger_batch
  | Raise {new_batch}, or {accumulation} to 8.
  | More samples make a gradient less noisy; each step takes more time or memory.
stronger_kl
  | Raise {new_beta} and adapt it to the measured KL.
  | The penalty pulls the policy back to its reference; it also slows learning.
tighter_ratio
  | Clip probability ratios tighter: {epsilon_low} and {epsilon_high} at 0.1.
  | An update cannot move probabilities far from the sampling policy; learning gets slower.
shorter_completions
  | Lower {new_completion}, give truncated answers reward 0, and set stop words or the end-of-text
    token.
  | Endless answers no longer fill the batch; answers that need the length are lost.
watch
  | Validate and save often ({eval}=100 and {save}=100); {watched}.
  | You notice problems early and lose little work; validating and saving take time and disk space.
larger_group
  | Raise {group} to 8 or 10, the batch size or the learning rate's decay, or train longer.
  | More answers to a prompt make advantages less noisy and equal rewards rarer; generation takes
    longer.
loading
  | Raise {workers}, prepare the data beforehand, or use a faster disk.
  | Workers load data in the background while the model trains; they need memory and CPU cores.
memory
  | Use {memory}, or a smaller micro-batch.
  | Activations are recomputed instead of stored, so less memory is needed; a step takes longer.
"""
ADVICE = {name: (text, why) for name, text, why in rows_of(_ADVICE)}
"""Name -> a sentence with options as {purpose}, and a sentence about its principle and cost."""
_REASONS = """
none
  |
trend
  |
  | The trend matters more than the level.
negative
  | Accuracy is still low, or the latency budget is missed.
  | This is fine while the reward rises; otherwise check the accuracy and the budget.
drowned
  | The weights of the reward functions hide the learning signal, or groups are too small.
  | Change the reward weights.
  | larger_group
unsuitable
  | The run is still too short, or the hyperparameters are unsuitable.
  | Train longer, or change {lr} and {group}.
no_end
  | Some answers never reach an end token.
  | shorter_completions
no_labels
  | The batches have no label tokens: wrong template or mask, or truncation comes too early.
  | Look at the labels of a batch, and check {max_length} and the truncation.
no_groups
  | Groups have no effect: if all rewards of a group are equal, its advantages are 0.
  | Check that a group holds several answers to one prompt.
  | larger_group
kept
  | Something keeps memory, for example a list of losses, a cache, or worker processes.
  | Compare with {workers}=0, and look for tensors that are kept from step to step.
unfit
  | The tokenizer or chat template does not match the model, or the weights are untrained.
  | Decode a tokenized sample, and check which weights were loaded.
by_heart
  | The model has probably memorized the samples: it saw too few of them too often.
  | Train for fewer {epochs}, add data, or use an earlier checkpoint.
unstable
  | Training is unstable: the learning rate is too high.
  | lower_rate
  | clip
unsaved
  | The disk is full or gone, or a rank failed while saving. A crash would lose all steps since
    the last good checkpoint.
  | Look for save errors in the log, and check the free disk space.
scale
  | The loss or the model has an unusual scale. This alone is not a problem.
  | Nothing to do if the loss falls steadily.
vanished
  | There is nothing left to learn, the loss covers no label tokens, layers are dead or frozen, or
    gradients underflow.
  | Check the labels and which parameters are trained; stop if the loss no longer falls.
swinging
  | The learning rate is too large, or the batch too small.
  | lower_rate
  | larger_batch
slow_data
  | Loading and preparing samples is slower than training on them.
  | loading
slow
  | Data loading or storage is slow, there is too little parallelism, or the model is simply
    large: 2 to 5 s is usual for 7B on 8 A100 at 4096 tokens.
  | loading
computing
  | The device is hotter or shared with another process, samples are longer, other ranks are late,
    or the model is simply large: 2 to 5 s is usual for 7B on 8 A100 at 4096 tokens.
  | Compare sequence lengths and device clocks with those of fast steps or of another run.
stalls
  | The loader, the network or the storage stalls.
  | loading
stops
  | No answer stopped where it should: the policy no longer generates the end token.
  | watch
idle
  | Batches are too small, or the devices wait for data or for other ranks.
  | larger_batch
  | loading
headroom
  | There is no headroom for fragmentation or longer batches: one longer sample may not fit.
  | memory
too_little
  | The device has too little memory.
  | memory
cut
  | The length limit is shorter than some samples, so their answers are cut off.
  | Raise {max_length}, or leave long samples out.
empty
  | Answers are empty, or prompts fill the length limit: the model learns nothing from them.
  | Remove them, or raise {max_length}.
no_answers
  | Often, the answers are missing from the metadata; otherwise the metric does not fit the texts.
  | Check the answers field and the metric, and read generated texts. Early in training, wait.
penalty
  | The penalty for latency is too weak, or the budget cannot be met.
  | Raise the penalty for violations and latency, or the budget.
go_on
  | Training is not finished, or the penalty is weak.
  | Keep training while it falls; otherwise raise the violation penalty.
far
  | The policy is drifting away from its reference.
  | stronger_kl
still
  | The policy hardly moves.
  | Nothing to do if the reward rises.
cut_off
  | Answers have become longer: they reach the limit, break their format, and earn no reward.
  | shorter_completions
unclipped
  | Above: updates are too large. Below: each batch is used once, so that ratios stay at 1.
  | tighter_ratio
  | lower_rate
equal
  | All rewards of a group are equal, so there is nothing to learn from.
  | larger_group
one
  | The normalisation is wrong: about 1 is expected.
  | Check how advantages are normalised.
groups
  | Groups are formed wrongly, or the normalisation is missing.
  | Check that a group holds the samples of one prompt.
narrow
  | The range or threshold of the reward is too narrow.
  | Widen the reward's clipping range, or scale the reward down.
diverges
  | Training diverges, or the policy is stuck in a dead end.
  | Stop, and go back to {checkpoint}.
  | lower_rate
scatter
  | Sampling has become unstable, or a reward function gives extreme values.
  | Read answers that were generated after that step, together with their rewards.
  | larger_group
random
  | Updates are too large, or a bonus for entropy outweighs the reward.
  | lower_rate
  | stronger_kl
explores
  | The reward dominates, or the sampling temperature is too low.
  | Raise the temperature or an entropy bonus.
  | lower_rate
values
  | The value network no longer predicts the rewards, so the advantages are noise.
  | Lower its learning rate, or go back to {checkpoint}.
  | clip
endless
  | The policy no longer stops where it should: long answers are cut off and lose their reward.
  | shorter_completions
short
  | Answers end early: the policy degenerates, or the end-of-text token is rewarded too much.
  | watch
slower
  | The device is hotter or shared with another process, the disk or the network is slow, or
    samples are longer.
  | Compare sequence lengths, memory and device clocks before and after that step.
overflow
  | Overflow in 16-bit numbers, a learning rate that is too high, or a sample that breaks the
    model.
  | lower_rate
  | clip
  | Look at the batch of that step.
no_signal
  | The learning rate is too low or too high, or the labels contain no learnable signal.
  | Try {lr} three times higher and three times lower for 100 steps, and check the labels.
slow_start
  | The warm-up is long, or noise hides the small improvement of so few steps.
  | Nothing to do if the learning rate was still warming up.
too_fast
  | The learning rate is too high for these weights, its warm-up is too short, or some batches
    destabilize the model.
bad_batches
  | Updates or batches destabilize the model. Check which other metrics changed at the same steps.
  | clip
  | larger_batch
  | watch
jitter
  | Samples differ in difficulty, batches are small, groups are sampled, or training is in its
    early phase.
  | Nothing to do. To smooth it:
  | larger_batch
jitter_of_groups
  | Samples differ in difficulty, batches are small, groups are sampled, or training is in its early
    phase.
  | Nothing to do. To smooth it:
  | larger_batch
  | larger_group
exploded
  | An unusual batch or policy causes very large gradients. Without clipping, the update then
    makes the weights worse.
  | clip
  | lower_rate
raised
  | The scheduler was changed or restored incorrectly, or the rate was changed by hand.
  | Find out what changed the rate at that step. Go back to a checkpoint before it and continue
    with the original schedule.
no_scheduler
  | The run was resumed without its scheduler state, and perhaps also without its optimizer state.
  | Resume from {checkpoint}, with all of its files.
no_optimizer
  | The run was resumed without its optimizer state, with different weights, or on changed data.
  | Resume from {checkpoint}, with all of its files.
no_warmup
  | The scheduler is not stepped, or was restored from a different run.
  | Check {warmup} and how often the scheduler is stepped.
no_rate
  | The schedule is shorter than the run, or was restored incorrectly.
  | Check the number of steps of the schedule, {warmup}, and whether resuming restores it.
long_warmup
  | The warm-up takes more steps than the run, or the schedule is not the configured one.
  | Check the number of steps of the schedule, {warmup}, and whether resuming restores it.
too_high
  |
  | lower_rate
  | decay
no_update
  | No update reaches the weights, or no sample carries a signal.
  | Check that {lr} is above 0, that parameters are trained, and that the labels are right.
left
  |
  | stronger_kl
  | tighter_ratio
  | watch
broken
  | The answers of these batches broke the expected format or were cut off, so that most rewards
    are 0: an unstable signal for the next update.
  | larger_batch
  | watch
hacking
  | The policy learns the form of an answer, not its content: format hacking.
  | Lower the weight of the format reward, or give it only to correct answers.
unrewarded
  | The reward favours something other than correct answers.
  | Read answers from before and after that step with the rewards of each reward function.
  | Raise the weight of the reward for correct answers.
damaged_checkpoint
  | The save was interrupted, or files were removed.
  | Resume from an older one, and delete this directory.
damaged_export
  | The save was interrupted, or files were removed.
  | Resuming does not need it. Write it again to a new directory: `checkpoint export`.
missing
  | Saving failed, or the checkpoints were deleted.
  | Look for save errors in the log, and check the free disk space.
unfinished
  | The run is still training, was stopped, or died.
  | If it has ended, run the same command again to resume.
failed
  | See the last errors.
  | Fix the cause of these errors, then run the same command again to resume.
unequal
  | The export is not the model that was validated, or the engine loads it differently.
  | Do not deploy it. Export the checkpoint again, then run `prove` on it.
short_log
  |
  | Let the run continue, or log more often.
guarded
  | Some batches are harmful, or a rank is faulty.
  | Look at the samples of these steps in row_losses.jsonl, and remove bad ones from the data.
hanging
  | When a rank hangs or dies, all others wait for it.
  | Read the stacks and the log of the rank that the error names.
memorizes
  | The model memorizes its samples, or training has become unstable.
leak
  | Validation rows are among the training rows, or the validation data is easier.
  | Look for validation rows in the training files, and compare samples from both sets.
"""
REASONS = {name: causes for name, *causes in rows_of(_REASONS)}
"""Name -> the cause of a finding, then remedies, each a key of `ADVICE` or a sentence. Options appear
as {purpose}; {checkpoint} stands for the newest checkpoint before the fault.
"""
CHANGES: Mapping[str, tuple[str, float]] = {
    "clip": ("to 1.0, or to 0.5 if spikes remain", 0.5),
    "lr": ("to a tenth", 0.1),
    "batch": ("to 4", 4),
    "beta": ("to 0.1 to 0.2", 0),
    "completion": ("to half", 0.5),
}
"""Purpose -> change in words if the current value is unknown, and the factor to apply if it is
known. A factor of 0 means that the words apply in both cases.
"""


def advise(run: AnalysedRun, name: str, step: int) -> tuple[str, str]:
    """Return the sentence and the principle of a name in `ADVICE`, for a fault that began at a step.

    Any other `name` is itself a sentence without a principle. In both, {checkpoint} stands for the
    newest checkpoint before the fault.
    """
    text, why = ADVICE.get(name, (name, ""))
    watched = "if loss or gradient norm is far off, return to a checkpoint, or stop"
    if run.key("kl") or run.key("update_kl"):
        watched = "at kl > 10 or a clipped ratio > 0.3, save a snapshot and return to a checkpoint, or stop"
    elif run.log.source == "fsdp-sft":
        watched = "with trainer.guard.on_severe=rollback such a step returns to a checkpoint"
    changes = {f"new_{purpose}": _change(run, purpose) for purpose in CHANGES}
    facts = {"watched": watched, "checkpoint": run.checkpoint(step)}
    return text.format_map({**run.options, **changes, **facts}), why


def _change(run: AnalysedRun, purpose: str) -> str:
    """Describe a change, as in `learning_rate from 5e-5 to 5e-6`.

    If the configuration has no learning rate, the highest logged value is used.
    """
    option, (change, factor), now = run.options[purpose], CHANGES[purpose], run.amount(purpose)
    if purpose == "lr" and now is None and (rates := run.find("lr")):
        now = float(scheduled(rates).values.max())
    if not now or (purpose == "clip" and now > 1):
        return f"{option} {change}"
    old, new = (number(value).replace(",", "") for value in (now, now * factor))
    return f"{option} from {old} {f'to {new}' if factor else change}"
