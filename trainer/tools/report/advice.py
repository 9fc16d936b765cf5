"""Remedies in words, with the option names of the framework that wrote the log."""

from collections.abc import Mapping

from trainer.tools.report.analysed_run import AnalysedRun
from trainer.tools.report.formatting import shown
from trainer.tools.report.learning_rate import scheduled

ADVICE: Mapping[str, tuple[str, str]] = {
    "clip": (
        "Set {new_clip}, and skip the optimizer step when the norm is far above it.",
        "Clipping limits how far a batch can move the weights; too low a limit slows all learning.",
    ),
    "lower_rate": (
        "Lower {new_lr} and set {warmup} to 0.1.",
        "Smaller updates stay where the loss still falls; training takes more steps.",
    ),
    "decay": (
        "Let the learning rate decay: {schedule}=cosine or linear.",
        "The last updates average out; a run that is extended later continues at a low rate.",
    ),
    "larger_batch": (
        "Raise {new_batch}, or {accumulation} to 8.",
        "More samples make a gradient less noisy; each step takes more time or memory.",
    ),
    "stronger_kl": (
        "Raise {new_beta} and adapt it to the measured KL.",
        "The penalty pulls the policy back to its reference; it also slows learning.",
    ),
    "tighter_ratio": (
        "Clip probability ratios tighter: {epsilon_low} and {epsilon_high} at 0.1.",
        "An update cannot move probabilities far from those that sampled; learning gets slower.",
    ),
    "shorter_completions": (
        "Lower {new_completion}, give truncated answers reward 0, and set stop words or the "
        "end-of-text token.",
        "Answers that never stop no longer fill the batch; answers that need the length are lost.",
    ),
    "watch": (
        "Validate and save often ({eval}=100 and {save}=100); {watched}.",
        "You notice problems early and lose little; validating and saving take time and disk space.",
    ),
    "larger_group": (
        "Raise {group} to 8 or 10, the batch size, the learning rate's decay, or train longer.",
        "More answers to a prompt make advantages less noisy and equal rewards rarer; generation "
        "takes longer.",
    ),
    "loading": (
        "Raise {workers}, prepare the data beforehand, or use a faster disk.",
        "Workers load data in the background while the model trains; they need memory and CPU cores.",
    ),
    "memory": (
        "Use {memory}, or a smaller micro-batch.",
        "Activations are recomputed instead of stored, so less memory is needed; a step takes longer.",
    ),
}  # fmt: skip
"""Name -> a sentence with options as {purpose}, and a sentence on its principle and its cost."""
CHANGES: Mapping[str, tuple[str, float]] = {
    "clip": ("to 1.0, or 0.5 where spikes stay", 0.5),
    "lr": ("to a tenth", 0.1),
    "batch": ("to 4", 4),
    "beta": ("to 0.1 to 0.2", 0),
    "completion": ("to half", 0.5),
}
"""Purpose -> change in words if the present value is unknown, and the factor to apply if it is
known. A factor of 0 means that the words serve in both cases.
"""


def advise(run: AnalysedRun, name: str) -> tuple[str, str]:
    """Return the sentence and the principle of a name in `ADVICE`.

    Any other `name` is itself a sentence, and has no principle.
    """
    text, why = ADVICE.get(name, (name, ""))
    watched = "where loss or gradient norm are far off, return to a checkpoint, or stop"
    if run.key("kl") or run.key("update_kl"):
        watched = "at kl > 10 or a clipped ratio > 0.3, save a snapshot and return to a checkpoint, or stop"
    elif run.log.source == "fsdp-sft":
        watched = "with trainer.guard.on_severe=rollback such a step returns to a checkpoint"
    changes = {f"new_{purpose}": _change(run, purpose) for purpose in CHANGES}
    return text.format_map({**run.options, **changes, "watched": watched}), why


def _change(run: AnalysedRun, purpose: str) -> str:
    """Describe a change, as in `learning_rate from 5e-5 to 5e-6`.

    If the configuration has no learning rate, the highest logged value is used.
    """
    option, (change, factor), now = run.options[purpose], CHANGES[purpose], run.amount(purpose)
    if purpose == "lr" and now is None and (rates := run.find("lr")):
        now = float(scheduled(rates).values.max())
    if not now or (purpose == "clip" and now > 1):
        return f"{option} {change}"
    new = now * factor
    to = f"to {shown(int(new) if new == int(new) else new)}" if factor else change
    return f"{option} from {shown(now)} {to}"
