"""The report for a terminal: verdict, what to do, then the most important rows of each section."""

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from trainer.runtime.text import clean_lines
from trainer.tools.report.formatting import facts, place
from trainer.tools.report.result import Report
from trainer.tools.report.run_log import RunLog
from trainer.tools.report.sections import Section, Table, sections

MAX_WIDTH = 120
MAX_ROWS, MAX_COLUMNS = 8, 6
"""Rows and columns of a table."""
MAX_OTHERS = 6
"""Findings beside the three that matter."""
REST = "The rest: --html FILE, or --json."
STYLES = {
    "fail": "bold red",
    "warn": "bold yellow",
    "note": "bold cyan",
    "FAIL": "bold red",
    "ATTENTION": "bold yellow",
    "OK": "bold green",
}


def print_report(console: Console, report: Report, log: RunLog) -> None:
    """Print the verdict and each section with its most important rows."""
    short, long = facts(report)
    _print(console, _text(f"{report.title} ({report.source})", "bold"))
    _print(console, _labelled(report.verdict, report.headline), _text(short, "dim"))
    for section in sections(report, log):
        if not section.is_detail:
            _print(console, *_section(section, MAX_ROWS, MAX_COLUMNS))
    _print(console, *(_text(fact, "dim") for fact in (*long, REST)))


def print_section(console: Console, section: Section) -> None:
    """Print one section with all rows and columns."""
    _print(console, *_section(section))


def _section(
    section: Section, num_rows: int | None = None, num_columns: int | None = None
) -> Iterator[RenderableType]:
    yield ""
    yield Text.assemble(_text(section.title, "bold"), _text(f"  {section.lead}"))
    is_top = section.id == "top"
    shown = section.findings if is_top else section.findings[:MAX_OTHERS]
    for finding in shown:
        yield _labelled(finding.level, finding.title)
        if is_top:
            yield _text(place(finding), "dim")
            yield _text(f"Do: {finding.remedy}" if finding.remedy else "")
    if num_left := len(section.findings) - len(shown):
        yield _text(f"… {num_left} more", "dim")
    if section.table is not None:
        yield _table(section.table, num_rows, num_columns)
    yield from map(_text, section.notes)


def _table(table: Table, num_rows: int | None, num_columns: int | None) -> RenderableType:
    """Words wrap where they must, numbers never."""
    rich = RichTable(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for column, name in enumerate(table.header[:num_columns]):
        is_number = table.is_number(column)
        rich.add_column(
            _text(name),
            justify="right" if is_number else "left",
            no_wrap=is_number,
            overflow="fold",
        )
    for row in table.rows[:num_rows]:
        rich.add_row(*(_text(cell, STYLES.get(cell, "")) for cell in row[:num_columns]))
    return rich


def _labelled(label: str, words: str) -> Text:
    return Text.assemble(_text(label, STYLES.get(label, "bold")), "  ", _text(words))


def _text(words: str, style: str = "") -> Text:
    return Text(clean_lines(words), style=style)


def _print(console: Console, *parts: RenderableType) -> None:
    """Print parts; none of their words is read as markup."""
    for part in parts:
        console.print(part, highlight=False, markup=False, width=min(console.width, MAX_WIDTH))
