"""The report as one HTML page that needs nothing else: no script, no font, no address outside of itself."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from trainer.report.curves import NOTHING, SMOOTHINGS, smooth
from trainer.report.formatting import clean, facts, number, place, share, step
from trainer.report.plots import Figure, FigureRow, figures
from trainer.report.result import Finding, Report
from trainer.report.run_log import RunLog
from trainer.report.sections import STATUSES, Section, Table, sections
from trainer.report.style import STYLE

VERDICT_LEVELS = {"FAIL": "fail", "ATTENTION": "warn", "OK": "ok", "INSUFFICIENT": "info"}
FOLDED = ("metrics", "trends", "limits")
"""Long tables that are opened on demand."""
LONG_CHARS = 40
NUM_OPEN_ZOOMS = 3
NUM_COLUMNS = 5
"""Of small figures beside each other on a wide page."""


def as_page(runs: Sequence[tuple[Report, RunLog]]) -> str:
    """The whole page, one article a run."""
    title = ", ".join(clean(report.title) for report, _ in runs)
    articles = "".join(_article(report, log, f"run{index}-") for index, (report, log) in enumerate(runs, start=1))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{articles}</body></html>\n"
    )


def _article(report: Report, log: RunLog, prefix: str) -> str:
    plots = figures(report, log)
    parts = [_head(report), _tiles(report, log)]
    blocks = dict(_blocks(report, log, plots))
    links = "".join(f'<a href="#{prefix}{id_}">{escape(title)}</a>' for id_, (title, _) in blocks.items())
    parts.append(f"<nav>{links}</nav>")
    parts += [
        f'<section id="{prefix}{id_}"><h2>{escape(title)}</h2>{body}</section>' for id_, (title, body) in blocks.items()
    ]
    said = "".join(f"<p>{escape(line)}</p>" for line in facts(report)[1])
    return f"<article>{''.join(parts)}<footer>{said}</footer></article>"


def _blocks(
    report: Report, log: RunLog, plots: Mapping[str, tuple[FigureRow, ...]]
) -> Iterator[tuple[str, tuple[str, str]]]:
    """(id, (title, body)) in reading order: what matters, the loss, the sections, then all there is."""
    if report.top:
        yield "top", ("What matters", "".join(map(_finding, report.top)))
    if plots["loss"]:
        yield "loss", ("Loss", _rows(plots["loss"]))
    rest = [finding for finding in report.findings if finding not in report.top]
    if rest:
        yield "findings", ("Also found", "".join(map(_finding, rest)))
    for section in sections(report, log):
        if section.id == "metrics" and plots["curves"]:
            yield "curves", ("All curves", _rows(plots["curves"]))
        yield section.id, (section.title, _section(section, plots.get(section.id, ())))
    if report.closing:
        yield "next", ("What next", f"<p>{escape(clean(report.closing))}</p>")


def _head(report: Report) -> str:
    level = VERDICT_LEVELS[report.verdict]
    short, _ = facts(report)
    return (
        f"<header><h1>{escape(clean(report.title))}</h1>"
        f'<p class="source">{escape(clean(report.source))} log, profile {escape(report.profile)} · '
        f"<code>{escape(clean(str(report.path)))}</code><br>{escape(short)}</p></header>"
        f'<div class="verdict {level}"><b>{report.verdict}</b><span>{escape(clean(report.headline))}</span></div>'
    )


def _tiles(report: Report, log: RunLog) -> str:
    tiles = []
    for key, name in (("train/loss", "Training loss"), ("reward", "Reward")):
        if len(curve := smooth(log.series.get(key, NOTHING), SMOOTHINGS[-1]).values):
            tiles.append((name, number(float(curve[-1])), f"from {number(float(curve[0]))}, smoothed"))
    if (found := report.generalisation) is not None:
        about = f"{clean(found.metric)} at step {step(found.best_step)}"
        tiles.append(("Best validation", number(found.best_value), about))
    if report.anomalies:
        open_ = sum(not anomaly.has_recovered for anomaly in report.anomalies)
        tiles.append(("Anomalies", str(len(report.anomalies)), f"{open_} not recovered" if open_ else "all recovered"))
    if (speed := report.throughput) is not None:
        rate = f"{number(speed.tokens_per_s)} tokens/s" if speed.tokens_per_s is not None else "median"
        tiles.append(("Step time", f"{number(speed.step_s)} s", rate))
        if speed.mfu is not None:
            tiles.append(("MFU", share(speed.mfu), "of the peak"))
    if report.checklist:
        counts = {status: sum(item.status == status for item in report.checklist) for status in STATUSES}
        passed = f"{counts.pop('pass')} of {len(report.checklist)}"
        tiles.append(("Checklist", passed, ", ".join(f"{count} {status}" for status, count in counts.items())))
    cells = "".join(
        f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(about)}</small></div>'
        for name, value, about in tiles
    )
    return f'<div class="tiles">{cells}</div>' if cells else ""


def _finding(finding: Finding) -> str:
    """What is the matter and what to do at once; why, on demand."""
    about = " · ".join(part for part in (place(finding), clean(finding.id)) if part)
    evidence = "".join(f"<li>{escape(clean(line))}</li>" for line in finding.evidence)
    why = (f"<p>{escape(clean(finding.cause))}</p>" if finding.cause else "") + (
        f"<ul>{evidence}</ul>" if evidence else ""
    )
    parts = [
        f'<h3><span class="badge">{escape(finding.level)}</span>{escape(clean(finding.title))}</h3>',
        f'<p class="do"><b>Do:</b> {escape(clean(finding.remedy))}</p>' if finding.remedy else "",
        f"<details><summary>Why: {escape(about)}</summary>{why}</details>"
        if why
        else f'<p class="where">{escape(about)}</p>',
    ]
    return f'<div class="finding {finding.level}">{"".join(parts)}</div>'


def _section(section: Section, rows: Iterable[FigureRow]) -> str:
    body = f'<p class="lead">{escape(section.lead)}</p>' if section.lead else ""
    table = _table(section.table) if section.table is not None else ""
    notes = "".join(f"<li>{escape(note)}</li>" for note in section.notes)
    tail = table + (f'<ul class="notes">{notes}</ul>' if notes else "")
    if section.id == "anomalies":
        return body + tail + _zooms(tuple(rows))
    if section.id in FOLDED:
        return f"{body}<details><summary>Show the table</summary>{tail}</details>"
    return body + _rows(rows) + tail


def _zooms(rows: Sequence[FigureRow]) -> str:
    """The first anomalies at once, the others on demand."""
    first, more = rows[:NUM_OPEN_ZOOMS], rows[NUM_OPEN_ZOOMS:]
    folded = f"<details><summary>Show {len(more)} more</summary>{_rows(more)}</details>" if more else ""
    return _rows(first) + folded


def _table(table: Table) -> str:
    head = "".join(f'<th class="{"w" if name in table.words else "n"}">{escape(name)}</th>' for name in table.header)
    body = "".join(f"<tr>{''.join(_cells(table, row))}</tr>" for row in table.rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cells(table: Table, row: tuple[str, ...]) -> Iterator[str]:
    for name, cell in zip(table.header, row, strict=True):
        css = "n" if name not in table.words else "w long" if len(cell) > LONG_CHARS else "w"
        status = f" {cell}" if name == "status" else ""
        yield f'<td class="{css}{status}">{escape(cell)}</td>'


def _rows(rows: Iterable[FigureRow]) -> str:
    """Rows of small figures share a line where they have room beside each other."""
    return f'<div class="groups">{"".join(map(_row, rows))}</div>'


def _row(row: FigureRow) -> str:
    title = f"<h3>{escape(row.title)}</h3>" if row.title else ""
    css = "row small" if row.is_small else "row pair" if len(row.figures) > 1 else "row"
    columns = min(len(row.figures), NUM_COLUMNS) if row.is_small else NUM_COLUMNS + 1
    inner = f'{title}<div class="{css}">{"".join(map(_figure, row.figures))}</div>'
    return f'<div class="group" style="--n:{columns}">{inner}</div>'


def _figure(figure: Figure) -> str:
    """Without a title, below the heading of its section, the unit begins the key."""
    unit = f'<span class="unit">{escape(figure.unit)}</span>' if figure.unit else ""
    title = re.sub("([/_])", r"\1<wbr>", escape(figure.title))
    caption = f"<figcaption>{title} {unit}</figcaption>" if title else ""
    signs = "".join(f'<span class="{css}">{_swatch(css)}{escape(words)}</span>' for css, words in figure.key)
    key = f'<div class="key">{"" if title else unit}{signs}</div>' if figure.key else ""
    return f'<figure>{caption}{key}<div class="plot">{figure.svg}</div></figure>'


def _swatch(css: str) -> str:
    """A line or a box in the key; signs such as a triangle stand in the words themselves."""
    return f'<i class="{css}"></i>' if css == "band" or css[1:].isdigit() else ""
