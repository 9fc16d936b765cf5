"""Why things happen and what to do: sentences of the table, filled with what was measured and is known of the run."""

import string
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from trainer.report.analysed_run import AnalysedRun
from trainer.report.anomalies import group_of
from trainer.report.formatting import counted, interval, listed, number, share, shown
from trainer.report.learning_rate import raised_rates, scheduled
from trainer.report.measures import STATISTICS
from trainer.report.result import Anomaly
from trainer.report.rule_table import table

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
    clip, rates = run.setting("clip"), run.find("lr")
    reasons = {
        f"gradient clipping ({run.options['clip']} = {clip}) limits the updates that follow": clip is not None,
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


class _Sentence(string.Formatter):
    """Numbers as on the pages; `{share:%}` a percentage, `{count:spike}` counted, steps and lists in words."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec:
            return share(float(value)) if format_spec == "%" else counted(int(value), format_spec)
        if isinstance(value, tuple):
            return interval(value)
        if isinstance(value, list):
            return listed(map(str, value))
        return number(value) if isinstance(value, float) else str(value)


class _Known(dict[str, object]):
    """What was measured; else a statistic of the role, a limit, what the anomalies tell, or a sentence of advice."""

    def __init__(self, run: AnalysedRun, measured: Mapping[str, object], role: str | None) -> None:
        super().__init__({"option": run.options, "fact": run.facts, **measured})
        self._run, self._role = run, role

    def __missing__(self, name: str) -> object:
        if name in STATISTICS and self._role:
            return STATISTICS[name](self._run.get(self._role))
        if name in TOLD:
            return TOLD[name](self._run)
        return self._run.limits[name] if name in self._run.limits else advised(name, self._run)


def filled(sentence: str, run: AnalysedRun, measured: Mapping[str, object], role: str | None = None) -> str:
    """A sentence of the table in words. Raises `KeyError` for a name that nobody knows."""
    return _Sentence().vformat(sentence, (), _Known(run, measured, role)).strip()


def reasons(sentence: str) -> tuple[str, ...]:
    """Of the advice that a sentence of the table is made of: why it helps, and what it costs."""
    names = [name for _, name, *_ in string.Formatter().parse(sentence)]
    return tuple(table()["advice"][name]["why"] for name in names if name in table()["advice"])


def advised(name: str, run: AnalysedRun) -> str:
    """A sentence of the table's section `advice`: of several the one for what is known of the run."""
    entry = table()["advice"][name]
    if (purpose := entry.get("of")) is None:
        kinds = (*(["generating"] if run.key("kl") else []), run.log.source, "others")
        return filled(next(entry[kind] for kind in kinds if kind in entry), run, {})
    now = run.setting(purpose)
    if purpose == "lr" and not isinstance(now, int | float) and (rates := run.find("lr")) is not None:
        now = float(scheduled(rates, raised_rates(rates, jump=run.limits["lr_jump"])).values.max())
    if not isinstance(now, int | float) or not 0 < now <= entry.get("at_most", now):
        return filled(entry["unset"], run, {})
    lowered = int(now) // entry["by"] if entry.get("is_whole") else shown(now / entry["by"])
    return filled(entry["set"], run, {"now": shown(now), "lowered": lowered})
