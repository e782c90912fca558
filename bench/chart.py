"""The chart of docs/performance.md: an SVG that reads on a light and on a dark page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .rounds import Ratio

WIDTH = 840
LEFT = 190
"""Where the bars begin, behind the names."""
RIGHT = 70
"""Room for a value behind the longest bar."""
BAR = 14
STEP = 20
HEADING = 34
TOP = 56
BOTTOM = 34

CUT = 2.5
"""Longer bars are cut off here, so that the others can be told apart; their value is written."""

STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328 }
.heading { font-weight: 600 }
.faint { fill: #59636e }
.grid { stroke: #d1d9e0 }
.plain { stroke: #59636e; stroke-width: 1.5 }
.bar { fill: #afb8c1 }
.ours { fill: #0969da }
.range { stroke: #1f2328; stroke-opacity: .55 }
.limit { stroke: #cf222e; stroke-width: 2 }
.end { fill: #ffffff }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc }
  .faint { fill: #9198a1 }
  .grid { stroke: #3d444d }
  .plain { stroke: #9198a1 }
  .bar { fill: #656c76 }
  .ours { fill: #4493f8 }
  .range { stroke: #f0f6fc; stroke-opacity: .6 }
  .limit { stroke: #f85149 }
  .end { fill: #0d1117 }
}
"""


@dataclass(frozen=True)
class Bar:
    """A contestant's CPU time as a multiple of plain Envoy's."""

    name: str
    ratio: Ratio
    is_ours: bool


@dataclass(frozen=True)
class Group:
    """A workload. `limit`: what the guard may take at the most, as a multiple of plain Envoy's."""

    name: str
    bars: Sequence[Bar]
    limit: float | None


def draw(groups: Sequence[Group]) -> str:
    """The chart's text."""
    height = TOP + sum(HEADING + STEP * len(group.bars) for group in groups) + BOTTOM
    title = "CPU time of Envoy as a multiple of plain Envoy's"
    box = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" aria-label="{title}">',
        f"<style>{STYLE}</style>",
        text(0, 16, title, "heading"),
        text(
            0, 34, "for each unit of work; median, and range of the rounds; less is better", "faint"
        ),
        *_legend(),
    ]
    bottom = height - BOTTOM
    for tenth in range(0, int(CUT * 10) + 1, 5):
        x = _x(tenth / 10)
        kind = "plain" if tenth == 10 else "grid"
        parts.append(line(x, TOP, x, bottom, kind))
        label = "plain" if tenth == 10 else f"{tenth / 10:g}×"
        parts.append(text(x, bottom + 18, label, "faint", "middle"))
    y = TOP
    for group in groups:
        parts.append(text(0, y + 22, group.name, "heading"))
        y += HEADING
        for bar in group.bars:
            parts.extend(_bar(bar, y, group.limit))
            y += STEP
    return "\n".join([*parts, "</svg>\n"])


def _legend() -> list[str]:
    return [
        text(WIDTH - 12, 34, "the most that the guard may take", "faint", "end"),
        line(WIDTH - 4, 23, WIDTH - 4, 37, "limit"),
    ]


def _bar(bar: Bar, y: float, limit: float | None) -> list[str]:
    kind = "ours" if bar.is_ours else "bar"
    end = _x(min(bar.ratio.median, CUT))
    parts = [
        text(LEFT - 10, y + 11, bar.name, "heading" if bar.is_ours else "", "end"),
        f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{end - LEFT:.1f}" height="{BAR}" rx="2"/>',
    ]
    if bar.ratio.median > CUT:
        # Two strokes across the bar: it goes on.
        parts += [
            f'<path class="end" d="M{end - shift:.1f} {y - 1} l4 0 l-6 {BAR + 2} l-4 0 z"/>'
            for shift in (18, 28)
        ]
        label = end + 6
    else:
        middle = y + BAR / 2
        most = _x(min(bar.ratio.most, CUT))
        parts.append(line(_x(bar.ratio.least), middle, most, middle, "range"))
        label = max(end, most) + 6
    if bar.is_ours and limit is not None and limit <= CUT:
        parts.append(line(_x(limit), y - 3, _x(limit), y + BAR + 3, "limit"))
        if label - 8 < _x(limit) < label + 30:
            label = _x(limit) + 6
    parts.append(text(label, y + 11, f"{bar.ratio.median:.2f}", "heading" if bar.is_ours else ""))
    return parts


def _x(ratio: float) -> float:
    return LEFT + ratio / CUT * (WIDTH - LEFT - RIGHT)


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A stroke."""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def text(x: float, y: float, says: str, kind: str = "", anchor: str = "start") -> str:
    """Words, with their left end (or `anchor`) there."""
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(says)}</text>'
