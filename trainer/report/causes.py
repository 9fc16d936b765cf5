"""Why intervals of instability happen, why they passed, how common they are: the pattern library."""

from collections import Counter

from trainer.report import remedies
from trainer.report.analysed_run import AnalysedRun
from trainer.report.anomalies import group_of
from trainer.report.result import Anomaly
from trainer.report.sentence_parts import listed, number

GROUP_NAMES = {
    "gradient": "gradient",
    "loss": "loss",
    "rate": "learning rate",
    "kl": "kl",
    "length": "length",
    "reward": "reward",
}
STORY = ("kl", "length", "reward")
"""The chain of reinforcement learning: the policy leaves its reference, texts grow, rewards break."""


def chain_of(anomaly: Anomaly) -> tuple[str, ...]:
    """The anomaly's chain in words: kl, length, reward, ..."""
    return tuple(GROUP_NAMES.get(group_of(key) or "", key) for key in anomaly.chain)


def is_led_by_rate(anomaly: Anomaly) -> bool:
    """Whether a jump of the learning rate came first and other metrics followed."""
    chain = chain_of(anomaly)
    return len(chain) > 1 and chain[0] == GROUP_NAMES["rate"]


def story(anomalies: tuple[Anomaly, ...]) -> str:
    """The order in which metrics set in: after a jump of the learning rate, or where most of several agree."""
    if led := [anomaly for anomaly in anomalies if is_led_by_rate(anomaly)]:
        followers = listed(dict.fromkeys(name for anomaly in led for name in chain_of(anomaly)[1:]))
        steps = listed(f"step {anomaly.steps[0]}" for anomaly in led)
        return f"The learning rate jumped first, at {steps}; {followers} followed."
    if len(anomalies) < 2:
        return ""
    counts = Counter(tuple(name for name in chain_of(a) if name in STORY) for a in anomalies)
    chain, times = max(counts.items(), key=lambda item: item[1])
    if len(chain) < 2 or times <= len(anomalies) / 2:
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


def why_recovered(run: AnalysedRun) -> str:
    """What may have ended the intervals that passed, from what the configuration and the rate say."""
    over = [a for a in run.anomalies if a.has_recovered]
    if not over:
        return ""
    reasons = []
    if (clip := remedies.value(run, "clip")) is not None:
        reasons.append(f"gradient clipping ({remedies.option(run, 'clip')} = {clip}) limits the updates that follow")
    if run.key("kl"):
        reasons.append("the KL penalty pulls the policy back once it is far away")
    rates = run.find("lr")
    if rates is not None and rates.values[-1] < 0.95 * rates.values.max():
        reasons.append("the learning rate falls late in the run")
    if run.key("max_length") or run.key("clipped_ratio"):
        reasons.append("the length limit and format rewards force short, readable answers again")
    reasons.append("the following batches are ordinary again")
    return f"{len(over)} of {len(run.anomalies)} passed by themselves: {listed(reasons)}."


def how_common(run: AnalysedRun) -> str:
    """How usual such intervals are; nothing where a jump of the learning rate explains them all."""
    if all(chain_of(anomaly)[:1] == (GROUP_NAMES["rate"],) for anomaly in run.anomalies):
        return ""
    if run.key("kl") or run.key("reward"):
        return "Such bursts are common in reinforcement learning (PPO, GRPO, DPO)."
    return "Single spikes are common in language model training; large pre-trainings saw about twenty."
