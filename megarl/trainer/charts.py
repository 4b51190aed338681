"""Charts as SVG: lines, stacked bars, histograms, and who did what when. What is not finite is not drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from megarl.trainer.html import colour, svg

WIDTH, HEIGHT = 312, 150  # pixels, of a chart of lines
WIDE = 960
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 8, 20, 18
MOST_POINTS = 300  # of a line; of longer ones each point is a mean

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Bar:
    """A piece of a row, from `begin` to `end` in the row's unit; `depth`: how many others it is within."""

    name: str
    begin: float
    end: float
    words: str
    depth: int = 0


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """Means of as many neighbours as it takes, of those that are finite."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    each = -(-len(finite) // most)
    if each <= 1:
        return finite
    parts = [finite[first : first + each] for first in range(0, len(finite), each)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def lines(title: str, series: Mapping[str, Points]) -> str:
    """A line for each of `series`; "" where none has a point. The names of several are shown in their colours."""
    drawn = {name: found for name, points in series.items() if (found := thinned(points))}
    if not drawn:
        return ""
    every = [point for points in drawn.values() for point in points]
    low_x, high_x = min(x for x, _ in every), max(x for x, _ in every)
    low, high = min(y for _, y in every), max(y for _, y in every)
    if high == low:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - low_x) / (high_x - low_x) if high_x > low_x else 0.5
        return (
            _LEFT + across * (WIDTH - _LEFT - _RIGHT),
            HEIGHT - _BOTTOM - (y - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM),
        )

    parts = [
        f'<text x="{_LEFT}" y="12">{escape(title)}</text>',
        f'<rect class="frame" x="{_LEFT}" y="{_TOP}" width="{WIDTH - _LEFT - _RIGHT}" height="{HEIGHT - _TOP - _BOTTOM}"/>',
        f'<text class="end" x="{_LEFT - 4}" y="{_TOP + 8}">{figure(high)}</text>',
        f'<text class="end" x="{_LEFT - 4}" y="{HEIGHT - _BOTTOM}">{figure(low)}</text>',
        f'<text x="{_LEFT}" y="{HEIGHT - 4}">{figure(low_x)}</text>',
        f'<text class="end" x="{WIDTH - _RIGHT}" y="{HEIGHT - 4}">{figure(high_x)}</text>',
    ]
    for number, (name, points) in enumerate(drawn.items()):
        hue = colour(number, len(drawn))
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
        words = f"{name}: {figure(points[0][1])} at first, {figure(points[-1][1])} at last"
        line = f'<polyline points="{path}" fill="none" stroke="{hue}" stroke-width="1.5"><title>{escape(words)}</title></polyline>'
        x, y = at(*points[-1])
        parts += [line, f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{hue}"/>']
        if len(drawn) > 1:
            place = f'x="{WIDTH - _RIGHT - 4}" y="{_TOP + 12 + 12 * number}"'
            parts.append(f'<text class="end" {place} style="fill: {hue}">{escape(name)}</text>')
    return svg(title, WIDTH, HEIGHT, parts)


def stacked(title: str, columns: Sequence[tuple[float, Mapping[str, float]]], unit: str) -> str:
    """A bar for each column (its place, its parts by name), above a legend; "" without columns."""
    names = list(dict.fromkeys(name for _, parts in columns for name in parts))
    thin = {name: thinned([(place, parts.get(name, 0.0)) for place, parts in columns], 160) for name in names}
    places = [place for place, _ in next(iter(thin.values()), [])]
    if not places:
        return ""
    columns = [
        (place, {name: thin[name][number][1] for name in names}) for number, place in enumerate(places)
    ]
    most = max(sum(parts.values()) for _, parts in columns) or 1.0
    height, width = 200, min(40.0, (WIDE - _LEFT) / len(columns))
    drawn = [
        f'<text class="end" x="{_LEFT - 4}" y="12">{figure(most)} {unit}</text>',
        f'<text class="end" x="{_LEFT - 4}" y="{height}">0</text>',
    ]
    for number, (place, parts) in enumerate(columns):
        bottom, left = float(height), _LEFT + number * width
        for name in names:
            tall = parts[name] / most * (height - 4)
            if tall < 0.05:
                continue
            bottom -= tall
            words = f"step {figure(place)}: {name} {figure(parts[name])} {unit}"
            box = f'x="{left:.1f}" y="{bottom:.1f}" width="{max(width - 1, 0.5):.1f}" height="{tall:.1f}"'
            hue = colour(names.index(name), len(names))
            drawn.append(f'<rect {box} fill="{hue}"><title>{escape(words)}</title></rect>')
    drawn.append(f'<text x="{_LEFT}" y="{height + 14}">step {figure(columns[0][0])}</text>')
    if len(columns) > 1:
        right, below = _LEFT + len(columns) * width, 14 if len(columns) > 3 else 28
        drawn.append(
            f'<text class="end" x="{right:.1f}" y="{height + below}">{figure(columns[-1][0])}</text>'
        )
    return svg(title, WIDE, height + 32, drawn) + legend(names)


def histogram(title: str, values: Sequence[float], bins: int = 30) -> str:
    """How often values lie in each of `bins` even parts of their range; "" without values."""
    if not values:
        return ""
    low, high = min(values), max(values)
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int((value - low) / ((high - low) or 1) * bins))] += 1
    each, tallest, drawn = (WIDTH - _LEFT - _RIGHT) / bins, max(counts), []
    for number, count in enumerate(counts):
        tall = count / tallest * (HEIGHT - _TOP - _BOTTOM)
        box = f'x="{_LEFT + number * each:.1f}" y="{HEIGHT - _BOTTOM - tall:.1f}" width="{each - 1:.1f}" height="{tall:.1f}"'
        begin = low + number * (high - low) / bins
        drawn.append(f'<rect {box} fill="{colour(0, 1)}"><title>{count} from {figure(begin)}</title></rect>')
    drawn += [
        f'<text x="{_LEFT}" y="12">{escape(title)}</text>',
        f'<text class="end" x="{_LEFT - 4}" y="{_TOP + 8}">{tallest}</text>',
        f'<text x="{_LEFT}" y="{HEIGHT - 4}">{figure(low)}</text>',
        f'<text class="end" x="{WIDTH - _RIGHT}" y="{HEIGHT - 4}">{figure(high)}</text>',
    ]
    return svg(title, WIDTH, HEIGHT, drawn)


def rows(title: str, found: Sequence[tuple[str, Sequence[Bar]]], whole: float, names: Sequence[str]) -> str:
    """Rows of bars between 0 and `whole`; a bar's colour is its name's place in `names`. What is shorter than half a pixel
    is left out."""
    left, height = 150, 18
    scale, drawn = (WIDE - left) / whole, []
    for number, (label, bars) in enumerate(found):
        top = number * height + 2
        drawn.append(f'<text x="0" y="{top + 11}">{escape(label)}</text>')
        drawn.append(
            f'<rect class="frame" x="{left}" y="{top}" width="{WIDE - left}" height="{height - 3}"/>'
        )
        for bar in bars:
            begin, end = max(bar.begin, 0.0), min(bar.end, whole)
            if (end - begin) * scale < 0.5:
                continue
            inset = min(3 * bar.depth, height - 6)
            box = f'x="{left + begin * scale:.1f}" y="{top + inset}" width="{(end - begin) * scale:.1f}" height="{height - 3 - inset}"'
            hue = colour(names.index(bar.name), len(names))
            drawn.append(
                f'<rect {box} fill="{hue}" fill-opacity="{max(0.4, 1 - 0.2 * bar.depth):.1f}">'
                f"<title>{escape(bar.words)}</title></rect>"
            )
    return svg(title, WIDE, len(found) * height + 4, drawn)


def legend(names: Sequence[str]) -> str:
    """Each name beside its colour."""
    boxes = (
        f'<span style="color: {colour(number, len(names))}">&#9632;</span> {escape(name)}'
        for number, name in enumerate(names)
    )
    return f'<p class="quiet">{" &nbsp; ".join(boxes)}</p>'


def figure(value: float) -> str:
    """A number as short as can be read."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 10_000 or abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
