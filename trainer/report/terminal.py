"""The report for a terminal of 80 to 120 columns: verdict, what to do, then sections that have something to say."""

from collections.abc import Iterator
from dataclasses import replace

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from trainer.report.formatting import clean, facts, place
from trainer.report.result import Finding, Report
from trainer.report.run_log import RunLog
from trainer.report.sections import Section, Table, sections

MAX_WIDTH = 120
MAX_ROWS = {"anomalies": 10, "validation": 10, "throughput": 6, "metrics": 10, "checklist": 8, "limits": 0}
"""What a table may take of the screen; page and JSON have it all."""
LEFT_OUT = {
    "metrics": ("group", "min", "median", "better", "meaning"),
    "anomalies": ("z", "together with"),
    "checklist": ("phase",),
}
"""Columns that page and JSON have alone, as they have the trends, and the checks that passed or are unknown."""
MAX_OTHERS, MAX_NOTES = 8, 6
STYLES = {
    "FAIL": "bold red",
    "ATTENTION": "bold yellow",
    "OK": "bold green",
    "INSUFFICIENT": "bold",
    "fail": "bold red",
    "warn": "bold yellow",
    "note": "bold cyan",
    "info": "bold",
}


def print_report(console: Console, report: Report, log: RunLog) -> None:
    """All words are data: none of them is read as markup."""
    for part in _parts(report, log):
        console.print(part, highlight=False, markup=False, soft_wrap=False, width=min(console.width, MAX_WIDTH))


def print_section(console: Console, section: Section) -> None:
    """One section whole, with all its rows and columns."""
    for part in _section(section, max_rows=None, left_out=()):
        console.print(part, highlight=False, markup=False, width=min(console.width, MAX_WIDTH))


def _parts(report: Report, log: RunLog) -> Iterator[RenderableType]:
    short, long = facts(report)
    yield Text(f"{clean(report.title)}  ({clean(report.source)} log, profile {report.profile})", style="bold")
    if short:
        yield Text(short, style="dim")
    yield Text.assemble((report.verdict, STYLES[report.verdict]), f"  {clean(report.headline)}")
    for finding in report.top:
        yield from _top(finding)
    others = [finding for finding in report.findings if finding not in report.top]
    if others:
        yield Text(f"\nAlso found ({len(others)})", style="bold")
        yield from (_line(finding) for finding in others[:MAX_OTHERS])
        yield from _more(len(others) - MAX_OTHERS)
    for section in sections(report, log):
        if section.id == "checklist" and section.table is not None:
            told = tuple(row for row in section.table.rows if row[0] in ("fail", "note"))
            section = replace(section, table=replace(section.table, rows=told) if told else None)
        if section.id != "trends":
            yield from _section(section, max_rows=MAX_ROWS.get(section.id), left_out=LEFT_OUT.get(section.id, ()))
    if long:
        yield Text("\n" + "\n".join(long), style="dim")
    if report.closing:
        yield Text(f"\n{clean(report.closing)}")


def _top(finding: Finding) -> Iterator[RenderableType]:
    yield Text("")
    yield _line(finding)
    if finding.remedy:
        yield Padding(Text.assemble(("Do: ", "bold"), clean(finding.remedy)), (0, 0, 0, 6))
    about = "; ".join(part for part in (place(finding), *map(clean, finding.evidence)) if part)
    yield Padding(Text(about, style="dim"), (0, 0, 0, 6))


def _line(finding: Finding) -> RenderableType:
    grid = RichTable.grid(padding=(0, 2, 0, 0))
    grid.add_column(min_width=4, no_wrap=True)
    grid.add_column()
    grid.add_row(Text(finding.level, style=STYLES[finding.level]), Text(clean(finding.title)))
    return grid


def _section(section: Section, *, max_rows: int | None, left_out: tuple[str, ...]) -> Iterator[RenderableType]:
    yield Text(f"\n{section.title}", style="bold")
    if section.lead:
        yield Text(section.lead)
    if section.table is not None and max_rows != 0:
        yield _table(section.table, max_rows=max_rows, left_out=left_out)
        yield from _more(len(section.table.rows) - len(section.table.rows[:max_rows]))
    shown = section.notes if max_rows is None else section.notes[: MAX_NOTES if max_rows else 0]
    yield from (Padding(Text(note), (0, 0, 0, 2)) for note in shown)


def _table(table: Table, *, max_rows: int | None, left_out: tuple[str, ...]) -> RichTable:
    """Words and headings wrap where they must, numbers never."""
    shown = [index for index, name in enumerate(table.header) if name not in left_out]
    rich = RichTable(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for index in shown:
        name, is_word = table.header[index], table.header[index] in table.words
        width = None if is_word else max((len(row[index]) for row in table.rows[:max_rows]), default=0)
        rich.add_column(Text(name), justify="left" if is_word else "right", min_width=width, overflow="fold")
    for row in table.rows[:max_rows]:
        rich.add_row(*(Text(row[index], style=STYLES.get(row[index], "")) for index in shown))
    return rich


def _more(count: int) -> Iterator[RenderableType]:
    if count > 0:
        yield Text(f"… {count} more: --html or --json has them all", style="dim")
