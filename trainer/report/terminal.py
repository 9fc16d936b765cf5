"""The report for a terminal of 80 to 120 columns: verdict, what to do, then as much as a screen
has room for.
"""

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from trainer.report.formatting import facts, place
from trainer.report.result import Finding, Report
from trainer.report.sections import Section, Table, sections
from trainer.runtime.text import clean_lines

MAX_WIDTH, MAX_LINES = 120, 40
MAX_OTHERS, FEW = 6, 3
MATTERS = (
    *("validation", "anomalies", "findings", "serving", "metrics"),
    *("throughput", "checklist", "learning-rate", "next", "limits"),
)
"""Sections besides the three main findings, by what they tell; page and JSON have all of all of
them.
"""
REST = "The rest: --html FILE, or --json."
STYLES = {"fail": "bold red", "warn": "bold yellow", "note": "bold cyan", "info": "bold"}
STYLES |= {
    "FAIL": "bold red",
    "ATTENTION": "bold yellow",
    "OK": "bold green",
    "INSUFFICIENT": "bold",
}


def print_report(console: Console, report: Report) -> None:
    """At most `MAX_LINES`, unless the three main findings alone take more."""
    by_id = {section.id: section for section in sections(report)}
    first = Group(*_head(report), *(line for finding in report.top for line in _main(finding)), "")
    room = MAX_LINES - 1 - _height(console, first)
    chosen: dict[str, RenderableType] = {}
    for section in (by_id[id_] for id_ in MATTERS if not by_id[id_].is_empty):
        form = next((form for form in _forms(section) if _height(console, form) <= room), None)
        if form is not None:
            chosen[section.id] = form
            room -= _height(console, form)
    _print(
        console, first, *(chosen[id_] for id_ in by_id if id_ in chosen), Text(REST, style="dim")
    )


def print_section(console: Console, section: Section) -> None:
    """One section whole, with all its rows and columns."""
    lead = [_text(section.lead)] if section.lead else []
    table = [_table(section.table, section.table.rows)] if section.table else []
    _print(console, _text(f"\n{section.title}", "bold"), *lead, *table, *_notes(section))


def _print(console: Console, *parts: RenderableType) -> None:
    """All words are data: none of them is read as markup."""
    for part in parts:
        console.print(part, highlight=False, markup=False, width=min(console.width, MAX_WIDTH))


def _height(console: Console, part: RenderableType) -> int:
    return len(
        console.render_lines(
            part, console.options.update(width=min(console.width, MAX_WIDTH)), pad=False
        )
    )


def _text(words: str, style: str = "") -> Text:
    return Text(clean_lines(words), style=style)


def _head(report: Report) -> Iterator[RenderableType]:
    yield _text(f"{report.title}  ({report.source} log, profile {report.profile})", "bold")
    if short := facts(report)[0]:
        yield _text(short, "dim")
    yield Text.assemble((report.verdict, STYLES[report.verdict]), "  ", _text(report.headline))


def _main(finding: Finding) -> Iterator[RenderableType]:
    yield _line(finding)
    if finding.remedy:
        yield Padding(Text.assemble(("Do: ", "bold"), _text(finding.remedy)), (0, 0, 0, 6))
    about = "; ".join(part for part in (place(finding), *finding.evidence) if part)
    yield Padding(_text(about, "dim"), (0, 0, 0, 6))


def _line(finding: Finding) -> RenderableType:
    grid = RichTable.grid(padding=(0, 2, 0, 0))
    grid.add_column(min_width=4, no_wrap=True)
    grid.add_row(Text(finding.level, style=STYLES[finding.level]), _text(finding.title))
    return grid


def _forms(section: Section) -> Iterator[RenderableType]:
    """What a screen may show of a section, the fullest first."""
    head = Text.assemble(
        _text(section.title, "bold"), ": " if section.lead else "", _text(section.lead)
    )
    for num_findings in range(min(MAX_OTHERS, len(section.findings)), 0, -1):
        left = len(section.findings) - num_findings
        more = [Text(f"… {left} more", style="dim")] if left else []
        yield Group(head, *map(_line, section.findings[:num_findings]), *more)
    if (table := section.table) is not None and table.main:
        main, few = (_table(table, rows, table.details) for rows in (table.main, table.main[:FEW]))
        yield from (Group(head, main, *_notes(section)), Group(head, main), Group(head, few))
    yield head


def _notes(section: Section) -> Iterator[RenderableType]:
    return (Padding(_text(note), (0, 0, 0, 2)) for note in section.notes)


def _table(
    table: Table, rows: tuple[tuple[str, ...], ...], left_out: frozenset[str] = frozenset()
) -> RichTable:
    """Words and headings wrap where they must, numbers never."""
    shown = [index for index, name in enumerate(table.header) if name not in left_out]
    rich = RichTable(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for index in shown:
        name, is_word = table.header[index], table.header[index] in table.words
        width = None if is_word else max(len(row[index]) for row in rows)
        rich.add_column(
            _text(name), justify="left" if is_word else "right", min_width=width, overflow="fold"
        )
    for row in rows:
        rich.add_row(*(_text(row[index], STYLES.get(row[index], "")) for index in shown))
    return rich
