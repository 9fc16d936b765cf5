"""Why intervals of instability happen, why they passed, how common they are: the pattern library."""

from collections import Counter
from collections.abc import Callable, Mapping

from trainer.report import remedies
from trainer.report.analysed_run import AnalysedRun
from trainer.report.anomalies import group_of
from trainer.report.formatting import listed, number
from trainer.report.result import Anomaly

RATE = "learning rate"
STORY = ("kl", "length", "reward")
"""The chain of reinforcement learning: the policy leaves its reference, texts grow, rewards break."""


def chain_of(anomaly: Anomaly) -> tuple[str, ...]:
    """The anomaly's chain in words: kl, length, reward, ...; what belongs to no group by its own name."""
    groups = ((group_of(key), key) for key in anomaly.chain)
    return tuple(RATE if group == "rate" else key if group in (None, "policy") else group for group, key in groups)


def is_led_by_rate(anomaly: Anomaly) -> bool:
    """Whether a jump of the learning rate came first and other metrics followed."""
    return len(anomaly.chain) > 1 and chain_of(anomaly)[0] == RATE


def story(anomalies: tuple[Anomaly, ...]) -> str:
    """The order in which metrics set in: after a jump of the learning rate, or where most of several agree."""
    if led := [anomaly for anomaly in anomalies if is_led_by_rate(anomaly)]:
        followers = listed(dict.fromkeys(name for anomaly in led for name in chain_of(anomaly)[1:]))
        return f"The learning rate jumped first, at {listed(f'step {a.steps[0]}' for a in led)}; {followers} followed."
    counts = Counter(tuple(name for name in chain_of(a) if name in STORY) for a in anomalies)
    (chain, times), *_ = counts.most_common(1) or [((), 0)]
    if len(anomalies) < 2 or len(chain) < 2 or times <= len(anomalies) / 2:
        return ""
    first, last = anomalies[0].peak_step, anomalies[-1].peak_step
    return (
        f"The chain {' → '.join(chain)} recurs: {times} of {len(anomalies)} intervals between "
        f"steps {first} and {last} set in in this order, so it is no single accident."
    )


def moved_along(anomaly: Anomaly) -> str:
    """`kl up to 19.6, completions/mean_length up to 410, rewards/Format/mean down to 0.1`."""
    words = (f"{m.metric} {'up' if m.sign > 0 else 'down'} to {number(m.peak_value)}" for m in anomaly.movers)
    return listed(words, limit=8)


def _why_recovered(run: AnalysedRun) -> str:
    """What may have ended the intervals that passed, from what the configuration and the rate say."""
    over = [a for a in run.anomalies if a.has_recovered]
    if not over:
        return ""
    clip, rates = remedies.value(run, "clip"), run.find("lr")
    reasons = {
        f"gradient clipping ({remedies.option(run, 'clip')} = {clip}) limits the updates that follow": clip is not None,
        "the KL penalty pulls the policy back once it is far away": run.key("kl"),
        "the learning rate falls late in the run": rates is not None and rates.values[-1] < 0.95 * rates.values.max(),
        "the length limit and format rewards force short, readable answers again": run.key("max_length")
        or run.key("clipped_ratio"),
        "the following batches are ordinary again": True,
    }
    held = listed(reason for reason, holds in reasons.items() if holds)
    return f"{len(over)} of {len(run.anomalies)} passed by themselves: {held}."


def how_common(run: AnalysedRun) -> str:
    """How usual such intervals are; nothing where a jump of the learning rate explains them all."""
    if all(chain_of(anomaly)[:1] == (RATE,) for anomaly in run.anomalies):
        return ""
    if run.key("kl") or run.key("reward"):
        return "Such bursts are common in reinforcement learning (PPO, GRPO, DPO)."
    return "Single spikes are common in language model training; large pre-trainings saw about twenty."


TOLD: Mapping[str, Callable[[AnalysedRun], str]] = {"why_recovered": _why_recovered, "how_common": how_common}
"""What sentences of the table may ask for."""
