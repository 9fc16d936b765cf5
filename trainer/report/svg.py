"""Curves made small enough to draw without losing what matters: decimation, smoothing, bins. Nothing here draws."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from trainer.report.formatting import clean_lines, interval, number, step
from trainer.report.run_log import Series
from trainer.report.statistics import finite

SMOOTHINGS = (0.6, 0.9)
"""Weights of the exponential mean, as TensorBoard's slider counts them."""
NEGLIGIBLE = 1e-17
NOTHING = Series(np.empty(0, np.int64), np.empty(0))
"""Stands for a metric that was not logged."""


def smooth(series: Series, weight: float) -> Series:
    """Exponential mean of the finite values, corrected for its start.

    Sums over 1, 2, 4, ... values, each from two of the half length, until older ones no longer count.
    """
    known = finite(series)
    means, reach = (1 - weight) * known.values, 1
    while reach < len(known) and weight**reach > NEGLIGIBLE:
        means[reach:] += weight**reach * means[:-reach]
        reach *= 2
    return Series(known.steps, means / (1 - weight ** np.arange(1.0, len(known) + 1)))


def decimate(series: Series, num_columns: int) -> Series:
    """At most two points of each of `num_columns` equal parts of the x axis, its lowest and its highest, and both ends.

    A million points stay small, and every spike keeps its height. Values are finite.
    """
    if len(series) <= 2 * num_columns:
        return series
    kept = {0, len(series) - 1}
    for first, last in column_bounds(series, num_columns):
        part = series.values[first:last]
        kept |= {first + int(part.argmin()), first + int(part.argmax())}
    return series[np.array(sorted(kept))]


def column_bounds(series: Series, num_columns: int) -> Iterator[tuple[int, int]]:
    """Index ranges of the columns that are not empty."""
    edges = np.linspace(series.steps[0], series.steps[-1], num_columns + 1)[1:-1]
    bounds = [0, *np.searchsorted(series.steps, edges).tolist(), len(series)]
    return (pair for pair in pairwise(bounds) if pair[0] < pair[1])


