"""How metrics moved together, in words."""

from collections import Counter

from trainer.report.anomalies import group_of
from trainer.report.formatting import listed, number
from trainer.report.result import Anomaly

RATE = "learning rate"
STORY = ("kl", "length", "reward")
"""The chain of reinforcement learning: the policy leaves its reference, texts grow, rewards
break.
"""


def chain_of(anomaly: Anomaly) -> tuple[str, ...]:
    """The anomaly's chain in words: kl, length, reward, ...; what belongs to no group by its
    own name.
    """
    groups = ((group_of(key), key) for key in anomaly.chain)
    return tuple(
        RATE if group == "rate" else key if group in (None, "policy") else group
        for group, key in groups
    )


def is_led_by_rate(anomaly: Anomaly) -> bool:
    """Whether a jump of the learning rate came first and other metrics followed."""
    return len(anomaly.chain) > 1 and chain_of(anomaly)[0] == RATE


def story(anomalies: tuple[Anomaly, ...]) -> str:
    """The order in which metrics set in: after a jump of the learning rate, or where most of
    several agree.
    """
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
    words = (
        f"{m.metric} {'up' if m.sign > 0 else 'down'} to {number(m.peak_value)}"
        for m in anomaly.movers
    )
    return listed(words, limit=8)
