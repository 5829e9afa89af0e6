"""Where boxes go: rows by longest path, few crossings within them, straight lines between them.

The steps are Sugiyama's: every box gets a row, long arrows get a bend point in each row they pass, boxes and bends
are ordered by the mean place of their neighbours, and are then moved towards them as far as their row allows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

Edge = tuple[int, int]

#: Space between neighbours in a row, and between rows.
GAP_X, GAP_Y = 28.0, 34.0
#: Room an arrow needs beside a box.
BEND_WIDTH = 14.0
SWEEPS = 8


@dataclass
class Layout:
    """Centres of the boxes, the points each edge passes between its ends, and the size of it all."""

    x: list[float]
    y: list[float]
    bends: dict[Edge, list[tuple[float, float]]]
    width: float
    height: float


def lay_out(sizes: Sequence[tuple[float, float]], edges: Sequence[Edge]) -> Layout:
    """Place boxes of given (width, height); every edge leads from a lower to a higher index."""
    if not sizes:
        return Layout([], [], {}, 0.0, 0.0)
    rows = _rows(len(sizes), edges)
    widths = [width for width, _ in sizes]
    links: list[tuple[int, int]] = []  # (upper, lower) in neighbouring rows
    paths: dict[Edge, list[int]] = {}
    for source, target in dict.fromkeys(edges):
        path = [source]
        for row in range(rows[source] + 1, rows[target]):
            path.append(len(widths))
            widths.append(BEND_WIDTH)
            rows.append(row)
        path.append(target)
        paths[source, target] = path[1:-1]
        links += itertools.pairwise(path)
    order = _ordered(rows, links)
    x = _places(order, widths, links, len(sizes))
    _straighten(x, order, widths, paths)
    left = min(place - width / 2 for place, width in zip(x, widths, strict=True))
    x = [place - left for place in x]
    right = max(place + width / 2 for place, width in zip(x, widths, strict=True))
    y, tops, bottoms, total = [0.0] * len(sizes), [], [], 0.0
    for items in order:
        height = max((sizes[item][1] for item in items if item < len(sizes)), default=0.0)
        tops.append(total)
        bottoms.append(total + height)
        for item in items:
            if item < len(sizes):
                y[item] = total + height / 2
        total += height + GAP_Y
    # An arrow passes a row from its upper to its lower end, so that it keeps clear of the boxes beside it.
    bends = {
        edge: [(x[item], side[rows[item]]) for item in path for side in (tops, bottoms)] for edge, path in paths.items()
    }
    return Layout(x[: len(sizes)], y, bends, right, total - GAP_Y)


def _rows(count: int, edges: Sequence[Edge]) -> list[int]:
    """Longest path from above; then what has no sources moves down to just above what needs it."""
    rows = [0] * count
    for source, target in sorted(edges):
        rows[target] = max(rows[target], rows[source] + 1)
    has_source = {target for _, target in edges}
    below: dict[int, int] = {}
    for source, target in edges:
        below[source] = min(below.get(source, rows[target]), rows[target])
    for item in range(count):
        if item not in has_source and item in below:
            rows[item] = below[item] - 1
    return rows


def _ordered(rows: list[int], links: list[Edge]) -> list[list[int]]:
    """Items of each row from left to right, by the mean place of their neighbours above, then below, and so on."""
    order: list[list[int]] = [[] for _ in range(max(rows) + 1)]
    for item, row in enumerate(rows):
        order[row].append(item)
    above, below = _neighbours(links)
    best, fewest = [list(row) for row in order], _crossings(order, links)
    for sweep in range(SWEEPS):
        neighbours = above if sweep % 2 == 0 else below
        place = {item: float(index) for items in order for index, item in enumerate(items)}
        for items in order if sweep % 2 == 0 else reversed(order):
            wanted = {item: _mean([place[other] for other in neighbours.get(item, ())], place[item]) for item in items}
            items.sort(key=wanted.__getitem__)
            place.update({item: float(index) for index, item in enumerate(items)})
        found = _crossings(order, links)
        if found < fewest:
            best, fewest = [list(row) for row in order], found
        if not fewest:
            break
    return best


def _neighbours(links: list[Edge]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Of every item: those it is linked to above it, and below it."""
    above: dict[int, list[int]] = {}
    below: dict[int, list[int]] = {}
    for upper, lower in links:
        above.setdefault(lower, []).append(upper)
        below.setdefault(upper, []).append(lower)
    return above, below


