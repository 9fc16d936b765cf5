"""What to do: sentences that remedies are made of, in the options of the framework that wrote
the log.
"""

from collections.abc import Mapping
from typing import NamedTuple

from trainer.report.analysed_run import AnalysedRun
from trainer.report.formatting import listed, shown
from trainer.report.learning_rate import scheduled


class Advice(NamedTuple):
    """A sentence with {option} by purpose; {now} and {then} are the present and the new value."""

    purpose: str
    factor: float
    """The new value, in terms of the present one."""
    text: str
    unknown: str
    """The sentence where the present value is not known."""
    why: str
    """The principle, and what it costs."""


ADVICE: Mapping[str, Advice] = {
    "clip": Advice(
        "clip", 0.5,
        "Lower {clip} from {now} to {then}, and skip the optimizer step when the norm is far above "
        "it.",
        "Set {clip} to 1.0, or 0.5 where spikes stay, and skip the optimizer step when the norm is "
        "far above it.",
        "A clipped update moves the weights no further than the limit, whatever the batch; set too "
        "low, it slows all learning.",
    ),
    "lower_rate": Advice(
        "lr", 0.1,
        "Lower {lr} from {now} to {then} and set {warmup} to 0.1.",
        "Lower {lr} to a tenth and set {warmup} to 0.1.",
        "Smaller updates stay where the loss still falls; training takes more steps.",
    ),
    "decay": Advice(
        "schedule", 0,
        "Let the rate fall: {schedule}=cosine or linear.",
        "Let the rate fall: {schedule}=cosine or linear.",
        "The last updates average out instead of following the last batches; a run prolonged later "
        "goes on from a low rate.",
    ),
    "larger_batch": Advice(
        "batch", 4,
        "Raise {batch} from {now} to {then}, or {accumulation} to 8.",
        "Raise {batch} to 4 or {accumulation} to 8.",
        "More samples make a gradient less noisy; each step takes more time or memory.",
    ),
    "stronger_kl": Advice(
        "beta", 1,
        "Raise {beta} from {now} to 0.1 to 0.2 and adapt it to the measured KL.",
        "Raise {beta} (often 0.04) to 0.1 to 0.2 and adapt it to the measured KL.",
        "The penalty pulls the policy back to its reference; it also holds back what is to be "
        "learnt.",
    ),
    "tighter_ratio": Advice(
        "epsilon_low", 1,
        "Clip probability ratios tighter: {epsilon_low} and {epsilon_high} at 0.1.",
        "Clip probability ratios tighter: {epsilon_low} and {epsilon_high} at 0.1.",
        "An update cannot move probabilities far from those that sampled; learning gets slower.",
    ),
    "shorter_completions": Advice(
        "completion", 0.5,
        "Lower {completion} from {now} to {then}, give truncated answers reward 0, and set stop "
        "words or the end-of-text token.",
        "Lower {completion} (512 to 256), give truncated answers reward 0, and set stop words or "
        "the end-of-text token.",
        "Answers that never stop no longer fill the batch; those that need the length are lost.",
    ),
    "watch": Advice(
        "eval", 1,
        "Validate and save often ({eval}=100 and {save}=100); {watched}.",
        "Validate and save often ({eval}=100 and {save}=100); {watched}.",
        "A fault is noticed early and little is lost; validating and saving take time and disk.",
    ),
    "larger_group": Advice(
        "group", 1,
        "Raise {group} to 8 or 10, the batch size, the learning rate's decay, or train longer.",
        "Raise {group} to 8 or 10, the batch size, the learning rate's decay, or train longer.",
        "More answers to a prompt make advantages less noisy and equal rewards rarer; generation "
        "takes longer.",
    ),
    "loading": Advice(
        "workers", 1,
        "Raise {workers}, prepare the data beforehand, or put it on a faster disk.",
        "Raise {workers}, prepare the data beforehand, or put it on a faster disk.",
        "Loading beside the step hides its time; workers take memory and processor cores.",
    ),
    "memory": Advice(
        "memory", 1,
        "Use {memory}, or a smaller micro-batch.",
        "Use {memory}, or a smaller micro-batch.",
        "Activations are computed again instead of kept, and less is held at once; a step takes "
        "longer.",
    ),
}  # fmt: skip
POLICY_WATCH = (
    "at kl > 10 or a clipped ratio > 0.3 keep a snapshot and return to a checkpoint, or stop"
)
OWN_WATCH = "with trainer.guard.on_severe=rollback such a step returns to a checkpoint"
OTHER_WATCH = "where loss or gradient norm are far off, return to a checkpoint, or stop"


def advise(run: AnalysedRun, name: str) -> tuple[str, str]:
    """Return a sentence and its principle, of a name of `ADVICE`; another sentence as it is."""
    is_policy = run.key("kl") or run.key("update_kl")
    is_own = run.log.source == "fsdp-sft"
    words = {
        **run.options,
        "watched": POLICY_WATCH if is_policy else OWN_WATCH if is_own else OTHER_WATCH,
    }
    if name not in ADVICE:
        return name.format_map(words), ""
    advice = ADVICE[name]
    now = run.setting(advice.purpose)
    rates = run.find("lr") if name == "lower_rate" else None
    if now is None and rates is not None:
        now = float(scheduled(rates).values.max())
    is_known = isinstance(now, int | float) and now > 0 and not (name == "clip" and now > 1)
    if is_known:
        then = now * advice.factor
        words |= {"now": shown(now), "then": shown(int(then) if then == int(then) else then)}
    return (advice.text if is_known else advice.unknown).format_map(words), advice.why


def why_recovered(run: AnalysedRun) -> str:
    """Return what may have ended the intervals that passed, from the configuration and the rate."""
    over = [a for a in run.anomalies if a.has_recovered]
    if not over:
        return ""
    clip, rates = run.setting("clip"), run.find("lr")
    has_cap = run.key("max_length") or run.key("clipped_ratio")
    reasons = {
        f"gradient clipping ({run.options['clip']} = {clip}) limits the updates that follow": clip,
        "the KL penalty pulls the policy back once it is far away": run.key("kl"),
        "the learning rate falls late in the run": rates is not None
        and rates.values[-1] < 0.95 * rates.values.max(),
        "the length limit and format rewards force short, readable answers again": has_cap,
        "the following batches are ordinary again": True,
    }
    held = listed(reason for reason, holds in reasons.items() if holds)
    return f"{len(over)} of {len(run.anomalies)} passed by themselves: {held}."


def how_common(run: AnalysedRun) -> str:
    """Return how usual such intervals are; nothing where a jump of the learning rate explains
    them all.
    """
    if all(run.name("lr") in anomaly.chain[:1] for anomaly in run.anomalies):
        return ""
    if run.key("kl") or run.key("update_kl") or run.key("reward"):
        return "Such bursts are common in reinforcement learning (PPO, GRPO, DPO)."
    return (
        "Single spikes are common in language model training; large pre-trainings saw about twenty."
    )
