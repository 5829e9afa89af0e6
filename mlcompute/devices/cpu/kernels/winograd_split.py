"""Convolutions of stride two, with large filters, or of volumes, by Winograd's algorithm: as ones of small filters.

See `winograd_sizes.Split` and `Planes` for which these are: they have more channels. Tiles are copied from the parts of
an image or the planes of a volume, and written to parts; filters are brought to points part by part.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import Code, vector_lanes
from mlcompute.devices.cpu.codegen.loops import Line, fill_line
from mlcompute.devices.cpu.codegen.short_rows import read_across, write_across
from mlcompute.devices.cpu.codegen.simd import SimdValue
from mlcompute.devices.cpu.kernels.winograd_sizes import Sizes, Split


class SplitImage:
    """An image as one with channels (a, b, c): see `Split`."""

    def __init__(self, args: KernelArguments, sizes: Sizes) -> None:
        assert sizes.split is not None
        split, depth = sizes.split, sizes.channels if sizes.split.of_result else sizes.depth
        self._code, self._split, self.steps = args.code, split, (split.steps[0], split.steps[1])
        #: Channels (a, b, c) that are neighbours in the image, too, from a multiple of so many on.
        self.run: str
        self._top, self._left, self._channels, self.run = args.numbers(
            [*split.before, split.channels, min(split.channels, depth)]
        )

    def place(self, sample: str, i: str, j: str, channel: str) -> tuple[str, str, str, str]:
        """Sample, row, column and channel of the image, of a pixel of the parts and one of their channels."""
        code = self._code
        row, column = places(code, self._split, code.div(channel, self._channels), i, j)
        return sample, code.sub(row, self._top), code.sub(column, self._left), code.rem(channel, self._channels)


def places(code: Code, split: Split, part: str, i: str | int, j: str | int) -> tuple[str, str]:
    """Row and column of the image, without the zeros before it, or of a filter: of a part's."""
    a, b = code.div(part, split.counts[1]), code.rem(part, split.counts[1])
    row, column = (
        code.add(code.mul(at, step), code.mul(of, apart))
        for at, step, of, apart in zip((i, j), split.steps, (a, b), split.aparts, strict=True)
    )
    return row, column


class PlanesOfVolume:
    """Planes of volumes as images, one for every plane of the result, with channels (tap along the depth, c)."""

    steps = (1, 1)

    def __init__(self, args: KernelArguments, sizes: Sizes) -> None:
        assert sizes.planes is not None
        planes, self._code = sizes.planes, args.code
        self._step, self._channels, self._front, self._source, self._result = args.numbers(planes[1:])
        self.run, self._top, self._left = args.numbers([min(planes.channels, sizes.depth), sizes.top, sizes.left])

    def place(self, sample: str, i: str, j: str, channel: str) -> tuple[str, str, str, str]:
        """Plane of all samples, row, column and channel; a row far before the first one where there is no plane."""
        code = self._code
        tap, first = code.div(channel, self._channels), code.mul(code.div(sample, self._result), self._source)
        plane = code.sub(code.add(code.rem(sample, self._result), code.mul(tap, self._step)), self._front)
        # An unsigned comparison: a plane before the first is a very large number.
        exists = code.let(f"icmp ult i64 {plane}, {self._source}")
        row = code.let(f"select i1 {exists}, i64 {code.sub(i, self._top)}, i64 {-1 << 40}")
        return code.add(first, plane), row, code.sub(j, self._left), code.rem(channel, self._channels)


class SplitFilters:
    """Filters (o, c, r, r) as those of parts, (o, (a, b, c), p, q) of fewer taps each.

    Vectors run over the outputs, or backwards over the inputs. `full` holds all taps of so many filters, and zeros
    beyond them where parts have more; rotated where the source has parts, as these are then taken from the other end.
    """

    def __init__(self, code: Code, sizes: Sizes, backwards: bool = False) -> None:
        assert sizes.split is not None
        self._code, self._split, self._taps = code, sizes.split, (sizes.down.taps, sizes.across.taps)
        self._rotates_parts = backwards and sizes.split.of_result
        self._is_rotated = backwards and not sizes.split.of_result
        rows, self._width = (count * taps for count, taps in zip(sizes.split.counts, self._taps, strict=True))
        self._extent, lanes = math.prod(sizes.split.extents), vector_lanes()
        self.full = Line(code, code.aligned_buffer(rows * self._width * lanes), "float")
        self._plain = Line(code, code.aligned_buffer(self._extent * lanes), "float")
        fill_line(code, self.full, 0, str(rows * self._width * lanes))

    def read(self, first: str, across: str) -> None:
        """All taps of filters whose first elements lie `across` apart, from the first on."""
        read_across(self._code, (first, across), self._extent, self._plain, vector_lanes())
        self._copy(self._plain, self.full, is_read=True)

    def write(self, first: str, across: str) -> None:
        """The same the other way round."""
        self._copy(self.full, self._plain, is_read=False)
        write_across(self._code, self._plain, vector_lanes(), (first, across), self._extent)

    def _copy(self, source: Line, target: Line, *, is_read: bool) -> None:
        code, lanes, (height, width) = self._code, vector_lanes(), self._split.extents
        with code.loop(0, height) as row, code.loop(0, width) as column:
            place = code.add(code.mul(row, width), column)
            plain = code.mul(code.sub(self._extent - 1, place) if self._is_rotated else place, lanes)
            full = code.mul(code.add(code.mul(row, self._width), column), lanes)
            target.store(full if is_read else plain, source.load(plain if is_read else full))

    def loading(self, part: str) -> Callable[[int, str | int], SimdValue]:
        """Loads of the taps of a part, by row and column."""
        return lambda row, column: self.full.load(self._tap(part, row, column))

    def storing(self, part: str) -> Callable[[str | int, int, SimdValue], None]:
        """Stores of the same."""
        return lambda row, column, value: self.full.store(self._tap(part, row, column), value)

    def _tap(self, part: str, p: str | int, q: str | int) -> str:
        """Where a tap of a part lies in `full`."""
        code = self._code
        if self._rotates_parts:
            p, q = (code.sub(taps - 1, at) for taps, at in zip(self._taps, (p, q), strict=True))
        row, column = places(code, self._split, part, p, q)
        return code.mul(code.add(code.mul(row, self._width), column), vector_lanes())