def _mean(numbers: list[float], default: float) -> float:
    return sum(numbers) / len(numbers) if numbers else default


def _crossings(order: list[list[int]], links: list[Edge]) -> int:
    """Pairs of links between the same rows that cross."""
    place = {item: (number, index) for number, row in enumerate(order) for index, item in enumerate(row)}
    between: dict[int, list[tuple[int, int]]] = {}
    for upper, lower in links:
        row, first = place[upper]
        between.setdefault(row, []).append((first, place[lower][1]))
    return sum(
        (a[0] - b[0]) * (a[1] - b[1]) < 0
        for pairs in between.values()
        for index, a in enumerate(pairs)
        for b in pairs[:index]
    )


def _places(order: list[list[int]], widths: list[float], links: list[Edge], boxes: int) -> list[float]:
    """Down and up again, every item goes as near as it can to those it hangs on: chains become straight."""
    x = [0.0] * len(widths)
    for row in order:
        start = -(sum(widths[item] for item in row) + GAP_X * (len(row) - 1)) / 2
        for item in row:
            x[item] = start + widths[item] / 2
            start += widths[item] + GAP_X
    above, below = _neighbours(links)

    def matters(item: int, other: int) -> int:
        """Boxes in the flow come first, then those that only feed one of them, then arrows that pass."""
        if other >= boxes:
            return 0 if item < boxes else 3
        return 2 if other in above or other not in below else 1

    for sweep in range(SWEEPS + 1):
        down = sweep % 2 == 0
        near = above if down else below
        for row in order if down else reversed(order):
            wanted = []
            for item in row:
                others = near.get(item, [])
                most = max((matters(item, other) for other in others), default=0)
                wanted.append(_mean([x[other] for other in others if matters(item, other) == most], x[item]))
            # A box holds its ground against arrows that pass by.
            weights = [1e9 if item < boxes and item in near else 1.0 for item in row]
            for item, place in zip(row, _spread(wanted, weights, [widths[item] for item in row]), strict=True):
                x[item] = place
    return x


def _straighten(x: list[float], order: list[list[int]], widths: list[float], paths: dict[Edge, list[int]]) -> None:
    """Let a long arrow pass all its rows at one place, if there is one where it meets nobody; the longest first."""
    beside: dict[int, tuple[int | None, int | None]] = {}
    for row in order:
        for left, item, right in zip([None, *row], row, [*row[1:], None], strict=False):
            beside[item] = (left, right)

    def room(item: int) -> tuple[float, float]:
        left, right = beside[item]
        least = -1e18 if left is None else x[left] + (widths[left] + widths[item]) / 2 + GAP_X
        most = 1e18 if right is None else x[right] - (widths[right] + widths[item]) / 2 - GAP_X
        return least, most

    for path in sorted(paths.values(), key=len, reverse=True):
        if len(path) > 1:
            rooms = [room(item) for item in path]
            least, most = max(low for low, _ in rooms), min(high for _, high in rooms)
            if least <= most + 1e-6:
                place = min(max(sum(x[item] for item in path) / len(path), least), most)
                for item in path:
                    x[item] = place


def _spread(wanted: list[float], weights: list[float], widths: list[float]) -> list[float]:
    """Places nearest to the wanted ones (weighted least squares) that keep the order and the gaps.

    With the gaps taken off, the places must only not decrease: pool adjacent violators.
    """
    offsets, offset = [], 0.0
    for index, width in enumerate(widths):
        offset += (width + widths[index - 1]) / 2 + GAP_X if index else 0.0
        offsets.append(offset)
    pools: list[tuple[float, float, int]] = []  # weighted mean, weight, members
    for place, weight, offset in zip(wanted, weights, offsets, strict=True):
        mean, count = place - offset, 1
        while pools and pools[-1][0] > mean:
            other, heavier, members = pools.pop()
            mean = (other * heavier + mean * weight) / (heavier + weight)
            weight, count = weight + heavier, count + members
        pools.append((mean, weight, count))
    means = [mean for mean, _, count in pools for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]
