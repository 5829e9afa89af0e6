"""Convolutions of stride two, and of volumes, by Winograd's algorithm: as ones of images at stride one.

See `winograd_sizes.Phases` and `Planes` for which these are: they have more channels. Tiles are copied from the phases
of an image or the planes of a volume, and written to phases; filters of phases are brought to points phase by phase.
"""

from __future__ import annotations

from collections.abc import Callable

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import Code, vector_lanes
from mlcompute.devices.cpu.codegen.loops import Line, fill_line
from mlcompute.devices.cpu.codegen.short_rows import read_across, write_across
from mlcompute.devices.cpu.codegen.simd import SimdValue
from mlcompute.devices.cpu.kernels.winograd_sizes import Sizes

#: Pixels from one of a phase to the next, down and across, and how many phases there are.
STRIDE = 2
PHASES = STRIDE**2


class PhasedImage:
    """An image whose even and odd rows and columns are channels (a, b, c) of an image of half the extents."""

    steps = (STRIDE, STRIDE)

    def __init__(self, args: KernelArguments, sizes: Sizes) -> None:
        assert sizes.phases is not None
        self._code, depth = args.code, sizes.channels if sizes.phases.of_result else sizes.depth
        #: Channels (a, b, c) that are neighbours in the image, too, from a multiple of so many on.
        self.run: str
        self._top, self._left, self._channels, self.run = args.numbers(
            [sizes.phases.top, sizes.phases.left, sizes.phases.channels, min(sizes.phases.channels, depth)]
        )

    def place(self, sample: str, i: str, j: str, channel: str) -> tuple[str, str, str, str]:
        """Sample, row, column and channel of the image, of a pixel of the phases and one of their channels."""
        code = self._code
        phase = code.div(channel, self._channels)
        row = code.sub(code.add(code.mul(i, STRIDE), code.div(phase, STRIDE)), self._top)
        column = code.sub(code.add(code.mul(j, STRIDE), code.rem(phase, STRIDE)), self._left)
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


class PhasedFilters:
    """Filters (o, c, r, r) as those of four phases, (o, (a, b, c), p, q) of half the taps each.

    Vectors run over the outputs, or backwards over the inputs. `full` holds all taps of so many filters, and zeros
    beyond them where they are of odd extent.
    """

    def __init__(self, code: Code, sizes: Sizes) -> None:
        assert sizes.phases is not None
        self._code, self._phases, self._taps = code, sizes.phases, sizes.down.taps
        self._width = STRIDE * self._taps
        lanes = vector_lanes()
        self.full = Line(code, code.aligned_buffer(self._width**2 * lanes), "float")
        self._plain = Line(code, code.aligned_buffer(self._phases.extent**2 * lanes), "float")
        fill_line(code, self.full, 0, str(self._width**2 * lanes))

    def read(self, first: str, across: str) -> None:
        """All taps of filters whose first elements lie `across` apart, from the first on."""
        read_across(self._code, (first, across), self._phases.extent**2, self._plain, vector_lanes())
        self._copy(self._plain, self.full, is_read=True)

    def write(self, first: str, across: str) -> None:
        """The same the other way round."""
        self._copy(self.full, self._plain, is_read=False)
        write_across(self._code, self._plain, vector_lanes(), (first, across), self._phases.extent**2)

    def _copy(self, source: Line, target: Line, *, is_read: bool) -> None:
        code, lanes, extent = self._code, vector_lanes(), self._phases.extent
        with code.loop(0, extent) as row, code.loop(0, extent) as column:
            plain, full = (code.mul(code.add(code.mul(row, width), column), lanes) for width in (extent, self._width))
            target.store(full if is_read else plain, source.load(plain if is_read else full))

    def loading(self, phase: str, backwards: bool) -> Callable[[int, str | int], SimdValue]:
        """Loads of the taps of a phase, by row and column; backwards: rotated."""
        return lambda row, column: self.full.load(self._tap(phase, row, column, backwards))

    def storing(self, phase: str) -> Callable[[str | int, int, SimdValue], None]:
        """Stores of the same."""
        return lambda row, column, value: self.full.store(self._tap(phase, row, column, False), value)

    def _tap(self, phase: str, p: str | int, q: str | int, backwards: bool) -> str:
        """Where a tap of a phase lies in `full`."""
        code, last = self._code, self._taps - 1
        places = [code.sub(last, at) if backwards else at for at in (p, q)]
        row = code.add(code.mul(places[0], STRIDE), code.div(phase, STRIDE))
        column = code.add(code.mul(places[1], STRIDE), code.rem(phase, STRIDE))
        return code.mul(code.add(code.mul(row, self._width), column), vector_lanes())
