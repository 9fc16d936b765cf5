"""The sentences of the table of rules, filled with what was measured and what is known of the run."""

import string
from collections.abc import Callable, Mapping
from typing import Any

from trainer.report import causes, remedies
from trainer.report.analysed_run import AnalysedRun
from trainer.report.formatting import counted, listed, number, share, span
from trainer.report.measure import STATISTICS
from trainer.report.rule_table import table


class _Sentence(string.Formatter):
    """Numbers as on the pages; `{share:%}` a percentage, `{count:spike}` counted, steps and lists in words."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec:
            return share(float(value)) if format_spec == "%" else counted(int(value), format_spec)
        if isinstance(value, tuple):
            return span(value)
        if isinstance(value, list):
            return listed(map(str, value))
        return number(value) if isinstance(value, float) else str(value)


class _ByPurpose:
    """`{option[lr]}` and `{fact[lr]}`: the option's name, and what it was set to."""

    def __init__(self, run: AnalysedRun, told: Callable[[AnalysedRun, str], str]) -> None:
        self._run, self._told = run, told

    def __getitem__(self, purpose: str) -> str:
        return self._told(self._run, purpose)


class _Known(dict[str, object]):
    """What was measured; else a statistic of the role, a limit, what the anomalies tell, or a sentence of advice."""

    def __init__(self, run: AnalysedRun, measured: Mapping[str, object], role: str | None) -> None:
        by_purpose = {"option": _ByPurpose(run, remedies.option), "fact": _ByPurpose(run, remedies.fact)}
        super().__init__({**by_purpose, **measured})
        self._run, self._role = run, role

    def __missing__(self, name: str) -> object:
        if name in STATISTICS and self._role:
            return STATISTICS[name](self._run.get(self._role))
        if name in causes.TOLD:
            return causes.TOLD[name](self._run)
        return self._run.limits[name] if name in self._run.limits else advised(name, self._run)


def filled(sentence: str, run: AnalysedRun, measured: Mapping[str, object], role: str | None = None) -> str:
    """A sentence of the table in words. Raises `KeyError` for a name that nobody knows."""
    return _Sentence().vformat(sentence, (), _Known(run, measured, role)).strip()


def reasons(sentence: str) -> tuple[str, ...]:
    """Of the advice that a sentence of the table is made of: why it helps, and what it costs."""
    names = [name for _, name, *_ in string.Formatter().parse(sentence)]
    return tuple(table()["advice"][name]["why"] for name in names if name in table()["advice"])


def advised(name: str, run: AnalysedRun) -> str:
    """A sentence of the table's section `advice`."""
    sentence, words = remedies.advice(run, name)
    return filled(sentence, run, words)
