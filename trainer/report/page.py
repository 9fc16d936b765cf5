"""The report as one HTML page, made from page.html.jinja."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from trainer.report.curves import NOTHING, SMOOTHINGS, smooth
from trainer.report.formatting import clean_lines, facts, number, place, share, step
from trainer.report.plots import figures
from trainer.report.result import Report
from trainer.report.run_log import RunLog
from trainer.report.sections import STATUSES, sections

LEVELS = {"FAIL": "fail", "ATTENTION": "warn", "OK": "ok", "INSUFFICIENT": "info"}

Tile = tuple[str, str, str]
"""Name, value, and what is to be known about it."""


def as_page(runs: Sequence[tuple[Report, RunLog]], *, refresh_s: int = 0) -> str:
    """The whole page, one article a run; a browser loads it again every `refresh_s` seconds, unless that is 0."""
    template = _environment().get_template("page.html.jinja")
    return template.render(runs=[_content(report, log) for report, log in runs], refresh_s=refresh_s)


def _environment() -> Environment:
    """All that a template shows is escaped, and without control characters."""

    def finalize(value: object) -> object:
        return clean_lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    options: dict[str, Any] = {"autoescape": True, "trim_blocks": True, "finalize": finalize}
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), **options)
    environment.filters["place"] = place
    environment.filters["breakable"] = lambda name: Markup(re.sub("([/_])", r"\1<wbr>", str(escape(clean_lines(name)))))
    return environment


def _content(report: Report, log: RunLog) -> dict[str, object]:
    plots = figures(report, log)
    blocks = [(section, plots.get(section.id, ())) for section in sections(report)]
    short, long = facts(report)
    return {
        "report": report,
        "level": LEVELS[report.verdict],
        "facts": short,
        "long_facts": long,
        "tiles": list(_tiles(report, log)),
        "blocks": [(section, rows) for section, rows in blocks if rows or not section.is_empty],
    }


def _tiles(report: Report, log: RunLog) -> Iterator[Tile]:
    for key, name in (("train/loss", "Training loss"), ("reward", "Reward")):
        if len(curve := smooth(log.series.get(key, NOTHING), SMOOTHINGS[-1]).values):
            yield name, number(float(curve[-1])), f"from {number(float(curve[0]))}, smoothed"
    if (found := report.generalisation) is not None:
        yield "Best validation", number(found.best_value), f"{found.metric} at step {step(found.best_step)}"
    if report.anomalies:
        open_ = sum(not anomaly.has_recovered for anomaly in report.anomalies)
        yield "Anomalies", str(len(report.anomalies)), f"{open_} not recovered" if open_ else "all recovered"
    if (speed := report.throughput) is not None:
        rate = f"{number(speed.tokens_per_s)} tokens/s" if speed.tokens_per_s is not None else "median"
        yield "Step time", f"{number(speed.step_s)} s", rate
        if speed.mfu is not None:
            yield "MFU", share(speed.mfu), "of the peak"
    if report.checklist:
        counts = {status: sum(item.status == status for item in report.checklist) for status in STATUSES}
        passed = f"{counts.pop('pass')} of {len(report.checklist)}"
        yield "Checklist", passed, ", ".join(f"{count} {status}" for status, count in counts.items())
