"""The report as one HTML page, rendered from page.html.jinja."""

from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from trainer.runtime.text import clean_lines
from trainer.tools.report.formatting import place, shown
from trainer.tools.report.plots import drawn
from trainer.tools.report.sections import sections
from trainer.tools.report.side_by_side import Run, side_by_side


def as_page(runs: Sequence[Run]) -> str:
    """Return the whole page: one article per run and, for several runs, a comparison."""
    environment = Environment(
        loader=PackageLoader("trainer.tools.report", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_cleaned,
        undefined=StrictUndefined,
    )
    environment.globals |= {"sections": sections, "drawn": drawn, "place": place}
    template = environment.get_template("page.html.jinja")
    return template.render(runs=runs, compared=side_by_side(runs) if len(runs) > 1 else None)


def _cleaned(value: object) -> object:
    """Format a value and remove control characters; jinja escapes the rest."""
    return value if isinstance(value, Markup) else clean_lines(shown(value))
