"""Charts as SVG text: curves and a map of gradient norms. Colours come from the page's style."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from mlcompute.seeing.history import Curve
from mlcompute.seeing.svg import shortened, text_width
from mlcompute.seeing.units import cut, number, visible

#: Points a curve is drawn with at most; longer ones show the mean, and the range around it.
MOST_POINTS = 300
#: Rows and columns a map of norms has at most.
MOST_ROWS, MOST_COLUMNS = 48, 64
LEVELS = 9
#: Room for the name of a layer beside its norms.
WIDEST_LABEL = 220.0


@dataclass(frozen=True)
class Point:
    """A place on a curve: the mean of the numbers it stands for, and the least and the largest of them.

    lost  is one of them not finite?
    """

    x: float
    y: float
    low: float
    high: float
    lost: bool = False


@dataclass(frozen=True)
class Line:
    """A curve with a name; `kind` is its class in the style sheet (c0, c1, ...)."""

    name: str
    points: list[Point]
    kind: str


@dataclass(frozen=True)
class Chart:
    """A picture, and what the page needs to tell the numbers under the pointer."""

    svg: str
    data: dict[str, Any]


def condensed(curve: Curve) -> list[Point]:
    """At most MOST_POINTS points; numbers that are not finite are left out of the means, and their point if alone."""
    count = len(curve.values)
    size = max(1, -(-count // MOST_POINTS))
    points = []
    for start in range(0, count, size):
        places = curve.steps[start : start + size]
        numbers = curve.values[start : start + size]
        finite = list(filter(math.isfinite, numbers))
        mean = sum(finite) / len(finite) if finite else math.nan
        x = (places[0] + places[-1]) / 2
        low, high = min(finite, default=math.nan), max(finite, default=math.nan)
        points.append(Point(x, mean, low, high, len(finite) < len(numbers)))
    return points


def line_chart(title: str, lines: Sequence[Line], x_label: str, legend: str = "") -> Chart:
    """Curves over the same axis, with their names above; `legend`: this text instead, where a table has the names."""
    width, height, right, top, bottom = 540, 250, 14, 34, 34
    drawn = [point for line in lines for point in line.points if math.isfinite(point.y)]
    lows, highs = [point.low for point in drawn] or [0.0], [point.high for point in drawn] or [1.0]
    ticks = nice_ticks(min(lows), max(highs))
    least, most = ticks[0], ticks[-1]
    left = round(max(52.0, 16 + max(text_width(number(tick), 11.0) for tick in ticks)))
    xs = [point.x for line in lines for point in line.points] or [0.0]
    first, last = min(xs), max(xs)

    def at(x: float, y: float) -> tuple[float, float]:
        share = (x - first) / (last - first) if last > first else 0.5
        return left + share * (width - left - right), top + (most - y) / (most - least) * (height - top - bottom)

    parts = [
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(_described(title, lines))}">'
    ]
    for tick in ticks:
        y = at(first, tick)[1]
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{left - 8}" y="{y + 3.5:.1f}" text-anchor="end">{number(tick)}</text>')
    for x_tick in _whole_ticks(first, last):
        x = at(x_tick, least)[0]
        parts.append(f'<text class="tick" x="{x:.1f}" y="{height - bottom + 16}" text-anchor="middle">{x_tick}</text>')
    parts.append(f'<text class="tick" x="{width - right}" y="{height - 4}" text-anchor="end">{escape(x_label)}</text>')
    parts += (
        [f'<text class="name" x="{left}" y="18">{escape(visible(legend))}</text>'] if legend else _legend(lines, left)
    )
    for line in lines:
        parts += _drawn(line, at)
    lost = [point.x for line in lines for point in line.points if point.lost]
    if lost:  # once, for the first one: that is where to look
        x = at(min(lost), least)[0]
        anchor, shift = ("end", -5) if x > width / 2 else ("start", 5)
        parts.append(f'<text class="bad" x="{x + shift:.1f}" y="{top + 12}" text-anchor="{anchor}">not finite</text>')
        parts.append(f'<line class="lost" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - bottom}"/>')
    parts.append(f'<line class="cross" y1="{top}" y2="{height - bottom}" x1="0" x2="0" visibility="hidden"/></svg>')
    data = {
        "width": width,
        "x": x_label,
        "lines": [
            {"name": line.name, "points": [[round(at(p.x, least)[0], 1), p.x, _finite(p.y)] for p in line.points]}
            for line in lines
        ],
    }
    return Chart("".join(parts), data)


def _finite(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _described(title: str, lines: Sequence[Line]) -> str:
    ends = []
    for line in lines:
        finite = [point.y for point in line.points if math.isfinite(point.y)]
        if finite:
            ends.append(f"{line.name} from {number(finite[0])} to {number(finite[-1])}")
    return visible(f"{title}: {'; '.join(ends) or 'no numbers'}")


def _legend(lines: Sequence[Line], left: int) -> list[str]:
    parts, x = [], float(left)
    for line in lines:
        name = visible(cut(line.name, 28))
        parts.append(f'<line class="{line.kind}" x1="{x:.0f}" x2="{x + 16:.0f}" y1="14" y2="14"/>')
        parts.append(f'<text class="name" x="{x + 22:.0f}" y="18">{escape(name)}</text>')
        x += 22 + text_width(name, 12.0) + 22
    return parts


def _drawn(line: Line, at: Any) -> list[str]:
    """The curve in pieces: it breaks where there is no finite number."""
    parts = []
    pieces = [
        list(group)
        for is_finite, group in itertools.groupby(line.points, key=lambda point: math.isfinite(point.y))
        if is_finite
    ]
    for piece in pieces:
        if any(point.high > point.low for point in piece):
            upper = [at(point.x, point.high) for point in piece]
            lower = [at(point.x, point.low) for point in reversed(piece)]
            outline = " ".join(f"{x:.1f},{y:.1f}" for x, y in (*upper, *lower))
            parts.append(f'<polygon class="{line.kind} band" points="{outline}"/>')
        places = [at(point.x, point.y) for point in piece]
        if len(places) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline class="{line.kind}" points="{path}"/>')
        if len(piece) <= 24:
            parts += [f'<circle class="{line.kind}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in places]
    return parts


def nice_ticks(least: float, most: float, about: int = 4) -> list[float]:
    """Round numbers from at or below the least to at or above the most."""
    if not math.isfinite(most - least):
        least, most = 0.0, 1.0
    if most - least <= abs(most) * 1e-9:
        margin = abs(most) * 0.5 or 1.0
        least, most = least - margin, most + margin
    raw = (most - least) / about
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw * 0.999)
    first, last = math.floor(least / step + 1e-9), math.ceil(most / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def _whole_ticks(first: float, last: float) -> list[int]:
    """A few whole numbers within the range."""
    found = [round(tick) for tick in nice_ticks(first, last, 6) if first - 1e-9 <= tick <= last + 1e-9]
    return list(dict.fromkeys(found)) or [round(first)]


def norm_map(norms: dict[str, Curve]) -> str:
    """Gradient norms: a row per layer, time from left to right, darker for larger (powers of ten)."""
    rows = _condensed_rows(norms)
    columns = max(len(row) for _, row in rows)
    finite = [one for _, row in rows for one in row if math.isfinite(one) and one > 0]
    low, high = math.log10(min(finite, default=0.1)), math.log10(max(finite, default=1.0))
    if high - low < 0.5:
        low, high = low - 0.25, high + 0.25
    labels = [shortened(visible(name), WIDEST_LABEL, 12.0) for name, _ in rows]
    left = 14 + round(max(text_width(label, 12.0) for label in labels) * 1.06)
    width, right, line = 1090, 84, 18 if len(rows) <= 24 else 14
    cell, height = (width - left - right) / columns, line * len(rows) + 46
    parts = [f'<svg class="chart heat" viewBox="0 0 {width} {height}" role="img" aria-label="gradient norm per layer">']
    parts.append(f'<text class="tick" x="{left}" y="12">first step</text>')
    parts.append(f'<text class="tick" x="{width - right}" y="12" text-anchor="end">last step</text>')
    parts.append(f'<text class="tick" x="{width}" y="12" text-anchor="end">last norm</text>')
    for number_, ((name, row), label) in enumerate(zip(rows, labels, strict=True)):
        y = 20 + number_ * line
        parts.append(
            f'<text class="label" x="{left - 10}" y="{y + line - 5}" text-anchor="end">'
            f"{escape(label)}<title>{escape(visible(name))}</title></text>"
        )
        # Neighbours of one colour become one rectangle: most of the picture is smooth.
        for kind, group in itertools.groupby(enumerate(row), key=lambda item: _level(item[1], low, high)):
            cells = list(group)
            x, wide = left + cells[0][0] * cell, len(cells) * cell
            told = ", ".join(number(one) for _, one in cells[:3]) + (" …" if len(cells) > 3 else "")
            parts.append(
                f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{line - 1}">'
                f"<title>{escape(visible(name))}: {told}</title></rect>"
            )
        parts.append(f'<text class="value" x="{width}" y="{y + line - 5}" text-anchor="end">{number(row[-1])}</text>')
    parts += _scale(left, height - 16, low, high)
    return "".join([*parts, "</svg>"])


def _level(norm: float, low: float, high: float) -> str:
    if not math.isfinite(norm):
        return "hx"
    if norm <= 0:
        return "hz"
    share = (math.log10(norm) - low) / (high - low)
    return f"h{min(LEVELS - 1, max(0, int(share * LEVELS)))}"


def _scale(x: float, y: float, low: float, high: float) -> list[str]:
    parts = [f'<text class="tick" x="{x}" y="{y + 11}">{number(10**low)}</text>']
    x += round(text_width(number(10**low), 11.0) * 1.1) + 8
    for level in range(LEVELS):
        parts.append(f'<rect class="h{level}" x="{x + 18 * level}" y="{y}" width="18" height="12"/>')
    x += 18 * LEVELS + 8
    parts.append(f'<text class="tick" x="{x}" y="{y + 11}">{number(10**high)}</text>')
    x += round(text_width(number(10**high), 11.0) * 1.1) - 40
    for kind, name in (("hz", "zero"), ("hx", "not finite")):
        x += 70
        parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="18" height="12"/>')
        parts.append(f'<text class="tick" x="{x + 24}" y="{y + 11}">{name}</text>')
    return parts


def _condensed_rows(norms: dict[str, Curve]) -> list[tuple[str, list[float]]]:
    rows = [(name, _condensed_row(curve.values)) for name, curve in norms.items()]
    size = -(-len(rows) // MOST_ROWS)
    if size == 1:
        return rows
    joined = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        columns = itertools.zip_longest(*(row for _, row in part), fillvalue=0.0)
        name = part[0][0] if len(part) == 1 else f"{part[0][0]} … {part[-1][0]}"
        joined.append((name, [_largest(column) for column in columns]))
    return joined


def _condensed_row(row: list[float]) -> list[float]:
    size = max(1, -(-len(row) // MOST_COLUMNS))
    return [_largest(row[start : start + size]) for start in range(0, len(row), size)]


def _largest(numbers: Sequence[float]) -> float:
    """The largest; something that is not finite wins, because it must be seen."""
    if math.isfinite(sum(numbers)):
        return max(numbers)
    bad = [one for one in numbers if not math.isfinite(one)]
    return bad[0] if bad else max(numbers)
