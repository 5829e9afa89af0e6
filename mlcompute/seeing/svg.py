"""The graph as an SVG picture: boxes, curved arrows, light and dark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from mlcompute.seeing.diagram import Box, Diagram
from mlcompute.seeing.layout import Layout, lay_out
from mlcompute.seeing.units import cut, visible

#: Boxes of layers a picture has at most; longer graphs show groups of layers as one box.
MOST_BOXES = 120
MARGIN = 12.0
HEIGHT = 42.0
LONGEST = 30

#: Colours that stand out from light and from dark paper alike; boxes are filled with a breath of them.
FAMILIES = {
    "input": "#7d8590",
    "weights": "#3b82d8",
    "map": "#2f9e7a",
    "move": "#9a7fd1",
    "loss": "#d9694a",
    "group": "#7d8590",
}
FAMILY_MEANINGS = {
    "input": "fed data",
    "weights": "learns parameters",
    "map": "activation",
    "move": "other layer",
    "loss": "loss",
    "group": "several layers",
}

# All lines and letters take the colour of the text around the picture.
_STYLE = """
.mlc-graph{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif}
.mlc-graph text{fill:currentColor;text-anchor:middle}
.mlc-graph .b{font-size:12.5px;font-weight:600}
.mlc-graph .d{font-size:11px;opacity:.72}
.mlc-graph .a{fill:none;stroke:currentColor;stroke-opacity:.45;stroke-width:1.3}
.mlc-graph .stopped{stroke-dasharray:4 4}
.mlc-graph .h{fill:currentColor;fill-opacity:.5}
""" + "".join(
    f".mlc-graph .{name} .o{{fill:{colour};fill-opacity:.13;stroke:{colour};stroke-width:1.3}}\n"
    for name, colour in FAMILIES.items()
)
_ALONE = """
.mlc-graph{color:#1f2328}.mlc-graph .paper{fill:#fff}
@media (prefers-color-scheme:dark){.mlc-graph{color:#e6edf3}.mlc-graph .paper{fill:#14171c}}
"""


@dataclass(frozen=True)
class Drawing:
    """Options of a picture.

    alone       with its own paper and colours, for a file; otherwise it takes those of the page it stands in
    attributes  further attributes for the group element of a box
    """

    alone: bool = True
    attributes: Callable[[int, Box], str] = lambda index, box: ""


def draw(diagram: Diagram, title: str, drawing: Drawing | None = None) -> str:
    """The picture as text of an SVG element."""
    drawing = drawing or Drawing()
    sizes = [(_width(box), HEIGHT) for box in diagram.boxes]
    layout = lay_out(sizes, [(arrow.source, arrow.target) for arrow in diagram.arrows])
    width, height = max(layout.width, 40.0) + 2 * MARGIN, max(layout.height, 20.0) + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="mlc-graph" role="img" width="{width:.0f}" '
        f'height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}">',
        f"<title>{escape(visible(title))}</title><style>{_STYLE}{_ALONE if drawing.alone else ''}</style>",
    ]
    if drawing.alone:
        parts.append(f'<rect class="paper" width="{width:.0f}" height="{height:.0f}"/>')
    parts.append(f'<g transform="translate({MARGIN:.0f},{MARGIN:.0f})">')
    parts += _arrows(diagram, layout, [width for width, _ in sizes])
    for index, box in enumerate(diagram.boxes):
        parts.append(_box(box, layout.x[index], layout.y[index], sizes[index][0], drawing.attributes(index, box)))
    return "".join([*parts, "</g></svg>"])


def _box(box: Box, x: float, y: float, width: float, attributes: str) -> str:
    left, top = x - width / 2, y - HEIGHT / 2
    radius = HEIGHT / 2 if box.family == "input" else 6
    second = ""
    if box.family == "group":  # a second sheet behind the first: there is more than one
        right, bottom = left + width, top + HEIGHT
        second = f'<path class="o" d="M{right} {top + 8}h4V{bottom + 4}H{left + 8}v-4H{right}z"/>'
    full = f"{box.label}\n{box.detail}"
    return (
        f'<g class="{box.family}"{attributes}><title>{escape(visible(full))}</title>{second}'
        f'<rect class="o" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{HEIGHT}" rx="{radius}"/>'
        f'<text class="b" x="{x:.1f}" y="{y - 3:.1f}">{escape(visible(cut(box.label, LONGEST)))}</text>'
        f'<text class="d" x="{x:.1f}" y="{y + 12:.1f}">{escape(visible(cut(box.detail, LONGEST + 12)))}</text></g>'
    )


def _arrows(diagram: Diagram, layout: Layout, widths: list[float]) -> list[str]:
    """Arrows leave a box below and arrive at another from above, side by side where there are many."""
    starts = _ports(layout, [(a.source, a.target) for a in diagram.arrows], widths, leaving=True)
    ends = _ports(layout, [(a.source, a.target) for a in diagram.arrows], widths, leaving=False)
    parts = []
    for arrow in diagram.arrows:
        edge = (arrow.source, arrow.target)
        points = [
            (starts[edge], layout.y[arrow.source] + HEIGHT / 2),
            *layout.bends[edge],
            (ends[edge], layout.y[arrow.target] - HEIGHT / 2 - 5),
        ]
        kind = "a stopped" if arrow.stopped else "a"
        x, y = points[-1]
        parts.append(f'<path class="{kind}" d="{_curve(points)}"/>')
        parts.append(f'<path class="h" d="M{x - 3.5:.1f} {y - 2:.1f}h7L{x:.1f} {y + 5:.1f}z"/>')
    return parts


def _ports(
    layout: Layout, edges: list[tuple[int, int]], widths: list[float], *, leaving: bool
) -> dict[tuple[int, int], float]:
    """Where along its box each arrow begins or ends."""
    sides: dict[int, list[tuple[int, int]]] = {}
    for edge in dict.fromkeys(edges):
        sides.setdefault(edge[0 if leaving else 1], []).append(edge)
    found = {}
    for box, attached in sides.items():

        def there(edge: tuple[int, int]) -> float:
            bends = layout.bends[edge]
            return (bends[0] if leaving else bends[-1])[0] if bends else layout.x[edge[1 if leaving else 0]]

        ordered = sorted(attached, key=there)
        space = min(16.0, widths[box] / (len(ordered) + 1))
        straight = [number for number, edge in enumerate(ordered) if abs(there(edge) - layout.x[box]) < 1.0]
        # One that could run straight down does; the others stand beside it.
        middle = float(straight[0]) if len(straight) == 1 else (len(ordered) - 1) / 2
        for number, edge in enumerate(ordered):
            found[edge] = layout.x[box] + (number - middle) * space
    return found


def _curve(points: list[tuple[float, float]]) -> str:
    """Through all points, vertical at each of them."""
    x, y = points[0]
    parts = [f"M{x:.1f} {y:.1f}"]
    for next_x, next_y in points[1:]:
        if abs(next_x - x) < 0.5:
            parts.append(f"L{next_x:.1f} {next_y:.1f}")
        else:
            half = (y + next_y) / 2
            parts.append(f"C{x:.1f} {half:.1f} {next_x:.1f} {half:.1f} {next_x:.1f} {next_y:.1f}")
        x, y = next_x, next_y
    return "".join(parts)


def _width(box: Box) -> float:
    label, detail = visible(cut(box.label, LONGEST)), visible(cut(box.detail, LONGEST + 12))
    return max(84.0, text_width(label, 12.5) * 1.14 + 28, text_width(detail, 11.0) + 28)


def shortened(text: str, width: float, size: float) -> str:
    """The text, or as much of its beginning as fits, and an ellipsis."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(text + "…", size) > width:
        text = text[:-1]
    return text + "…"


def text_width(text: str, size: float) -> float:
    """About how wide a text is, whatever sans-serif font it is set in."""
    width = 0.0
    for letter in text:
        if letter in "iljtfI.,:;'|!()[] ":
            width += 0.34
        elif letter in "mwMW…":
            width += 0.92
        elif ord(letter) >= 0x1100:
            width += 1.05  # Chinese, Japanese and Korean letters are square
        else:
            width += 0.67 if letter.isupper() else 0.57
    return width * size
