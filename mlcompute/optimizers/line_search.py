"""A step length that meets the strong Wolfe conditions, found by cubic interpolation.

f(t) <= f(0) + c1 t f'(0)   and   |f'(t)| <= c2 |f'(0)|      (Nocedal and Wright, Numerical Optimization, section 3.5)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mlcompute.ops.op import Array

_C1, _C2 = 1e-4, 0.9


@dataclass(frozen=True)
class Point:
    """A point on the line: how far along it lies, the loss there, its gradient, and the slope along the line."""

    step: float
    loss: float
    gradient: Array
    slope: float


def strong_wolfe(
    evaluate: Callable[[float], Point], start: Point, step: float, tolerance: float, most: int
) -> tuple[Point, int]:
    """The point to go to, and how many were looked at.

    step       where to look first
    tolerance  a bracket in which no parameter moves further than this is not divided any more: in units of `step`
    most       how many points may be looked at beyond the first
    """
    before, now, count = start, evaluate(step), 1
    bracket: list[Point] | None = None
    while count <= most:
        if _is_too_high(now, start) or (count > 2 and now.loss >= before.loss):
            bracket = [before, now]
            break
        if abs(now.slope) <= -_C2 * start.slope:
            return now, count
        if now.slope >= 0.0:
            bracket = [before, now]
            break
        bounds = now.step + 0.01 * (now.step - before.step), now.step * 10.0
        before, now = now, evaluate(cubic_minimum(before, now, bounds))
        count += 1
    if bracket is None:
        return min(start, now, key=lambda point: point.loss), count
    return _zoom(evaluate, start, bracket, tolerance, count, most)


def _zoom(
    evaluate: Callable[[float], Point], start: Point, bracket: list[Point], tolerance: float, count: int, most: int
) -> tuple[Point, int]:
    """Divide a bracket that holds such a point until it is found."""
    low, high = sorted(bracket, key=lambda point: point.loss)
    was_near = False
    while count <= most and abs(high.step - low.step) >= tolerance:
        least, greatest = sorted((low.step, high.step))
        left, right = sorted((low, high), key=lambda point: point.step)
        step = cubic_minimum(left, right, (least, greatest))
        margin = 0.1 * (greatest - least)
        is_near = min(greatest - step, step - least) < margin
        if is_near and (was_near or not least < step < greatest):
            # Close to an end twice: interpolation makes no progress there.
            step = greatest - margin if abs(step - greatest) < abs(step - least) else least + margin
            is_near = False
        was_near = is_near
        now = evaluate(step)
        count += 1
        if _is_too_high(now, start) or now.loss >= low.loss:
            high = now
            continue
        if abs(now.slope) <= -_C2 * start.slope:
            return now, count
        if now.slope * (high.step - low.step) >= 0.0:
            high = low
        low = now
    return low, count


def _is_too_high(point: Point, start: Point) -> bool:
    return not point.loss <= start.loss + _C1 * point.step * start.slope  # NaN is too high


def cubic_minimum(a: Point, b: Point, bounds: tuple[float, float]) -> float:
    """Where the cubic through two points with their slopes is smallest, within bounds; else their middle."""
    d1 = a.slope + b.slope - 3.0 * (a.loss - b.loss) / (a.step - b.step)
    squared = d1 * d1 - a.slope * b.slope
    if not squared >= 0.0 or not math.isfinite(squared):
        return (bounds[0] + bounds[1]) / 2.0
    d2 = math.sqrt(squared)
    below = b.slope - a.slope + 2.0 * d2
    if below == 0.0:
        return (bounds[0] + bounds[1]) / 2.0
    found = b.step - (b.step - a.step) * ((b.slope + d2 - d1) / below)
    return float(np.clip(found, *bounds))