def bin_means(series: Series, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean of the finite values between neighbouring `edges`, NaN where there are none."""
    known = finite(series)
    counts = np.histogram(known.steps, edges)[0]
    sums = np.histogram(known.steps, edges, weights=known.values)[0]
    return np.divide(sums, counts, out=np.full(len(counts), np.nan), where=counts > 0)


def gaps(series: Series, kept: Series) -> NDArray[np.bool_]:
    """For each point of `kept` whether values that are not finite lie before it: there the line is interrupted."""
    bad_steps = series.steps[~np.isfinite(series.values)]
    return np.diff(np.searchsorted(bad_steps, kept.steps), prepend=0) > 0


NUM_TICKS, MIN_TICKS = 5, 2
MARGIN = 0.04
MAX_SHOWN, MIN_LOG = 1e150, 1e-150
"""Beyond these an axis would overflow."""
NARROW = 1e-9
"""Relative width below which values count as one: labels could not tell them apart."""
SUFFIXES = {1e9: "G", 1e6: "M", 1e3: "k"}


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high` become 0 to 1."""

    low: float
    high: float
    is_log: bool = False

    def place(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.is_log else (self.low, self.high)
        shown = np.log10(np.clip(values, self.low, None)) if self.is_log else values
        return np.clip((shown - low) / (high - low), 0.0, 1.0)

    def share(self, value: float) -> float:
        return float(self.place(np.array([value], np.float64))[0])

    def ticks(self) -> list[float]:
        """Round values; powers of ten, or these times 2 and 5, where a log axis is long enough to hold some."""
        if self.is_log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            factors = (1, 2, 5) if math.log10(self.high / self.low) < 2 else (1,)
            powers = range(first, last + 1, max(1, math.ceil((last - first) / NUM_TICKS)))
            ticks = [factor * 10.0**power for power in powers for factor in factors]
            ticks = [tick for tick in ticks if self.low <= tick <= self.high]
            if len(ticks) >= MIN_TICKS:
                return ticks
        rough = (self.high - self.low) / NUM_TICKS
        unit = 10.0 ** math.floor(math.log10(rough))
        size = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
        places = range(math.ceil(self.low / size - 1e-9), math.floor(self.high / size + 1e-9) + 1)
        return [round(place * size, 12) if size > 1e-9 else place * size for place in places]


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


def axis_labels(ticks: Sequence[float], *, is_log: bool) -> list[str]:
    """Short, and different from each other: 0.5, 71.38, 2000, 20k, 1.5M, 1e-5."""
    if is_log:
        sizes = [next((size for size in SUFFIXES if size <= tick < 1e3 * size), 1.0) for tick in ticks]
        words = [_word(tick, size) for tick, size in zip(ticks, sizes, strict=True)]
        if len(set(words)) == len(words):
            return words
    spacing = min((b - a for a, b in pairwise(ticks)), default=1.0)
    highest = max(map(abs, ticks), default=0.0)
    if 0 < highest < 1e-3 or highest >= 1e12:
        return [number(tick) for tick in ticks]
    size = next((size for size in SUFFIXES if highest >= 10 * size and spacing >= size / 10), 1.0)
    if size > 1:
        return [_word(tick, size) for tick in ticks]
    num_decimals = max(0, -math.floor(math.log10(spacing) + 1e-9))
    return [step(int(tick)) if num_decimals == 0 else f"{tick:.{num_decimals}f}" for tick in ticks]


def _word(value: float, size: float) -> str:
    return f"{value / size:.4g}{SUFFIXES[size]}" if size > 1 and value else number(value)


UNITS = 1000
NUM_COLUMNS = 400
"""Of a line: finer than a pixel pair of the widest page."""
NUM_HOVER_COLUMNS = 60
MIN_LABEL_GAP_PX = 15
MIN_BAND_PERCENT = 0.2
WHOLE = "100%"


class Panel:
    """One plot in the making: draw on it in any order, then `render`."""

    def __init__(self, x: Scale, y: Scale, *, height_px: int = 240, has_hover: bool = True) -> None:
        self.x, self.y = x, y
        self._height_px, self._has_hover = height_px, has_hover
        self._back, self._front = ElementTree.Element("g"), ElementTree.Element("g")
        stretched = {"viewBox": f"0 0 {UNITS} {UNITS}", "preserveAspectRatio": "none", "width": WHOLE, "height": WHOLE}
        self._paths = ElementTree.Element("svg", stretched)
        self._ends: list[tuple[float, str, str]] = []
        """What stands beside the curves' ends: height as a share, css, words."""
        self._lines: list[tuple[str, Series]] = []

    def line(self, series: Series, *, label: str, css: str, is_named: bool = True) -> None:
        """A curve, decimated; `label` names it where the pointer rests and, if `is_named`, beside its end."""
        bad_steps = series.steps[~np.isfinite(series.values)]
        columns = (NUM_COLUMNS * self.x.place(bad_steps.astype(np.float64))).astype(int)
        for at in bad_steps[np.unique(columns, return_index=True)[1]].tolist():
            title = f"{label} is not finite at step {step(at)}"
            _add(self._front, "text", "bad", text="×", title=title, x=self._x(at), y="9")
        known = finite(series)
        if not len(known):
            return
        kept = decimate(known, NUM_COLUMNS)
        points = self._points(kept.steps.astype(np.float64), kept.values)
        _add(self._paths, "path", css, d=_path(points, gaps(series, kept)))
        self._lines.append((label, known))
        if len(known) == 1:
            self.points(known, label=label, css=css)
        if is_named:
            last = float(known.values[-1])
            self._ends.append((self.y.share(last), css, f"{label} {number(last)}"))

    def points(self, series: Series, *, label: str, css: str) -> None:
        for at, value in decimate(finite(series), NUM_COLUMNS).by_step().items():
            title = f"{label}, step {step(at)}: {number(value)}"
            _add(self._front, "circle", css, title=title, cx=self._x(at), cy=self._y(value), r="3.5")

    def band(self, steps: tuple[int, int], title: str) -> None:
        """A stretch of steps behind the curves."""
        first, last = (100 * self.x.share(at) for at in steps)
        width = max(last - first, MIN_BAND_PERCENT)  # a rectangle without width is not drawn at all
        self._column(self._back, "band", (first + last - width) / 2, width, title)

    def mark(self, at: int, *, title: str, css: str, sign: str, is_above: bool = False) -> None:
        """A step worth finding: a thin line, with a sign on the lower edge or words above the plot."""
        x = self._x(at)
        _add(self._back, "line", css, x1=x, x2=x, y1="0", y2=WHOLE)
        _add(self._front, "text", f"sign {css}", text=sign, title=title, x=x, y="-4" if is_above else WHOLE)

    def stack(self, edges: NDArray[np.float64], parts: Sequence[tuple[str, str, NDArray[np.float64]]]) -> None:
        """Areas on top of each other: (label, css, one value a bin); the label stands beside the last bin."""
        middles = (edges[:-1] + edges[1:]) / 2
        floor = np.zeros(len(middles))
        for label, css, values in parts:
            top = floor + np.nan_to_num(values)
            outline = [*self._points(middles, top), *reversed(self._points(middles, floor))]
            d = _path(outline, np.zeros(len(outline), np.bool_))
            _add(self._paths, "path", f"area {css}", title=label, d=f"{d}Z")
            self._ends.append((self.y.share(float(top[-1] + floor[-1]) / 2), css, label))
            floor = top

    def render(self, *, label: str, x_name: str) -> str:
        """The SVG element; `label` is what a screen reader says."""
        panel = ElementTree.Element("svg", {"class": "panel", "role": "img", "aria-label": clean_lines(label)})
        panel.set("style", f"height:{self._height_px}px")
        self._draw_axes(panel, x_name)
        panel.extend((self._back, self._paths))
        if self._has_hover and self._lines:
            self._draw_hover(panel)
        panel.append(self._front)
        self._draw_ends(panel)
        return ElementTree.tostring(panel, encoding="unicode").replace(" />", "/>")

    def _draw_axes(self, panel: ElementTree.Element, x_name: str) -> None:
        ticks = self.y.ticks()
        for tick, words in zip(ticks, axis_labels(ticks, is_log=self.y.is_log), strict=True):
            y = self._y(tick)
            _add(panel, "line", "grid", x1="0", x2=WHOLE, y1=y, y2=y)
            _add(panel, "text", "tick y", text=words, x="-8", y=y, dy=".32em")
        ticks = [tick for tick in self.x.ticks() if tick == int(tick)]
        for index, (tick, words) in enumerate(zip(ticks, axis_labels(ticks, is_log=False), strict=True)):
            css, name = "tick x wide" if index % 2 else "tick x", f"{x_name} " if index == 0 else ""
            _add(panel, "text", css, text=f"{name}{words}", x=self._x(tick), y=WHOLE, dy="1.6em")
        _add(panel, "line", "axis", x1="0", x2=WHOLE, y1=WHOLE, y2=WHOLE)

    def _draw_hover(self, panel: ElementTree.Element) -> None:
        """Invisible columns that tell the values below the pointer."""
        longest = max((series for _, series in self._lines), key=len)
        for first, last in column_bounds(longest, NUM_HOVER_COLUMNS):
            steps = longest[first:last].ends
            lines = [interval(steps)]
            for label, series in self._lines:
                low, high = np.searchsorted(series.steps, [steps[0], steps[1] + 1])
                if len(part := series.values[low:high]):
                    ends = dict.fromkeys(map(number, (part.min(), part.max())))
                    lines.append(f"{label}: {' to '.join(ends)}")
            start, end = (100 * self.x.share(at) for at in steps)
            self._column(panel, "look", start, max(end - start, 100 / NUM_HOVER_COLUMNS), "\n".join(lines))

    def _draw_ends(self, panel: ElementTree.Element) -> None:
        """Beside the curves' ends, moved apart where they would cover each other."""
        if not self._ends:
            return
        ordered = sorted(self._ends, key=lambda end: -end[0])
        room = MIN_LABEL_GAP_PX * np.arange(len(ordered))
        wanted = self._height_px * (1 - np.array([share for share, _, _ in ordered]))
        apart = np.maximum.accumulate(wanted - room) + room
        places = np.minimum(apart, self._height_px - room[::-1])
        for place, (_, css, words) in zip(places.tolist(), ordered, strict=True):
            _add(panel, "text", f"end {css}", text=words, x=WHOLE, dx="8", y=f"{place:.0f}", dy=".32em")

    def _column(self, parent: ElementTree.Element, css: str, start: float, width: float, title: str) -> None:
        _add(parent, "rect", css, title=title, x=f"{start:.2f}%", width=f"{width:.2f}%", y="0", height=WHOLE)

    def _points(self, steps: NDArray[np.float64], values: NDArray[np.float64]) -> list[tuple[int, int]]:
        xs, ys = np.rint(UNITS * self.x.place(steps)), np.rint(UNITS * (1 - self.y.place(values)))
        return list(zip(xs.astype(int).tolist(), ys.astype(int).tolist(), strict=True))

    def _x(self, at: float) -> str:
        return f"{100 * self.x.share(at):.2f}%"

    def _y(self, value: float) -> str:
        return f"{100 * (1 - self.y.share(value)):.2f}%"


def _path(points: Sequence[tuple[int, int]], is_gap: NDArray[np.bool_]) -> str:
    """A point after a gap starts a new stretch; a stretch of one point still shows, as a dot."""
    starts = [index == 0 or bool(is_gap[index]) for index in range(len(points))]
    commands = []
    for index, (x, y) in enumerate(points):
        is_alone = starts[index] and (index + 1 == len(points) or starts[index + 1])
        commands.append(f"{'M' if starts[index] else 'L'}{x} {y}{'h0' if is_alone else ''}")
    return "".join(commands)


def _add(parent: ElementTree.Element, tag: str, css: str, *, text: str = "", title: str = "", **places: str) -> None:
    element = ElementTree.SubElement(parent, tag, {"class": css, **places})
    element.text = clean_lines(text)
    if title:
        ElementTree.SubElement(element, "title").text = clean_lines(title)
