"""Quality against cost as one SVG file: a point a system, its interval as a bar."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 860, 440
LEFT, RIGHT, TOP, BOTTOM = 60, 300, 24, 52  # margins; the names stand right of their points


@dataclass(frozen=True)
class Point:
    """`cost` of a question; `quality` and its interval from 0 to 1."""

    name: str
    cost: float
    quality: float
    low: float
    high: float


def cost_plot(points: Sequence[Point], *, cost_label: str, quality_label: str) -> str:
    """The picture. A cost of 0 (a system that calls nobody) stands at the left edge."""
    step = _step(max((point.cost for point in points), default=0.0) or 1.0)
    most = step * math.ceil((max((point.cost for point in points), default=0.0) or 1.0) / step)

    def x(cost: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * cost / most

    def y(quality: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * quality

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for number in range(6):
        height = y(number / 5)
        parts.append(_line(LEFT, height, WIDTH - RIGHT, height, "#ddd"))
        parts.append(_text(LEFT - 8, height + 4, f"{20 * number}", anchor="end"))
    for number in range(round(most / step) + 1):
        parts.append(_text(x(number * step), HEIGHT - BOTTOM + 18, f"{number * step:g}", anchor="middle"))
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts.append(_text(middle, HEIGHT - 12, cost_label, anchor="middle"))
    parts.append(_text(LEFT, TOP - 8, quality_label))
    heights = _spread([y(point.quality) + 4 for point in points])
    for point, height in zip(points, heights, strict=True):
        place = x(point.cost)
        parts.append(_line(place, y(point.low), place, y(point.high), "#888"))
        parts.append(f'<circle cx="{place:.1f}" cy="{y(point.quality):.1f}" r="4" fill="#0a58a8"/>')
        parts.append(_line(place + 5, y(point.quality), place + 12, height - 4, "#bbb"))
        parts.append(_text(place + 14, height, f"{point.name}  {100 * point.quality:.1f}"))
    return "\n".join([*parts, "</svg>", ""])


def _step(most: float) -> float:
    """A round number that divides the axis into 4 to 10 parts."""
    power = 10.0 ** math.floor(math.log10(most))
    return next(power * part for part in (0.1, 0.2, 0.25, 0.5) if most / (power * part) <= 10)


def _spread(heights: Sequence[float]) -> list[float]:
    """The heights, moved down until no two names overlap."""
    placed: dict[int, float] = {}
    lowest = -math.inf
    for index in sorted(range(len(heights)), key=lambda index: heights[index]):
        lowest = max(heights[index], lowest + 14)
        placed[index] = lowest
    # What fell off the picture moves up with all that it pushes.
    limit = float(HEIGHT - BOTTOM + 4)
    for index in sorted(placed, key=lambda index: -placed[index]):
        placed[index] = min(placed[index], limit)
        limit = placed[index] - 14
    return [placed[index] for index in range(len(heights))]


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
