"""The report as one HTML page, made from page.html.jinja."""

from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from trainer.report import formatting
from trainer.report.plots import drawn
from trainer.report.result import Report
from trainer.report.run_log import RunLog
from trainer.report.sections import sections
from trainer.report.side_by_side import side_by_side
from trainer.runtime.text import clean_lines


def as_page(runs: Sequence[tuple[Report, RunLog]]) -> str:
    """Return the whole page, one article a run, and a comparison of several."""
    environment = Environment(
        loader=PackageLoader("trainer.report", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_clean,
        undefined=StrictUndefined,
    )
    template = environment.get_template("page.html.jinja")
    return template.render(
        runs=runs,
        sections=sections,
        compared=side_by_side(runs),
        drawn=drawn,
        facts=formatting.facts,
        place=formatting.place,
    )


def _clean(value: object) -> object:
    """Take control characters of names away; jinja escapes the rest."""
    return value if isinstance(value, Markup) else clean_lines(formatting.shown(value))
