"""One plot as an SVG element. Positions are percentages, so that a plot fits any width while its words keep their size.

Lines are paths in a stretched inner drawing of 1000 x 1000 units; everything else stands in the outer one. Colours are
classes (`s1` to `s6`, `band`, ...) that the page's style sheet defines for light and dark.
"""

from collections.abc import Sequence
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from trainer.report.axis import Scale, axis_labels
from trainer.report.curves import column_bounds, decimate, gaps
from trainer.report.formatting import clean_lines, interval, number, step
from trainer.report.run_log import Series
from trainer.report.statistics import finite

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
        kept = decimate(finite(series), NUM_COLUMNS)
        for at, value in zip(kept.steps.tolist(), kept.values.tolist(), strict=True):
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
            steps = (int(longest.steps[first]), int(longest.steps[last - 1]))
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
