"""Plot means with their intervals as an SVG file."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from prompt_r1.terminal import printable_line

HEIGHT = 380
LEFT, TOP, BOTTOM = 52, 62, 46  # margins in pixels
PLOT_WIDTH = 502
PADDING = 14  # between the frame and the first and last x
APART = 4  # pixels between the intervals of two series at the same x
LEGEND_HEIGHT, CHARACTER_WIDTH = 22, 7  # of an entry, and of its letters
MAX_TICKS = 8
# Wong's colour-blind safe colours. Marker and dashes tell series apart without colours.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7a6a00", "#56b4e9", "#555555")
STYLE = """svg { background: #fbfaf7; font: 12px system-ui, sans-serif; } text { fill: #1d1c1a; }
.title { font: 500 17px Georgia, serif; } .muted { fill: #66625a; } .grid { stroke: #e3dfd6; }
@media (prefers-color-scheme: dark) { svg { background: #171614; } text { fill: #ece8df; }
.muted { fill: #a8a297; } .grid { stroke: #37342e; } }"""


@dataclass(frozen=True)
class Point:
    """A mean over `n` questions and its 95 % interval, from 0 to 1."""

    x: float
    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Series:
    """The points of a plot in order, and their label. `joined`: what lies between them was measured too."""

    label: str
    points: Sequence[Point]
    dashed: bool = False
    joined: bool = True


@dataclass(frozen=True)
class Plot:
    """Several series over one x axis, which begins at 0; y runs from 0 to 1."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]


def rate_text(point: Point) -> str:
    """A mean and its interval: 0.953 [0.92, 0.97]."""
    return f"{point.mean:.3f} [{max(0.0, point.low):.2f}, {min(1.0, point.high):.2f}]"


def svg(plot: Plot) -> str:
    """Draw a plot."""
    xs = [point.x for series in plot.series for point in series.points]
    scale = _Scale(max(xs, default=0.0) or 1.0)
    right = LEFT + PLOT_WIDTH
    longest = max((len(series.label) for series in plot.series), default=0)
    width = right + 50 + max(16, longest) * CHARACTER_WIDTH
    height = max(HEIGHT, TOP + LEGEND_HEIGHT * len(plot.series))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{_text(plot.title)}</title><style>{STYLE}</style>",
        f'<text class="title" x="{LEFT - 30}" y="26">{_text(plot.title)}</text>',
        _muted(plot.x_label, right - PADDING, HEIGHT - 8, anchor="end"),
        _muted(plot.y_label, LEFT - 30, TOP - 12, anchor="start"),
    ]
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = scale.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y}" y2="{y}"/>')
        parts.append(_muted(f"{value:g}", LEFT - 8, y + 4, anchor="end"))
    for value in _ticks(scale.highest, whole=all(x == int(x) for x in xs)):
        parts.append(_muted(f"{value:g}", scale.x(value), HEIGHT - BOTTOM + 18, anchor="middle"))
    for number, series in enumerate(plot.series):
        colour = COLOURS[number % len(COLOURS)]
        parts += _draw_series(series, colour, scale, APART * (number - (len(plot.series) - 1) / 2))
        parts += _draw_legend_entry(series, colour, y=TOP + 4 + LEGEND_HEIGHT * number)
    return "\n".join([*parts, "</svg>\n"])


@dataclass(frozen=True)
class _Scale:
    """Converts values to pixels; x runs from 0 to `highest`, y from 0 to 1."""

    highest: float

    def x(self, value: float) -> float:
        return round(LEFT + PADDING + value / self.highest * (PLOT_WIDTH - 2 * PADDING), 1)

    def y(self, value: float) -> float:
        value = min(max(float(value), 0.0), 1.0)  # intervals may be wider
        return round(HEIGHT - BOTTOM - value * (HEIGHT - TOP - BOTTOM), 1)


def _text(text: str) -> str:
    """A text as XML, which cannot hold control characters."""
    return escape(printable_line(text))


def _muted(text: str, x: float, y: float, *, anchor: str) -> str:
    return f'<text class="muted" x="{x}" y="{y}" text-anchor="{anchor}">{_text(text)}</text>'


def _ticks(highest: float, *, whole: bool) -> list[float]:
    """At most MAX_TICKS round steps from 0; whole numbers if all values are."""
    power = math.floor(math.log10(highest)) - 1
    steps = [base * 10.0**exponent for exponent in range(power, power + 3) for base in (1, 2, 5)]
    fitting = [step for step in steps if highest / step <= MAX_TICKS + 0.01 and (step >= 1 or not whole)]
    # A value just below a multiple of the step still gets its tick.
    return [number * fitting[0] for number in range(math.floor(highest / fitting[0] + 0.02) + 1)]


def _draw_series(series: Series, colour: str, scale: _Scale, shift: float) -> list[str]:
    """The line if the points are joined, and each point with its interval and a tooltip."""
    path = " ".join(f"{scale.x(point.x) + shift},{scale.y(point.mean)}" for point in series.points)
    dashes = ' stroke-dasharray="5 4"' if series.dashed else ""
    line = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>'
    parts = [line] if series.joined else []
    for point in series.points:
        x, y = scale.x(point.x) + shift, scale.y(point.mean)
        top, bottom = scale.y(point.high), scale.y(point.low)
        parts.append(f'<line x1="{x}" x2="{x}" y1="{top}" y2="{bottom}" stroke="{colour}" opacity=".7"/>')
        tooltip = _text(f"{series.label}: {point.x:g} → {rate_text(point)}, n = {point.n}")
        parts.append(_marker(series, colour, x, y, f"<title>{tooltip}</title>"))
    return parts


def _marker(series: Series, colour: str, x: float, y: float, inside: str = "") -> str:
    if series.dashed:
        return f'<rect x="{x - 3}" y="{y - 3}" width="6" height="6" fill="{colour}">{inside}</rect>'
    return f'<circle cx="{x}" cy="{y}" r="3.4" fill="{colour}">{inside}</circle>'


def _draw_legend_entry(series: Series, colour: str, *, y: float) -> list[str]:
    x = LEFT + PLOT_WIDTH + 14
    dashes = ' stroke-dasharray="5 4"' if series.dashed else ""
    line = f'<line x1="{x}" x2="{x + 22}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2.2"{dashes}/>'
    sign = line if series.joined else _marker(series, colour, x + 11, y)
    return [sign, f'<text x="{x + 29}" y="{y + 4}">{_text(series.label)}</text>']
