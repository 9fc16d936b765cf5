"""What to do: sentences that remedies are made of, in the options of the framework that wrote
the log.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from trainer.report.analysed_run import AnalysedRun
from trainer.report.formatting import listed, shown
from trainer.report.learning_rate import raised_rates, scheduled
from trainer.report.words import RATE, chain_of


class Advice(NamedTuple):
    text: str
    why: str
    """The principle, and what it costs."""


ADVICE: list[Callable[[AnalysedRun], Advice]] = []


def _advice(function: Callable[[AnalysedRun], Advice]) -> Callable[[AnalysedRun], Advice]:
    ADVICE.append(function)
    return function


@_advice
def clip(run: AnalysedRun) -> Advice:
    option, now = run.options["clip"], run.setting("clip")
    if _is_positive(now) and now <= 1:
        change = f"Lower {option} from {shown(now)} to {shown(now / 2)}"
    else:
        change = f"Set {option} to 1.0, or 0.5 where spikes stay"
    return Advice(
        f"{change}, and skip the optimizer step when the norm is far above it.",
        "A clipped update moves the weights no further than the limit, whatever the batch; "
        "set too low, it slows all learning.",
    )


@_advice
def lower_rate(run: AnalysedRun) -> Advice:
    option, now = run.options["lr"], run.setting("lr")
    if not isinstance(now, int | float) and (rates := run.find("lr")) is not None:
        raised = raised_rates(rates, jump=run.limits["lr_jump"])
        now = float(scheduled(rates, raised).values.max())
    if _is_positive(now):
        change = f"Lower {option} from {shown(now)} to {shown(now / 10)}"
    else:
        change = f"Lower {option} to a tenth"
    return Advice(
        f"{change} and set {run.options['warmup']} to 0.1.",
        "Smaller updates stay where the loss still falls; training takes more steps.",
    )


@_advice
def decay(run: AnalysedRun) -> Advice:
    return Advice(
        f"Let the rate fall: {run.options['schedule']}=cosine or linear.",
        "The last updates average out instead of following the last batches; "
        "a run prolonged later goes on from a low rate.",
    )


@_advice
def larger_batch(run: AnalysedRun) -> Advice:
    batch = run.options["batch"]
    if run.log.source in ("fsdp-sft", "verl"):
        change = f"Raise {batch} (twice to four times)."
    else:
        change = f"Raise {batch} to 4 or {run.options['accumulation']} to 8."
    return Advice(
        change, "More samples make a gradient less noisy; each step takes more time or memory."
    )


@_advice
def stronger_kl(run: AnalysedRun) -> Advice:
    option, now = run.options["beta"], run.setting("beta")
    since = f"from {shown(now)} " if _is_positive(now) else "(often 0.04) "
    return Advice(
        f"Raise {option} {since}to 0.1 to 0.2 and adapt it to the measured KL.",
        "The penalty pulls the policy back to its reference; it also holds back what is to be "
        "learnt.",
    )


@_advice
def tighter_ratio(run: AnalysedRun) -> Advice:
    low, high = run.options["epsilon_low"], run.options["epsilon_high"]
    return Advice(
        f"Clip probability ratios tighter: {low} and {high} at 0.1.",
        "An update cannot move probabilities far from those that sampled; learning gets slower.",
    )


@_advice
def shorter_completions(run: AnalysedRun) -> Advice:
    option, now = run.options["completion"], run.setting("completion")
    change = f"from {shown(now)} to {int(now) // 2}" if _is_positive(now) else "(512 to 256)"
    return Advice(
        f"Lower {option} {change}, give truncated answers reward 0, and set stop words or the "
        f"end-of-text token.",
        "Answers that never stop no longer fill the batch; those that need the length are lost.",
    )


@_advice
def watch(run: AnalysedRun) -> Advice:
    often = f"Validate and save often ({run.options['eval']}=100 and {run.options['save']}=100)"
    if run.key("kl") or run.key("update_kl"):
        change = "; at kl > 10 or a clipped ratio > 0.3 keep a snapshot and return to a checkpoint, or stop."
    elif run.log.source == "fsdp-sft":
        change = ", with trainer.guard.on_severe=rollback: such a step returns to a checkpoint."
    else:
        change = "; where loss or gradient norm are far off, return to a checkpoint, or stop."
    return Advice(
        often + change,
        "A fault is noticed early and little is lost; validating and saving take time and disk.",
    )


@_advice
def larger_group(run: AnalysedRun) -> Advice:
    return Advice(
        f"Raise {run.options['group']} to 8 or 10, the batch size, the learning rate's decay, or "
        f"train longer.",
        "More answers to a prompt make advantages less noisy and equal rewards rarer; generation "
        "takes longer.",
    )


@_advice
def loading(run: AnalysedRun) -> Advice:
    return Advice(
        f"Raise {run.options['workers']}, prepare the data beforehand, or put it on a faster disk.",
        "Loading beside the step hides its time; workers take memory and processor cores.",
    )


@_advice
def memory(run: AnalysedRun) -> Advice:
    return Advice(
        f"Use {run.options['memory']}, or a smaller micro-batch.",
        "Activations are computed again instead of kept, and less is held at once; a step takes "
        "longer.",
    )


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and value > 0


def why_recovered(run: AnalysedRun) -> str:
    """What may have ended the intervals that passed, from what the configuration and the rate
    say.
    """
    over = [a for a in run.anomalies if a.has_recovered]
    if not over:
        return ""
    clipped, rates = run.setting("clip"), run.find("lr")
    reasons: Mapping[str, object] = {
        f"gradient clipping ({run.options['clip']} = {clipped}) limits the updates that follow": clipped
        is not None,
        "the KL penalty pulls the policy back once it is far away": run.key("kl"),
        "the learning rate falls late in the run": rates is not None
        and rates.values[-1] < 0.95 * rates.values.max(),
        "the length limit and format rewards force short, readable answers again": run.key(
            "max_length"
        )
        or run.key("clipped_ratio"),
        "the following batches are ordinary again": True,
    }
    held = listed(reason for reason, holds in reasons.items() if holds)
    return f"{len(over)} of {len(run.anomalies)} passed by themselves: {held}."


def how_common(run: AnalysedRun) -> str:
    """How usual such intervals are; nothing where a jump of the learning rate explains them all."""
    if all(chain_of(anomaly)[:1] == (RATE,) for anomaly in run.anomalies):
        return ""
    if run.key("kl") or run.key("update_kl") or run.key("reward"):
        return "Such bursts are common in reinforcement learning (PPO, GRPO, DPO)."
    return (
        "Single spikes are common in language model training; large pre-trainings saw about twenty."
    )
