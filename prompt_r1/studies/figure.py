"""A study's result: points with intervals, as an SVG plot and as a Markdown table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor

WIDTH, HEIGHT = 720, 380
LEFT, RIGHT, TOP, BOTTOM = 52, 166, 62, 46  # the legend stands at the right
APART = 4  # pixels between the whiskers of two series at the same x
# Wong's colour-blind safe colours; the shapes tell the series apart in grey.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7a6a00", "#56b4e9", "#555555")
STYLE = """svg { background: #fbfaf7; font: 12px system-ui, sans-serif; } text { fill: #1d1c1a; }
.title { font: 500 17px Georgia, serif; } .muted { fill: #66625a; } .grid { stroke: #e3dfd6; }
@media (prefers-color-scheme: dark) { svg { background: #171614; } text { fill: #ece8df; }
.muted { fill: #a8a297; } .grid { stroke: #37342e; } }"""


@dataclass(frozen=True)
class Point:
    """A mean over `n` questions and its 95 % interval."""

    x: float
    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Series:
    """A line of a plot: its points in order, and its label."""

    label: str
    points: Sequence[Point]
    dashed: bool = False


@dataclass(frozen=True)
class Study:
    """What `python -m prompt_r1.studies` writes: NAME.svg and NAME.md."""

    name: str
    title: str
    claim: str  # the paper's sentence
    x_label: str
    y_label: str
    series: Sequence[Series]
    table: str  # Markdown
    notes: Sequence[str]

    def markdown(self) -> str:
        """The claim, the plot, the table and how the numbers were made."""
        notes = "\n".join(f"- {note}" for note in self.notes)
        plot = f"![{self.title}]({self.name}.svg)"
        return f"# {self.title}\n\n> {self.claim}\n\n{plot}\n\n{self.table}\n\n{notes}\n"


def cell(point: Point) -> str:
    """0.953 [0.92, 0.97]"""
    return f"{point.mean:.3f} [{max(0.0, point.low):.2f}, {min(1.0, point.high):.2f}]"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column is text, the others are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def svg(study: Study) -> str:
    """The plot, y from 0 to 1; one file that loads nothing."""
    xs = [point.x for series in study.series for point in series.points]
    low, high = min(xs), max(xs)
    inner = LEFT + 14, WIDTH - RIGHT - 14

    def place(x: float, y: float) -> Place:
        share = (x - low) / (high - low) if high > low else 0.5
        height = HEIGHT - BOTTOM - min(1.0, max(0.0, y)) * (HEIGHT - TOP - BOTTOM)
        return Place(round(inner[0] + share * (inner[1] - inner[0]), 1), round(height, 1))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(study.title)}</title><style>{STYLE}</style>",
        f'<text class="title" x="{LEFT - 30}" y="26">{escape(study.title)}</text>',
        _text(study.x_label, inner[1], HEIGHT - 8, "end"),
        _text(study.y_label, LEFT - 8, TOP - 12, "end"),
    ]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = place(low, tick).y
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(_text(f"{tick:g}", LEFT - 8, y + 4, "end"))
    for tick in _ticks(low, high, whole=all(x == int(x) for x in xs)):
        parts.append(_text(f"{tick:g}", place(tick, 0).x, HEIGHT - BOTTOM + 18, "middle"))
    for number, series in enumerate(study.series):
        colour, shift = COLOURS[number % len(COLOURS)], APART * (number - (len(study.series) - 1) / 2)
        parts += _draw(series, colour, place, shift)
        parts += _key(series, colour, y=TOP + 4 + 22 * number)
    return "\n".join([*parts, "</svg>\n"])


@dataclass(frozen=True)
class Place:
    """Pixels from the left and from the top."""

    x: float
    y: float


def _text(text: str, x: float, y: float, anchor: str) -> str:
    return f'<text class="muted" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _ticks(low: float, high: float, *, whole: bool) -> list[float]:
    steps = [step for step in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500) if step >= 1 or not whole]
    step = next((step for step in steps if (high - low) / step <= 8.01), high - low)
    first = ceil(low / step - 1e-9)
    return [round((first + n) * step, 6) for n in range(floor(high / step + 0.02) - first + 1)]


def _draw(series: Series, colour: str, place: Callable[[float, float], Place], shift: float) -> list[str]:
    """The line with its points; each point tells its numbers when it is pointed at."""
    dashes = ' stroke-dasharray="5 4"' if series.dashed else ""
    places = [place(point.x, point.mean) for point in series.points]
    path = " ".join(f"{at.x + shift},{at.y}" for at in places)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>']
    for point, at in zip(series.points, places, strict=True):
        x, top, bottom = at.x + shift, place(point.x, point.high).y, place(point.x, point.low).y
        told = escape(f"{series.label}: {point.x:g} → {cell(point)}, n = {point.n}")
        box = f'<rect x="{x - 3}" y="{at.y - 3}" width="6" height="6" fill="{colour}">'
        dot = f'<circle cx="{x}" cy="{at.y}" r="3.4" fill="{colour}">'
        parts.append(f'<line x1="{x}" x2="{x}" y1="{top}" y2="{bottom}" stroke="{colour}" opacity=".7"/>')
        mark, name = (box, "rect") if series.dashed else (dot, "circle")
        parts.append(f"{mark}<title>{told}</title></{name}>")
    return parts


def _key(series: Series, colour: str, *, y: float) -> list[str]:
    x = WIDTH - RIGHT + 14
    dashes = ' stroke-dasharray="5 4"' if series.dashed else ""
    line = f'<line x1="{x}" x2="{x + 22}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2.2"{dashes}/>'
    return [line, f'<text x="{x + 29}" y="{y + 4}">{escape(series.label)}</text>']
