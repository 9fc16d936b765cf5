"""How metrics moved together, in words."""

from collections import Counter

from trainer.tools.report.analysed_run import AnalysedRun
from trainer.tools.report.formatting import listed, number
from trainer.tools.report.result import Anomaly
from trainer.tools.report.vocabulary import witness_group

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


def is_led_by_rate(anomaly: Anomaly) -> bool:
    """Return whether a jump of the learning rate came first and other metrics followed."""
    return len(anomaly.chain) > 1 and chain_of(anomaly)[0] == "learning rate"


def story(anomalies: tuple[Anomaly, ...]) -> str:
    """Return the order in which metrics set in: after a jump of the learning rate, or where most
    of several agree.
    """
    led = [anomaly for anomaly in anomalies if is_led_by_rate(anomaly)]
    if led:
        followers = dict.fromkeys(name for anomaly in led for name in chain_of(anomaly)[1:])
        steps = listed(f"step {anomaly.steps[0]}" for anomaly in led)
        return f"The learning rate jumped first, at {steps}; {listed(followers)} followed."
    chains = [tuple(name for name in chain_of(one) if name in STORY) for one in anomalies]
    for chain, times in Counter(chains).most_common(1):
        if len(chain) > 1 and times > max(1, len(anomalies) / 2):
            return (
                f"The chain {' → '.join(chain)} recurs: {times} of {len(anomalies)} intervals "
                f"between steps {anomalies[0].peak_step} and {anomalies[-1].peak_step} set in in "
                f"this order, so it is no single accident."
            )
    return ""


def moved_along(anomaly: Anomaly) -> str:
    """Return `kl up to 19.6, completions/mean_length up to 410, rewards/Format/mean down to 0.1`."""
    words = (
        f"{m.metric} {'up' if m.sign > 0 else 'down'} to {number(m.peak_value)}"
        for m in anomaly.movers
    )
    return listed(words, limit=8)


def why_recovered(run: AnalysedRun) -> str:
    """Return what may have ended the intervals that passed, from the configuration and the rate."""
    over = [anomaly for anomaly in run.anomalies if anomaly.has_recovered]
    if not over:
        return ""
    rates, clip = run.find("lr"), run.setting("clip")
    has_cap = run.key("max_length") or run.key("clipped_ratio")
    falls = rates is not None and rates.values[-1] < 0.95 * rates.values.max()
    reasons = {
        f"gradient clipping ({run.quoted('clip')}) limits the updates that follow": clip,
        "the KL penalty pulls the policy back once it is far away": run.key("kl"),
        "the learning rate falls late in the run": falls,
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
    if any(run.key(role) for role in ("kl", "update_kl", "reward")):
        return "Such bursts are common in reinforcement learning (PPO, GRPO, DPO)."
    return (
        "Single spikes are common in language model training; large pre-trainings saw about twenty."
    )
