"""The sections of a report, of which page and terminal show nothing else, and the rows around one step."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape

from trainer.detection.window import spread
from trainer.report import formatting
from trainer.report.formatting import ARROWS, MISSING, number, shown, step
from trainer.report.result import Anomaly, CheckItem, Finding, Generalisation, MetricSummary, Report
from trainer.report.run_log import RunLog, Series
from trainer.report.statistics import finite, within
from trainer.report.vocabulary import role_order
from trainer.runtime.text import clean_lines

STATUSES = ("fail", "note", "unknown", "pass")

Row = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """Cells as they are shown; `words` names the columns that hold text and may wrap, the others hold numbers.

    Where space is short, `main` are the rows to show, and `details` the columns to leave out.
    """

    header: Row
    rows: tuple[Row, ...]
    words: frozenset[str] = frozenset()
    details: frozenset[str] = frozenset()
    main: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Section:
    """`lead` says it in one sentence; `notes` follow the table."""

    id: str
    title: str
    lead: str = ""
    table: Table | None = None
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Nothing but a place for plots."""
        return not (self.lead or self.table or self.notes or self.findings)


def sections(report: Report) -> tuple[Section, ...]:
    """Those of `sections.yaml`; the ones that have nothing to say may still have plots."""
    return tuple(build(spec, vars(report)) for spec in specs()["report"])


@cache
def specs() -> Mapping[str, Any]:
    """What `sections.yaml` says."""
    text = files("trainer.report").joinpath("sections.yaml").read_text(encoding="utf-8")
    content: Mapping[str, Any] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return content


def build(spec: Mapping[str, Any], known: Mapping[str, Any]) -> Section:
    """One section as `spec` describes it, of what is known by name."""
    id_, title = (_text(spec[name], known) for name in ("id", "title"))
    part = known[spec["of"]] if "of" in spec else ()
    if "of" in spec and not part:
        return Section(id_, title)
    known = {**known, **_fields(part)}
    findings = tuple(evaluate(spec.get("findings", "()"), known))
    notes = filter(None, map(str.strip, _text(spec.get("notes", ""), known).splitlines()))
    table = _table(spec, known, part) if "columns" in spec else None
    return Section(id_, title, _text(spec.get("lead", ""), known), table, tuple(notes), findings)


def _table(spec: Mapping[str, Any], known: Mapping[str, Any], part: Any) -> Table | None:
    items = list(evaluate(spec["rows"], known)) if "rows" in spec else part
    names = tuple(evaluate(spec.get("beside", "()"), known))
    columns = f"({', '.join(spec['columns'].values())},)"

    def cells(item: Any) -> Row:
        inner = {**known, **_fields(item), "row": item}
        further = (evaluate(spec["cell"], {**inner, "name": name}) for name in names)
        return tuple(map(shown, (*evaluate(columns, inner), *further)))

    rows = tuple(map(cells, items))
    main = tuple(map(cells, evaluate(spec.get("main", "()"), {**known, "rows": items})))
    words, details = (frozenset(spec.get(kind, ())) for kind in ("words", "details"))
    header = (*(_text(name, known) for name in spec["columns"]), *names)
    return Table(header, rows, words.union(names if "beside" in words else ()), details, main) if rows else None


def _fields(part: Any) -> Mapping[str, Any]:
    return part if isinstance(part, Mapping) else getattr(part, "__dict__", {})


@cache
def templates() -> Environment:
    """All that a page shows is escaped; control characters that names may hold reach neither page nor terminal."""

    def finalize(value: object) -> object:
        return value if isinstance(value, Markup) else clean_lines(shown(value))

    environment = Environment(
        loader=PackageLoader("trainer.report", ""),
        autoescape=select_autoescape(("html.jinja", "svg.jinja"), default_for_string=False),
        trim_blocks=True,
        finalize=finalize,
        undefined=StrictUndefined,
    )
    names = ("capitalised", "companions", "counted", "facts", "interval", "percent", "place", "share", "shown", "told")
    environment.filters |= {name: getattr(formatting, name) for name in names} | FILTERS
    return environment


@cache
def _compiled(source: str) -> Callable[..., Any]:
    return templates().compile_expression(source, undefined_to_none=False)


