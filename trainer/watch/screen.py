"""What `watch` shows: worst first, what does not move, what was warned about; then where the run stands (floor 5)."""

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from trainer.report.formatting import MISSING, clean, duration, number, percent, step
from trainer.watch.run_status import RunStatus

MAX_ALERTS, MAX_EPOCHS = 5, 10
COLUMNS = ("train/loss", "train/grad_norm", "train/lr(1e-3)", "train/time(s)", "throughput/train/tokens_per_s")
STYLES = {"error": "bold red", "warn": "bold yellow"}


def lines(status: RunStatus, *, has_rows: bool) -> Iterator[RenderableType]:
    now_s = time.time()
    yield Text(f"{clean(str(status.run_dir))}  {_state(status, now_s)}", style="bold")
    for rank, silent_s, beat in status.silent_ranks(now_s):
        where = f"in {clean(str(beat['phase']))} at step {step(beat['step'])}"
        yield Text(f"rank {rank} is silent for {duration(silent_s)}, {where}", style=STYLES["error"])
    for alert in status.alerts[-MAX_ALERTS:]:
        words = f"step {alert.get('step')}: {clean(str(alert.get('message')))}"
        yield Text.assemble((f"{alert['level']} ", STYLES[alert["level"]]), words)
    if len(status.alerts) > MAX_ALERTS:
        yield Text(f"… and {len(status.alerts) - MAX_ALERTS} earlier alerts of this attempt", style="dim")
    facts = Table.grid(padding=(0, 2, 0, 0))
    for name, words in _facts(status):
        facts.add_row(Text(name, style="dim"), Text(words))
    yield facts
    if has_rows:
        yield _rows(status)


def _state(status: RunStatus, now_s: float) -> str:
    if status.exit_code is not None:
        return f"ended with exit code {status.exit_code}"
    if not status.rows or "ts" not in status.rows[-1]:
        return "starting"
    return f"last row {duration(max(0.0, now_s - status.rows[-1]['ts']))} ago"


def _facts(status: RunStatus) -> Iterator[tuple[str, str]]:
    if status.rows:
        last = status.rows[-1]
        share = last.get("progress/pct", 0.0)
        done = f" of {step(round(100 * last['step'] / share))} ({percent(share)})" if share > 0 else ""
        yield "step", f"{step(last['step'])}{done}"
        yield "loss", number(last.get("train/loss"))
        if status.exit_code is None and "progress/eta_s" in last:
            yield "time left", duration(last["progress/eta_s"])
        if "throughput/train/tokens_per_s" in last:
            yield "tokens/s", number(last["throughput/train/tokens_per_s"])
    if losses := status.validations:
        places = {"": max(losses), "; best ": min(losses, key=losses.__getitem__)}
        yield "validation", "".join(f"{name}{number(losses[at])} at step {step(at)}" for name, at in places.items())
    for name, values in status.epoch_means():
        shown = values[-MAX_EPOCHS:]
        mean = number(sum(shown) / len(shown))
        yield f"{name} by epoch", f"{' '.join(map(number, shown))} (mean {mean}{_trend(shown)})"
    if (listing := status.checkpoints()) is not None:
        steps = ", ".join(step(info.step) for info in listing.checkpoints) or "none yet"
        resume = listing.resume_step
        yield "checkpoints", steps if resume is None else f"{steps}; a resume takes {step(resume)}"


def _trend(values: Sequence[float]) -> str:
    """How often it fell from one epoch to the next: single batches say little."""
    num_falls = sum(after < before for before, after in pairwise(values))
    return f", fell {num_falls} of {len(values) - 1} times" if len(values) > 1 else ""


def _rows(status: RunStatus) -> Table:
    shown = [key for key in COLUMNS if any(key in row for row in status.rows)]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("step", *shown):
        table.add_column(Text(name), justify="right")
    for row in status.rows:
        cells = (number(row[key]) if isinstance(row.get(key), int | float) else MISSING for key in shown)
        table.add_row(step(row["step"]), *cells)
    return table
