"""The report as one HTML page, made from page.html.jinja."""

from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from trainer.runtime.text import clean_lines
from trainer.tools.report import formatting
from trainer.tools.report.plots import drawn
from trainer.tools.report.result import Report
from trainer.tools.report.run_log import RunLog
from trainer.tools.report.sections import sections
from trainer.tools.report.side_by_side import side_by_side


def as_page(runs: Sequence[tuple[Report, RunLog]]) -> str:
    """Return the whole page, one article a run, and a comparison of several."""
    environment = Environment(
        loader=PackageLoader("trainer.tools.report", ""),
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