def evaluate(expression: str, known: Mapping[str, Any]) -> Any:
    """What an expression of the table gives, of what is known by name."""
    return _compiled(expression)(known)


@cache
def _template(source: str) -> Any:
    return templates().from_string(source)


def _text(source: str, known: Mapping[str, Any]) -> str:
    return str(_template(source).render(known)).strip()


def _breakable(name: str) -> Markup:
    return Markup(re.sub("([/_])", r"\1<wbr>", str(escape(clean_lines(name)))))


def _moved_with(anomalies: Iterable[Anomaly]) -> str:
    others = (mover for anomaly in anomalies for mover in anomaly.movers if mover.metric != anomaly.metric)
    counts = Counter(f"{mover.metric} {ARROWS[mover.sign]}" for mover in others)
    return ", ".join(f"{name} in {count}" for name, count in counts.most_common())


def _onsets(anomalies: Iterable[Anomaly]) -> Counter[str]:
    return Counter(" → ".join(anomaly.chain) for anomaly in anomalies if len(anomaly.chain) > 1)


def _validations(found: Generalisation) -> list[dict[str, Any]]:
    marks = {"best": found.best_step, "recommended": found.recommended_step, "overfits from here": found.overfit_step}
    rows: list[dict[str, Any]] = [
        {"at": at, "value": found.values[at], "verdict": verdict, "mark": ", ".join(m for m in marks if marks[m] == at)}
        for at, verdict in sorted(found.verdicts.items())
    ]
    return [row | {"is_main": bool(row["mark"]) or row is rows[-1]} for row in rows]


def _with_bounds(result: Mapping[str, Any] | None) -> str:
    """An evaluation's mean, and its interval where that is known."""
    if result is None:
        return MISSING
    has_bounds = all(isinstance(result.get(side), int | float) for side in ("low", "high"))
    return number(result["mean"]) + (f" [{number(result['low'])}, {number(result['high'])}]" if has_bounds else "")


def _worst_first(items: Iterable[CheckItem]) -> list[CheckItem]:
    return sorted(items, key=lambda item: STATUSES.index(item.status))


def _by_role(metrics: Iterable[MetricSummary]) -> list[MetricSummary]:
    return sorted(metrics, key=lambda metric: role_order(metric.key))


FILTERS: dict[str, Callable[..., Any]] = {
    "at": lambda value, at: f"{number(value)} @ {step(at)}",
    "breakable": _breakable,
    "by_role": _by_role,
    "counts": Counter,
    "moved_with": _moved_with,
    "onsets": _onsets,
    "pc": lambda place: f"{100 * place:.2f}%",
    "validations": _validations,
    "with_bounds": _with_bounds,
    "worst_first": _worst_first,
}
"""Of templates and expressions, beside those of `formatting`."""


ALWAYS = "train/loss"
MIN_SCORE = 6.0
MAX_METRICS, MAX_ROWS = 6, 200


def around(log: RunLog, *, at: int, window: int) -> Section:
    """Rows from step `at - window` to `at + window`; what moved most comes first, the loss always."""
    ends = at - window, at + window
    scores = {key: _score(series, *ends) for key, series in log.series.items()}
    moved = sorted((key for key in scores if scores[key] > MIN_SCORE), key=lambda key: -scores[key])
    keys = [key for key in dict.fromkeys([ALWAYS, *moved]) if key in log.series][:MAX_METRICS]
    shown = {key: within(log.series[key], *ends).by_step() for key in keys}
    steps = sorted(set().union(*shown.values()))
    known = {"log": log, "ends": ends, "moved": moved, "values": shown, "steps": steps[:MAX_ROWS]}
    return build(specs()["around"], known | {"left": len(steps[MAX_ROWS:])})


def _score(series: Series, first: int, last: int) -> float:
    """How far the window goes from the median of the whole series, in robust standard deviations."""
    near, known = finite(within(series, first, last)).values, finite(series).values
    if not len(near):
        return 0.0
    centre = float(np.median(known))
    usual, distance = float(spread(known - centre)), float(np.abs(near - centre).max())
    return distance / usual if usual else math.inf if distance else 0.0
