"""Advice: the sentences of remedies, in the options of the framework that wrote
the log.
"""

from collections.abc import Mapping
from typing import NamedTuple

from trainer.tools.report.analysed_run import AnalysedRun
from trainer.tools.report.formatting import shown
from trainer.tools.report.learning_rate import scheduled


class Advice(NamedTuple):
    """A sentence with the {option}s of a framework, by their purpose."""

    text: str
    why: str
    """The principle, and what it costs."""
    known: str = ""
    """The sentence where the configuration tells the present value: {now}, and the {new} one."""
    purpose: str = ""
    """The option that has this value."""
    factor: float = 1
    """The new value, in terms of the present one."""


ADVICE: Mapping[str, Advice] = {
    "clip": Advice(
        "Set {clip} to 1.0, or 0.5 where spikes stay, and skip the optimizer step when the norm is "
        "far above it.",
        "A clipped update moves the weights no further than the limit, whatever the batch; set too "
        "low, it slows all learning.",
        "Lower {clip} from {now} to {new}, and skip the optimizer step when the norm is far above "
        "it.",
        "clip", 0.5,
    ),
    "lower_rate": Advice(
        "Lower {lr} to a tenth and set {warmup} to 0.1.",
        "Smaller updates stay where the loss still falls; training takes more steps.",
        "Lower {lr} from {now} to {new} and set {warmup} to 0.1.",
        "lr", 0.1,
    ),
    "decay": Advice(
        "Let the rate fall: {schedule}=cosine or linear.",
        "The last updates average out instead of following the last batches; a run prolonged later "
        "goes on from a low rate.",
    ),
    "larger_batch": Advice(
        "Raise {batch} to 4 or {accumulation} to 8.",
        "More samples make a gradient less noisy; each step takes more time or memory.",
        "Raise {batch} from {now} to {new}, or {accumulation} to 8.",
        "batch", 4,
    ),
    "stronger_kl": Advice(
        "Raise {beta} (often 0.04) to 0.1 to 0.2 and adapt it to the measured KL.",
        "The penalty pulls the policy back to its reference; it also holds back what is to be "
        "learnt.",
        "Raise {beta} from {now} to 0.1 to 0.2 and adapt it to the measured KL.",
        "beta",
    ),
    "tighter_ratio": Advice(
        "Clip probability ratios tighter: {epsilon_low} and {epsilon_high} at 0.1.",
        "An update cannot move probabilities far from those that sampled; learning gets slower.",
    ),
    "shorter_completions": Advice(
        "Lower {completion} (512 to 256), give truncated answers reward 0, and set stop words or "
        "the end-of-text token.",
        "Answers that never stop no longer fill the batch; those that need the length are lost.",
        "Lower {completion} from {now} to {new}, give truncated answers reward 0, and set stop "
        "words or the end-of-text token.",
        "completion", 0.5,
    ),
    "watch": Advice(
        "Validate and save often ({eval}=100 and {save}=100); {watched}.",
        "A fault is noticed early and little is lost; validating and saving take time and disk.",
    ),
    "larger_group": Advice(
        "Raise {group} to 8 or 10, the batch size, the learning rate's decay, or train longer.",
        "More answers to a prompt make advantages less noisy and equal rewards rarer; generation "
        "takes longer.",
    ),
    "loading": Advice(
        "Raise {workers}, prepare the data beforehand, or put it on a faster disk.",
        "Loading beside the step hides its time; workers take memory and processor cores.",
    ),
    "memory": Advice(
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
    if name not in ADVICE:
        return name.format_map(run.options), ""
    advice = ADVICE[name]
    watched = OWN_WATCH if run.log.source == "fsdp-sft" else OTHER_WATCH
    if run.key("kl") or run.key("update_kl"):
        watched = POLICY_WATCH
    now = _present(run, advice.purpose) if advice.known else None
    words = {**run.options, "watched": watched}
    if not isinstance(now, int | float) or now <= 0:
        return advice.text.format_map(words), advice.why
    new = now * advice.factor
    words |= {"now": shown(now), "new": shown(int(new) if new == int(new) else new)}
    return advice.known.format_map(words), advice.why


def _present(run: AnalysedRun, purpose: str) -> object:
    """Return the value of an option: a peak rate also from the log; none of a loose clipping."""
    value, rates = run.setting(purpose), run.find("lr")
    if purpose == "lr" and value is None and rates is not None:
        return float(scheduled(rates).values.max())
    is_loose = purpose == "clip" and isinstance(value, int | float) and value > 1
    return None if is_loose else value
