"""How metrics moved together, in words."""

from collections import Counter

from trainer.report.analysed_run import AnalysedRun
from trainer.report.formatting import listed, number
from trainer.report.result import Anomaly
from trainer.report.vocabulary import witness_group

STORY = ("kl", "length", "reward")
"""The chain of reinforcement learning: the policy leaves its reference, texts grow, rewards
break.
"""


def chain_of(anomaly: Anomaly) -> tuple[str, ...]:
    """Return the anomaly's chain in words: kl, length, reward, ...; metrics of no group by name."""
    groups = ((witness_group(key, is_generating=True), key) for key in anomaly.chain)
    return tuple(
        "learning rate" if group == "rate" else key if group in (None, "policy") else group
        for group, key in groups
    )


def is_led_by_rate(run: AnalysedRun, anomaly: Anomaly) -> bool:
    """Return whether a jump of the learning rate came first and other metrics followed."""
    return len(anomaly.chain) > 1 and anomaly.chain[0] == run.name("lr")


def story(anomalies: tuple[Anomaly, ...]) -> str:
    """Return the order in which metrics set in: after a jump of the learning rate, or where most
    of several agree.
    """
    chains = {anomaly: chain_of(anomaly) for anomaly in anomalies}
    led = {a: chain[1:] for a, chain in chains.items() if chain[:1] == ("learning rate",)}
    if any(led.values()):
        followers = listed(dict.fromkeys(name for names in led.values() for name in names))
        steps = listed(f"step {anomaly.steps[0]}" for anomaly, names in led.items() if names)
        return f"The learning rate jumped first, at {steps}; {followers} followed."
    counts = Counter(tuple(name for name in chain if name in STORY) for chain in chains.values())
    chain, times = max(counts.items(), key=lambda item: item[1], default=((), 0))
    if len(chain) < 2 or times < 2 or times <= len(anomalies) / 2:
        return ""
    return (
        f"The chain {' → '.join(chain)} recurs: {times} of {len(anomalies)} intervals between "
        f"steps {anomalies[0].peak_step} and {anomalies[-1].peak_step} set in in this order, so it "
        f"is no single accident."
    )


def moved_along(anomaly: Anomaly) -> str:
    """Return `kl up to 19.6, completions/mean_length up to 410, rewards/Format/mean down to 0.1`."""
    words = (
        f"{m.metric} {'up' if m.sign > 0 else 'down'} to {number(m.peak_value)}"
        for m in anomaly.movers
    )
    return listed(words, limit=8)
