"""Draws a picture from its description, such as process.txt: prints the SVG."""

import sys
from html import escape

LINE = 17
HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0} {1}" font-family="system-ui, sans-serif" font-size="14">
  <style>
    .box, .area {{ fill: #fff; stroke: #444; stroke-width: 1.5; }}
    .frame {{ fill: #f6f4ee; stroke: #b08d2f; stroke-width: 2; }}
    .guest {{ fill: #fdf3d0; stroke: #b08d2f; stroke-width: 1.5; }}
    .title {{ font-weight: 600; }}
    .small {{ font-size: 12px; fill: #444; }}
    .arrow {{ stroke: #444; stroke-width: 1.5; fill: none; marker-end: url(#head); }}
  </style>
  <defs>
    <marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">\
<path d="M0 0L8 4L0 8z" fill="#444"/></marker>
  </defs>
  <rect width="{0}" height="{1}" fill="#fff"/>"""


def shape(kind: str, place: list[int], lines: list[str]) -> str:
    """Returns a rectangle with its texts."""
    x, y, width, height = place
    parts = [f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>']
    is_centered = kind in ("box", "guest")
    left, anchor = (x + width // 2, ' text-anchor="middle"') if is_centered else (x + 14, "")
    first = y + (height - (len(lines) - 1) * LINE) // 2 + 5 if is_centered else y + 24
    for number, line in enumerate(lines):
        style = "small" if number else "plain" if kind == "guest" else "title"
        text = escape(line, quote=False)
        parts.append(f'<text class="{style}" x="{left}" y="{first + number * LINE}"{anchor}>{text}</text>')
    return "".join(parts)


def arrow(x: int, y: int, direction: str, length: int) -> str:
    """Returns an arrow that ends at its head."""
    end = f"H{x + length}" if direction == "right" else f"V{y + length}"
    return f'<path class="arrow" d="M{x} {y}{end}"/>'


def draw(description: str) -> str:
    """Returns the SVG of a description."""
    drawn = []
    for line in description.splitlines():
        if not line or line.startswith("#"):
            continue
        place, _, texts = line.partition(": ")
        kind, *numbers = place.split()
        if kind == "size":
            drawn.append(HEAD.format(*numbers))
        elif kind == "arrow":
            x, y, direction, length = numbers
            drawn.append("  " + arrow(int(x), int(y), direction, int(length)))
        else:
            drawn.append("  " + shape(kind, [int(number) for number in numbers], texts.split(" | ")))
    return "\n".join([*drawn, "</svg>"])


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        print(draw(file.read()))
