"""Writes plots as SVG text. Positions are percentages, so that a plot fits any width while its words keep their size.

Lines are paths in a stretched inner drawing of 1000 x 1000 units; everything else stands in the outer one. Colours are
classes (`s1` to `s6`, `band`, ...) that the page's style sheet defines for light and dark.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainer.report.curves import column_bounds, decimate, finite, gaps
from trainer.report.formatting import clean, number, step
from trainer.report.run_log import Series

UNITS = 1000
NUM_COLUMNS = 400
"""Of a line: finer than a pixel pair of the widest page."""
NUM_HOVER_COLUMNS = 60
NUM_TICKS = 5
MIN_LABEL_GAP_PX = 15
MIN_BAND_PERCENT = 0.2
MARGIN = 0.04
MAX_SHOWN, MIN_LOG = 1e150, 1e-150
"""Beyond these an axis would overflow."""
NARROW = 1e-9
"""Relative width below which values count as one: labels could not tell them apart."""
SUFFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Scale:
    """An axis: values from `low` to `high` become 0 to 1."""

    low: float
    high: float
    is_log: bool = False

    def place(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.is_log else (self.low, self.high)
        shown = np.log10(np.clip(values, self.low, None)) if self.is_log else values
        return np.clip((shown - low) / (high - low), 0.0, 1.0)

    def percent(self, value: float) -> str:
        return f"{100 * float(self.place(np.array([value], np.float64))[0]):.2f}%"

    def ticks(self) -> list[float]:
        return _log_ticks(self.low, self.high) if self.is_log else _linear_ticks(self.low, self.high)


def scale_of(values: Iterable[float], *, is_log: bool = False, has_margin: bool = True) -> Scale:
    """A scale over finite values; values that are all alike, or none, get room around them."""
    known = [min(max(v, -MAX_SHOWN), MAX_SHOWN) for v in values if math.isfinite(v) and not (is_log and v <= MIN_LOG)]
    low, high = (min(known), max(known)) if known else (1.0, 1.0)
    if high - low <= NARROW * max(abs(low), abs(high)):
        room = abs(low) * 0.1 or 1.0
        low, high = low - room, high + room
    if is_log:
        room = (high / low) ** (MARGIN * has_margin)
        return Scale(low / room, high * room, is_log=True)
    room = (high - low) * MARGIN * has_margin
    return Scale(low - room if low < 0 or low > room else 0.0, high + room)


def _linear_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / NUM_TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    size = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first, last = math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9)
    return [round(index * size, 12) if size > 1e-9 else index * size for index in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, math.ceil((last - first) / NUM_TICKS))
    factors = (1, 2, 5) if math.log10(high / low) < 2 else (1,)
    ticks = [factor * 10.0**power for power in range(first, last + 1, stride) for factor in factors]
    return [tick for tick in ticks if low <= tick <= high]


def axis_labels(ticks: Sequence[float], *, is_log: bool) -> list[str]:
    """Short, and different from each other: 0.5, 71.38, 2000, 20k, 1.5M, 1e-5."""
    if is_log:
        return [
            _with_suffix(tick, next((pair for pair in SUFFIXES if pair[0] <= tick < 1e3 * pair[0]), None))
            for tick in ticks
        ]
    spacing = min((b - a for a, b in pairwise(ticks)), default=1.0)
    highest = max(map(abs, ticks), default=0.0)
    if 0 < highest < 1e-3 or highest >= 1e12:
        return [number(tick) for tick in ticks]
    suffix = next((pair for pair in SUFFIXES if highest >= 10 * pair[0] and spacing >= pair[0] / 10), None)
    if suffix is not None:
        return [_with_suffix(tick, suffix) for tick in ticks]
    num_decimals = max(0, -math.floor(math.log10(spacing) + 1e-9))
    return [step(int(tick)) if num_decimals == 0 else f"{tick:.{num_decimals}f}" for tick in ticks]


def _with_suffix(value: float, suffix: tuple[float, str] | None) -> str:
    return number(value) if suffix is None else f"{value / suffix[0]:.4g}{suffix[1] if value else ''}"


@dataclass
class Panel:
    """One plot in the making: draw on it in any order, then `render`."""

    x: Scale
    y: Scale
    height_px: int = 240
    has_hover: bool = True
    _back: list[str] = field(default_factory=list)
    _paths: list[str] = field(default_factory=list)
    _front: list[str] = field(default_factory=list)
    _ends: list[tuple[float, str, str]] = field(default_factory=list)
    _lines: list[tuple[str, Series]] = field(default_factory=list)

    def line(self, series: Series, *, label: str, css: str, is_named: bool = True) -> None:
        """A curve with a cross where a value is not finite; `is_named` writes label and last value beside its end."""
        known = finite(series)
        self._crosses(series.steps[~np.isfinite(series.values)], label)
        if not len(known):
            return
        kept = decimate(known, NUM_COLUMNS)
        self._paths.append(f'<path class="{css}" d="{_path(self._points(kept), gaps(series, kept))}"/>')
        self._lines.append((label, known))
        if len(known) == 1:
            self.points(known, label=label, css=css)
        if is_named:
            last = float(known.values[-1])
            self._ends.append((1 - float(self.y.place(known.values[-1:])[0]), css, f"{label} {number(last)}"))

    def points(self, series: Series, *, label: str, css: str) -> None:
        for at, value in zip(*_lists(decimate(finite(series), NUM_COLUMNS)), strict=True):
            title = _title(f"{label}, step {step(at)}: {number(value)}")
            x, y = self.x.percent(at), self._y(value)
            self._front.append(f'<circle class="{css}" cx="{x}" cy="{y}" r="3.5">{title}</circle>')

    def band(self, steps: tuple[int, int], title: str) -> None:
        """A stretch of steps behind the curves."""
        first, last = (100 * float(self.x.place(np.array([at], np.float64))[0]) for at in steps)
        width = max(last - first, MIN_BAND_PERCENT)  # a rectangle without width is not drawn at all
        start = (first + last - width) / 2
        self._back.append(
            f'<rect class="band" x="{start:.2f}%" width="{width:.2f}%" y="0" height="100%">{_title(title)}</rect>'
        )

    def mark(self, at: int, *, title: str, css: str, sign: str, is_above: bool = False) -> None:
        """A step worth finding: a thin line, with a sign on the lower edge or words above the plot."""
        x = self.x.percent(at)
        self._back.append(f'<line class="{css}" x1="{x}" x2="{x}" y1="0" y2="100%"/>')
        self._front.append(_text(sign, f"sign {css}", x, "-4" if is_above else "100%", title))

    def stack(self, edges: NDArray[np.float64], parts: Sequence[tuple[str, str, NDArray[np.float64]]]) -> None:
        """Areas on top of each other: (label, css, one value a bin); the label stands beside the last bin."""
        middles = (edges[:-1] + edges[1:]) / 2
        floor = np.zeros(len(middles))
        for label, css, values in parts:
            top = floor + np.nan_to_num(values)
            outline = [*self._pairs(middles, top), *reversed(self._pairs(middles, floor))]
            d = _path(outline, np.zeros(len(outline), np.bool_))
            self._paths.append(f'<path class="area {css}" d="{d}Z">{_title(label)}</path>')
            self._ends.append((1 - float(self.y.place((top[-1:] + floor[-1:]) / 2)[0]), css, label))
            floor = top

    def render(self, *, label: str, x_name: str) -> str:
        """The SVG element; `label` is what a screen reader says."""
        inner = f'<svg viewBox="0 0 {UNITS} {UNITS}" preserveAspectRatio="none" width="100%" height="100%">'
        parts = [*self._grid(x_name), *self._back, inner, *self._paths, "</svg>", *self._hover(), *self._front]
        parts += self._end_labels()
        start = f'<svg class="panel" role="img" aria-label="{escape(clean(label))}" style="height:{self.height_px}px">'
        return f"{start}{''.join(parts)}</svg>"

    def _grid(self, x_name: str) -> list[str]:
        parts = []
        ticks = self.y.ticks()
        for tick, words in zip(ticks, axis_labels(ticks, is_log=self.y.is_log), strict=True):
            y = self._y(tick)
            parts.append(f'<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>')
            parts.append(f'<text class="tick y" x="-8" y="{y}" dy=".32em">{words}</text>')
        ticks = [tick for tick in self.x.ticks() if tick == int(tick)]
        for index, (tick, words) in enumerate(zip(ticks, axis_labels(ticks, is_log=False), strict=True)):
            css, name = "tick x wide" if index % 2 else "tick x", f"{x_name} " if index == 0 else ""
            parts.append(f'<text class="{css}" x="{self.x.percent(tick)}" y="100%" dy="1.6em">{name}{words}</text>')
        return [*parts, '<line class="axis" x1="0" x2="100%" y1="100%" y2="100%"/>']

    def _hover(self) -> list[str]:
        """Invisible columns that tell the values below the pointer."""
        if not self.has_hover or not self._lines:
            return []
        longest = max((series for _, series in self._lines), key=len)
        parts = []
        for first, last in column_bounds(longest, NUM_HOVER_COLUMNS):
            steps = (int(longest.steps[first]), int(longest.steps[last - 1]))
            lines = [f"step {step(steps[0])}" + (f"–{step(steps[1])}" if steps[1] > steps[0] else "")]
            for label, series in self._lines:
                low, high = np.searchsorted(series.steps, [steps[0], steps[1] + 1])
                if part := series.values[low:high].tolist():
                    spread = f"{number(min(part))} to {number(max(part))}" if len(part) > 1 else number(part[0])
                    lines.append(f"{label}: {spread}")
            x, end = (float(self.x.place(np.array([at], np.float64))[0]) for at in steps)
            width = max(end - x, 1 / NUM_HOVER_COLUMNS)
            parts.append(
                f'<rect class="look" x="{100 * x:.2f}%" width="{100 * width:.2f}%" y="0" height="100%">'
                f"{_title(chr(10).join(lines))}</rect>"
            )
        return parts

    def _end_labels(self) -> list[str]:
        """Beside the curves' ends, moved apart where they would cover each other."""
        ordered = sorted(self._ends, key=lambda end: end[0])
        places: list[float] = []
        for y, _, _ in ordered:
            places.append(max(y * self.height_px, places[-1] + MIN_LABEL_GAP_PX if places else 0.0))
        lowest = float(self.height_px)
        for index in reversed(range(len(places))):
            places[index] = min(places[index], lowest)
            lowest = places[index] - MIN_LABEL_GAP_PX
        return [
            f'<text class="end {css}" x="100%" dx="8" y="{place:.0f}" dy=".32em">{escape(clean(text))}</text>'
            for place, (_, css, text) in zip(places, ordered, strict=True)
        ]

    def _crosses(self, bad_steps: NDArray[np.int64], label: str) -> None:
        """One a column at most."""
        _, first = np.unique((NUM_COLUMNS * self.x.place(bad_steps.astype(np.float64))).astype(int), return_index=True)
        for at in bad_steps[first].tolist():
            self._front.append(_text("×", "bad", self.x.percent(at), "9", f"{label} is not finite at step {step(at)}"))

    def _points(self, series: Series) -> list[tuple[int, int]]:
        return self._pairs(series.steps.astype(np.float64), series.values)

    def _pairs(self, steps: NDArray[np.float64], values: NDArray[np.float64]) -> list[tuple[int, int]]:
        xs, ys = np.rint(UNITS * self.x.place(steps)), np.rint(UNITS * (1 - self.y.place(values)))
        return list(zip(xs.astype(int).tolist(), ys.astype(int).tolist(), strict=True))

    def _y(self, value: float) -> str:
        return f"{100 * (1 - float(self.y.place(np.array([value]))[0])):.2f}%"


def _path(points: Sequence[tuple[int, int]], is_gap: NDArray[np.bool_]) -> str:
    """A point after a gap starts a new stretch; a stretch of one point still shows, as a dot."""
    starts = [index == 0 or bool(is_gap[index]) for index in range(len(points))]
    commands = []
    for index, (x, y) in enumerate(points):
        is_alone = starts[index] and (index + 1 == len(points) or starts[index + 1])
        commands.append(f"{'M' if starts[index] else 'L'}{x} {y}{'h0' if is_alone else ''}")
    return "".join(commands)


def _lists(series: Series) -> tuple[list[int], list[float]]:
    return series.steps.tolist(), series.values.tolist()


def _title(text: str) -> str:
    lines = (clean(line) for line in text.splitlines())
    return f"<title>{escape(chr(10).join(lines))}</title>"


def _text(sign: str, css: str, x: str, y: str, title: str) -> str:
    return f'<text class="{css}" x="{x}" y="{y}">{sign}{_title(title)}</text>'
