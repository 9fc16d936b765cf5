"""The report for a terminal: verdict, what to do, then the most important rows of each section."""

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from trainer.report.formatting import facts, place
from trainer.report.result import Finding, Report
from trainer.report.sections import Section, Table, sections
from trainer.runtime.text import clean_lines

MAX_WIDTH = 120
MAX_OTHERS = 6
"""Findings beside the three that matter."""
REST = "The rest: --html FILE, or --json."
STYLES = {
    "fail": "bold red",
    "warn": "bold yellow",
    "note": "bold cyan",
    "info": "bold",
    "FAIL": "bold red",
    "ATTENTION": "bold yellow",
    "OK": "bold green",
    "INSUFFICIENT": "bold",
}


def print_report(console: Console, report: Report) -> None:
    """Print the verdict and each section with its most important rows."""
    head = Text.assemble(_text(report.verdict, STYLES[report.verdict]), " ", _text(report.headline))
    _print(console, _text(f"{report.title} ({report.source})", "bold"), head)
    _print(console, *(_text(fact, "dim") for fact in facts(report)[0:1]))
    for section in sections(report):
        _print(console, *_section(section, is_whole=False))
    _print(console, *(_text(fact, "dim") for fact in facts(report)[1]), _text(REST, "dim"))


def print_section(console: Console, section: Section) -> None:
    """Print one section whole, with all its rows and columns."""
    _print(console, *_section(section, is_whole=True))


def _section(section: Section, *, is_whole: bool) -> Iterator[RenderableType]:
    yield ""
    yield Text.assemble(
        _text(section.title, "bold"), ": " if section.lead else "", _text(section.lead)
    )
    if section.id == "top":
        for finding in section.findings:
            yield from _main(finding)
    else:
        yield from map(_line, section.findings[:MAX_OTHERS])
        if num_left := len(section.findings[MAX_OTHERS:]):
            yield _text(f"… {num_left} more", "dim")
    if section.table is not None:
        yield from _table(section.table, is_whole=is_whole)
    if is_whole or section.id != "limits":
        yield from (_indented(note) for note in section.notes)


def _main(finding: Finding) -> Iterator[RenderableType]:
    yield _line(finding)
    if where := place(finding):
        yield _indented(where, "dim")
    if finding.remedy:
        yield _indented(f"Do: {finding.remedy}")


def _line(finding: Finding) -> RenderableType:
    grid = RichTable.grid(padding=(0, 1))
    grid.add_row(_text(finding.level, STYLES[finding.level]), _text(finding.title))
    return grid


def _table(table: Table, *, is_whole: bool) -> Iterator[RenderableType]:
    """Words wrap where they must, numbers never."""
    rows = table.rows if is_whole else table.rows[: table.num_main]
    columns = range(len(table.header) if is_whole else table.num_columns)
    if not rows:
        return
    rich = RichTable(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for column in columns:
        is_number = table.is_number(column)
        rich.add_column(
            _text(table.header[column]),
            justify="right" if is_number else "left",
            no_wrap=is_number,
            overflow="fold",
        )
    for row in rows:
        rich.add_row(*(_text(row[column], STYLES.get(row[column], "")) for column in columns))
    yield rich


def _indented(words: str, style: str = "") -> RenderableType:
    return Padding(_text(words, style), (0, 0, 0, 2))


def _text(words: str, style: str = "") -> Text:
    return Text(clean_lines(words), style=style)


def _print(console: Console, *parts: RenderableType) -> None:
    """Print parts; none of their words is read as markup."""
    for part in parts:
        console.print(part, highlight=False, markup=False, width=min(console.width, MAX_WIDTH))
