"""Convolutions of stride two, with large filters, or of volumes, by Winograd's algorithm: as ones of small filters.

See `winograd_sizes.Split` and `Planes` for which these are: they have more channels. Tiles are copied from the parts of
an image or the planes of a volume, and written to parts; filters are brought to points part by part.
"""

from __future__ import annotations

from collections.abc import Callable

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import Code, vector_lanes
from mlcompute.devices.cpu.codegen.loops import Line, fill_line
from mlcompute.devices.cpu.codegen.short_rows import read_across, write_across
from mlcompute.devices.cpu.codegen.simd import SimdValue
from mlcompute.devices.cpu.kernels.winograd_sizes import Sizes


class SplitImage:
    """An image as one with channels (a, b, c): see `Split`."""

    def __init__(self, args: KernelArguments, sizes: Sizes) -> None:
        assert sizes.split is not None
        split, depth = sizes.split, sizes.channels if sizes.split.of_result else sizes.depth
        self._code, self._split, self.steps = args.code, split, (split.step, split.step)
        #: Channels (a, b, c) that are neighbours in the image, too, from a multiple of so many on.
        self.run: str
        self._top, self._left, self._channels, self.run = args.numbers(
            [split.top, split.left, split.channels, min(split.channels, depth)]
        )

    def place(self, sample: str, i: str, j: str, channel: str) -> tuple[str, str, str, str]:
        """Sample, row, column and channel of the image, of a pixel of the parts and one of their channels."""
        code, (*_, per_side, step, apart) = self._code, self._split
        part = code.div(channel, self._channels)
        row, column = (
            code.sub(code.add(code.mul(at, step), code.mul(of, apart)), before)
            for at, of, before in ((i, code.div(part, per_side), self._top), (j, code.rem(part, per_side), self._left))
        )
        return sample, row, column, code.rem(channel, self._channels)


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
        self._code, self._split, self._last = code, sizes.split, sizes.down.taps - 1
        self._rotates_parts = backwards and sizes.split.of_result
        self._is_rotated = backwards and not sizes.split.of_result
        self._width, lanes = sizes.split.per_side * sizes.down.taps, vector_lanes()
        self.full = Line(code, code.aligned_buffer(self._width**2 * lanes), "float")
        self._plain = Line(code, code.aligned_buffer(sizes.split.extent**2 * lanes), "float")
        fill_line(code, self.full, 0, str(self._width**2 * lanes))

    def read(self, first: str, across: str) -> None:
        """All taps of filters whose first elements lie `across` apart, from the first on."""
        read_across(self._code, (first, across), self._split.extent**2, self._plain, vector_lanes())
        self._copy(self._plain, self.full, is_read=True)

    def write(self, first: str, across: str) -> None:
        """The same the other way round."""
        self._copy(self.full, self._plain, is_read=False)
        write_across(self._code, self._plain, vector_lanes(), (first, across), self._split.extent**2)

    def _copy(self, source: Line, target: Line, *, is_read: bool) -> None:
        code, lanes, extent = self._code, vector_lanes(), self._split.extent
        with code.loop(0, extent) as row, code.loop(0, extent) as column:
            place = code.add(code.mul(row, extent), column)
            plain = code.mul(code.sub(extent**2 - 1, place) if self._is_rotated else place, lanes)
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
        code, (*_, per_side, step, apart) = self._code, self._split
        row, column = (
            code.add(code.mul(code.sub(self._last, at) if self._rotates_parts else at, step), code.mul(of, apart))
            for at, of in ((p, code.div(part, per_side)), (q, code.rem(part, per_side)))
        )
        return code.mul(code.add(code.mul(row, self._width), column), vector_lanes())
