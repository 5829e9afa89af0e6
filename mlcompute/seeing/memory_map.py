"""The picture of an arena: addresses upwards, steps to the right, a rectangle per tensor; above it the bytes in use."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from mlcompute.seeing.charts import nice_ticks
from mlcompute.seeing.units import shape, size, visible

if TYPE_CHECKING:
    from mlcompute.seeing.memory import Allocation, MemoryTimeline

#: Rectangles the picture has at most: the ones that take most room for longest.
MOST_ALLOCATIONS = 600
WIDTH, LEFT, RIGHT = 1090, 66, 10
USE_TOP, USE_HEIGHT, STRIP, MAP_TOP, MAP_HEIGHT = 16, 70, 8, 116, 300
HEIGHT = MAP_TOP + MAP_HEIGHT + 34


@dataclass(frozen=True)
class MemoryPicture:
    """The picture, what it says about each rectangle, and how many tensors were too small to draw."""

    svg: str
    data: list[list[str]]
    hidden: int


def memory_map(timeline: MemoryTimeline) -> MemoryPicture:
    """Draw a timeline."""
    steps, nbytes = max(len(timeline.phases), 1), max(timeline.nbytes, 1)
    per_step, per_byte = (WIDTH - LEFT - RIGHT) / steps, MAP_HEIGHT / nbytes
    shown = sorted(timeline.allocations, key=lambda one: -one.nbytes * (one.last - one.first + 1))[:MOST_ALLOCATIONS]
    shown.sort(key=lambda one: (one.first, one.offset))
    parts = [f'<svg class="chart memory" viewBox="0 0 {WIDTH} {HEIGHT}" role="presentation">']
    parts += _use(timeline, per_step)
    parts += _strip(timeline, per_step)
    for tick in (one for one in nice_ticks(0.0, float(nbytes), 5) if 0 <= one <= nbytes):
        y = MAP_TOP + MAP_HEIGHT - tick * per_byte
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 3.5:.1f}" text-anchor="end">{size(tick)}</text>')
    ends = _handed_over(timeline)
    # Small ones on top of large ones, so that each can be pointed at.
    for index, one in sorted(enumerate(shown), key=lambda item: -item[1].nbytes):
        # Memory taken over in place changes hands in the middle of a step.
        begin = one.first + (0.5 if (one.offset, one.first, "begin") in ends else 0.0)
        end = one.last + (0.5 if (one.offset, one.last, "end") in ends and one.last > one.first else 1.0)
        x, width = LEFT + begin * per_step, max((end - begin) * per_step, 0.8)
        height = max(one.nbytes * per_byte, 1.0)
        y = MAP_TOP + MAP_HEIGHT - (one.offset + one.nbytes) * per_byte
        kept = " kept" if one.kept else ""
        kept += " thin" if min(width, height) < 3 else ""  # an outline would leave nothing of it
        parts.append(
            f'<rect class="{one.phase}{kept}" data-tensor="{index}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" '
            f'height="{height:.2f}"><title>{escape(visible(one.what))}, {size(one.nbytes)}</title></rect>'
        )
    parts += _step_ticks(steps, per_step)
    data = [_facts(one, timeline) for one in shown]
    return MemoryPicture("".join([*parts, "</svg>"]), data, len(timeline.allocations) - len(shown))


def _handed_over(timeline: MemoryTimeline) -> set[tuple[int, int, str]]:
    """(offset, step, side) of allocations that end or begin where memory is taken over within a step."""
    ending = {(one.offset, one.last): one for one in timeline.allocations if one.first < one.last}
    found: set[tuple[int, int, str]] = set()
    for one in timeline.allocations:
        before = ending.get((one.offset, one.first))
        if before is not None and before is not one:
            found |= {(one.offset, one.first, "begin"), (one.offset, one.first, "end")}
    return found


def _use(timeline: MemoryTimeline, per_step: float) -> list[str]:
    """Bytes in use as a staircase, with a mark at its highest step."""
    if not timeline.live:
        return []
    most, bottom = max(timeline.live) or 1, USE_TOP + USE_HEIGHT
    points = []
    for live, group in itertools.groupby(enumerate(timeline.live), key=lambda item: item[1]):
        run = list(group)
        y = bottom - live / most * USE_HEIGHT
        points += [(LEFT + run[0][0] * per_step, y), (LEFT + (run[-1][0] + 1) * per_step, y)]
    outline = " ".join(f"{x:.1f},{y:.1f}" for x, y in [(LEFT, bottom), *points, (points[-1][0], bottom)])
    x = LEFT + (timeline.peak + 0.5) * per_step
    anchor, shift = ("end", -6) if x > WIDTH / 2 else ("start", 6)
    where = escape(visible(timeline.layers[timeline.peak]))
    return [
        f'<polygon class="use" points="{outline}"/>',
        f'<text class="tick" x="{LEFT - 8}" y="{USE_TOP + 8}" text-anchor="end">in use</text>',
        f'<line class="peak" x1="{x:.1f}" x2="{x:.1f}" y1="{USE_TOP}" y2="{bottom}"/>',
        f'<text class="tick" x="{x + shift:.1f}" y="{USE_TOP - 4}" text-anchor="{anchor}">most: {size(most)}, '
        f"step {timeline.peak}, {where}</text>",
    ]


def _strip(timeline: MemoryTimeline, per_step: float) -> list[str]:
    """Which pass each step belongs to."""
    parts, y = [], MAP_TOP - STRIP - 8
    parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + STRIP}" text-anchor="end">pass</text>')
    for phase, group in itertools.groupby(enumerate(timeline.phases), key=lambda item: item[1]):
        run = list(group)
        x, width = LEFT + run[0][0] * per_step, len(run) * per_step
        parts.append(
            f'<rect class="strip {phase}" x="{x:.2f}" y="{y}" width="{max(width, 0.6):.2f}" height="{STRIP}">'
            f"<title>{phase}</title></rect>"
        )
    return parts


def _step_ticks(steps: int, per_step: float) -> list[str]:
    y = MAP_TOP + MAP_HEIGHT + 16
    ticks = [tick for tick in nice_ticks(0.0, float(steps), 8) if tick < steps and tick == int(tick)]
    parts = [
        f'<text class="tick" x="{LEFT + (tick + 0.5) * per_step:.1f}" y="{y}" text-anchor="middle">{tick:.0f}</text>'
        for tick in ticks
    ]
    return [*parts, f'<text class="tick" x="{WIDTH - RIGHT}" y="{y + 14}" text-anchor="end">step of the program</text>']


def _facts(one: Allocation, timeline: MemoryTimeline) -> list[str]:
    """What the page shows of a tensor: heading, type, size, place, time."""
    kept = ", readable after the run" if one.kept else ""
    written = f"step {one.first}: {timeline.ops[one.first]} ({timeline.layers[one.first]})"
    last = "the end" if one.kept else f"step {one.last}: {timeline.ops[one.last]} ({timeline.layers[one.last]})"
    lives = f"{written}, until {last}" if one.kept or one.last > one.first else f"during {written}"
    return [
        one.what,
        f"{one.dtype} {shape(one.shape)}",
        f"{size(one.nbytes)} ({one.nbytes:,} bytes)",
        f"bytes {one.offset:,} to {one.offset + one.nbytes - 1:,}{kept}",
        lives,
    ]
