"""The report as one HTML page, made from page.html.jinja."""

from collections.abc import Iterator, Sequence

from trainer.report.curves import NOTHING, SMOOTHINGS, smooth
from trainer.report.plots import Plots
from trainer.report.result import Report
from trainer.report.run_log import RunLog
from trainer.report.sections import sections, templates

COURSES = {"train/loss": "Training loss", "reward": "Reward"}
"""Told in the head of the page, as far as they were logged."""


def as_page(runs: Sequence[tuple[Report, RunLog]], *, refresh_s: int = 0) -> str:
    """The whole page, one article a run; a browser loads it again every `refresh_s` seconds, unless that is 0."""
    template = templates().get_template("page.html.jinja")
    return template.render(runs=[_content(report, log) for report, log in runs], refresh_s=str(refresh_s or ""))


def _content(report: Report, log: RunLog) -> dict[str, object]:
    plots = Plots(report, log).by_section()
    blocks = [(section, plots.get(section.id, ())) for section in sections(report)]
    shown = [(section, rows) for section, rows in blocks if rows or not section.is_empty]
    return {"report": report, "log": log, "blocks": shown, "courses": list(_courses(log))}


def _courses(log: RunLog) -> Iterator[tuple[str, float, float]]:
    """(name, first, last)."""
    for key, name in COURSES.items():
        if len(curve := smooth(log.series.get(key, NOTHING), SMOOTHINGS[-1]).values):
            yield name, float(curve[0]), float(curve[-1])
