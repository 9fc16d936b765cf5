"""The report on a terminal: the verdict, the remedies, and the first rows of each section."""

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer.runtime.text import clean_lines
from trainer.tools.report.formatting import place, shown
from trainer.tools.report.result import Report
from trainer.tools.report.run_log import RunLog
from trainer.tools.report.sections import Section, sections
from trainer.tools.report.side_by_side import Run, side_by_side

MAX_ROWS = 8
MAX_COLUMNS = 6
MAX_FINDINGS = 6
STYLES = {
    "fail": "bold red",
    "warn": "bold yellow",
    "note": "bold cyan",
    "FAIL": "bold red",
    "ATTENTION": "bold yellow",
    "OK": "bold green",
}


def print_reports(runs: Sequence[Run]) -> None:
    """Print the report of each run; with several runs, also print a comparison."""
    console = Console(highlight=False)
    for report, log in runs:
        print_report(console, report, log)
    if len(runs) > 1:
        print_section(console, side_by_side(runs))


def print_report(console: Console, report: Report, log: RunLog) -> None:
    """Print the verdict and the most important rows of each section."""
    console.print(_text(report.title, "bold"), _text(f"({report.source})"))
    console.print(_text(report.verdict), _text(report.headline))
    for section in sections(report, log):
        if not section.is_detail:
            rows = [row[:MAX_COLUMNS] for row in section.rows[:MAX_ROWS]]
            header = section.header[:MAX_COLUMNS]
            findings = section.findings[:MAX_FINDINGS]
            print_section(
                console,
                replace(
                    section,
                    rows=rows,
                    header=header,
                    findings=findings,
                ),
            )
            num_left = len(section.rows) + len(section.findings) - len(rows) - len(findings)
            if num_left:
                console.print(f"… {num_left} more", style="dim")
    console.print("For the full report, use --html FILE or --json.", style="dim")


def print_section(console: Console, section: Section) -> None:
    """Print a section with all its rows and columns."""
    console.print(_text(f"\n{section.title}", "bold"), _text(section.lead))
    for finding in section.findings:
        console.print(_text(finding.level), _text(finding.title))
        console.print(_text(place(finding), "dim"))
        if finding.remedy:
            console.print(_text(f"Do: {finding.remedy}"))
    if section.rows:
        table = Table(
            box=None,
            pad_edge=False,
            show_header=bool(section.header),
        )
        for name in section.header or section.rows[0]:
            table.add_column(_text(str(name)), overflow="fold")
        for row in section.rows:
            table.add_row(*(_text(shown(cell)) for cell in row))
        console.print(table)


def _text(words: str, style: str = "") -> Text:
    """Return text without control characters or markup; levels and verdicts get their style."""
    return Text(clean_lines(words), style or STYLES.get(words, ""))
