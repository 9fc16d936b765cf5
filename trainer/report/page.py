"""The report as one HTML page, made from page.html.jinja."""

from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from trainer.report import formatting
from trainer.report.plots import plots
from trainer.report.result import Report
from trainer.report.run_log import RunLog
from trainer.report.sections import sections
from trainer.report.side_by_side import side_by_side
from trainer.runtime.text import clean_lines


def as_page(runs: Sequence[tuple[Report, RunLog]]) -> str:
    """Return the whole page, one article a run, and a comparison of several."""
    contents = [(report, sections(report), list(plots(report, log))) for report, log in runs]
    compared = side_by_side(runs) if len(runs) > 1 else ()
    return _environment().get_template("page.html.jinja").render(runs=contents, compared=compared)


def _environment() -> Environment:
    """All that a page shows is escaped; control characters of names do not reach it."""

    def finalize(value: object) -> object:
        return value if isinstance(value, Markup) else clean_lines(formatting.shown(value))

    environment = Environment(
        loader=PackageLoader("trainer.report", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=finalize,
        undefined=StrictUndefined,
    )
    environment.filters |= {"facts": formatting.facts, "place": formatting.place}
    return environment
