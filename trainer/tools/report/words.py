"""Sentences that describe how metrics moved together."""

from collections import Counter

from trainer.tools.report.analysed_run import AnalysedRun
from trainer.tools.report.anomalies import group_of
from trainer.tools.report.formatting import listed, number
from trainer.tools.report.learning_rate import raised_rates
from trainer.tools.report.result import Anomaly

STORY = ("kl", "length", "reward")
"""The typical chain in reinforcement learning: the policy leaves its reference, its texts get
longer, and rewards collapse.
"""


def chain_of(anomaly: Anomaly) -> tuple[str, ...]:
    """Return the anomaly's chain as group names (kl, length, reward, ...). Policy metrics keep
    their own names.
    """
    groups = {key: group_of(key, is_generating=True) for key in anomaly.chain}
    return tuple(key if group in (None, "policy") else group for key, group in groups.items())


def story(anomalies: tuple[Anomaly, ...]) -> str:
    """Describe the order in which the metrics moved, if it is the same in most of several
    anomalies.
    """
    chains = Counter(tuple(name for name in chain_of(one) if name in STORY) for one in anomalies)
    for chain, times in chains.most_common(1):
        if len(chain) > 1 and times > max(1, len(anomalies) / 2):
            return (
                f"The sequence {' → '.join(chain)} recurs: in {times} of {len(anomalies)} anomalies "
                f"between steps {anomalies[0].peak_step} and {anomalies[-1].peak_step}, the metrics "
                f"moved in this order, so it is unlikely to be a coincidence."
            )
    return ""


def moved_along(anomaly: Anomaly) -> str:
    """List the moves, as in `kl up to 19.6 and rewards/Format/mean down to 0.1`."""
    words = (
        f"{m.metric} {'up' if m.sign > 0 else 'down'} to {number(m.peak_value)}"
        for m in anomaly.movers
    )
    return listed(words, limit=8)


def why_recovered(run: AnalysedRun) -> str:
    """Describe the likely reason why anomalies passed, judging by the configuration and the
    learning rate.
    """
    passed = sum(anomaly.has_recovered for anomaly in run.anomalies)
    rates = run.find("lr")
    clip = run.setting("clip")
    falls = bool(rates) and rates.values[-1] < 0.95 * rates.values.max()
    reasons = {
        f"gradient clipping ({run.quoted('clip')}) limits the updates that follow": clip,
        "the KL penalty pulls the policy back once it is far from its reference": run.key("kl"),
        "the learning rate falls late in the run": falls,
        "the length limit and format rewards force short answers again": run.key("max_length"),
        "the following batches are ordinary again": True,
    }
    held = listed(reason for reason, holds in reasons.items() if holds)
    return (
        f"{passed} of {len(run.anomalies)} passed without intervention: {held}." if passed else ""
    )


def how_common(run: AnalysedRun) -> str:
    """Describe how common such anomalies are; empty if a raised learning rate explains them."""
    rates = run.find("lr")
    if rates and raised_rates(rates):
        return ""
    if any(map(run.key, ("kl", "update_kl", "reward"))):
        return "Such bursts are common in reinforcement learning (PPO, GRPO, DPO)."
    return (
        "Single spikes are common in language model training; large pre-trainings saw about twenty."
    )
