"""Lanes: the threads that share one result of a reduction, and how their partial results are combined.

Reductions, softmax and normalization have results (rows or columns) and elements that belong to them. Rows: the
elements of a result lie side by side, and so do its lanes. Columns: neighbouring threads have neighbouring results, and
lanes are further down the block. A thread moves `width` neighbouring elements at once: of one row, or of as many
columns.

Where there are too few results for the device, elements are cut into splits, whose parts a second launch combines.
All of this follows from shapes alone, so sums never change from run to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlcompute.devices.cuda.codegen.kernel_source import KernelSource, grouped
from mlcompute.devices.cuda.codegen.types import DType, loaded, memory_type, register_type, stored
from mlcompute.devices.cuda.kernels.launch import Extents
from mlcompute.devices.loop_nest import Axis, ReductionAxes, iteration_count

THREADS = 256
#: Blocks of 2 THREADS that fill a large device, two for each multiprocessor.
BLOCKS = 264
#: With fewer threads than this, more lanes are of use.
FEW_THREADS = 1 << 14
#: A lane of a split has at least so many iterations.
LEAST_ITERATIONS = 8
#: Or so many, in large blocks.
LEAST_OF_LARGE = 2
#: Iterations of a lane whose elements it can keep in registers.
HELD = 8
#: With more iterations than this, rows get more lanes than a warp: registers would leave room for few blocks.
MOST_HELD = 3
#: So many rows of columns that fit into one block are left to it: it can then share a launch with others.
FEW_ROWS = 64
#: Up to so many rows of columns are left to one large block.
FEW_FOR_BLOCK = 4096
#: Fewer elements than this are not worth a second launch.
WORTH_SPLITS = 1 << 15


def power_of_two(number: int) -> int:
    """The smallest power of 2 that is not smaller."""
    return 1 << max(number - 1, 0).bit_length()


@dataclass(frozen=True)
class Lanes:
    """Who does what in a launch.

    rows      do the lanes of a result lie side by side?
    width     elements a thread moves at once: of one row, or of as many columns
    results   per block: rows, or groups of `width` columns
    lanes     that share each
    kept      loops over the results; along columns the innermost counts groups of `width`
    reduced   loops over the elements of a result; along rows the innermost counts groups of `width`
    splits    pieces the elements of a result are cut into
    """

    rows: bool
    width: int
    results: int
    lanes: int
    kept: tuple[Axis, ...]
    reduced: tuple[Axis, ...]
    splits: int = 1

    @property
    def units(self) -> int:
        """All results, in groups of `width` along columns."""
        return iteration_count(self.kept)

    @property
    def length(self) -> int:
        """Iterations over the elements of one result by all its lanes."""
        return iteration_count(self.reduced)

    @property
    def result_count(self) -> int:
        return self.units if self.rows else self.units * self.width

    @property
    def chunk(self) -> int:
        """Iterations of one split."""
        return -(-self.length // self.splits)

    @property
    def block(self) -> int:
        return self.results * self.lanes

    @property
    def tiles(self) -> int:
        """Blocks that have all results, of one split."""
        return -(-self.units // self.results)

    @property
    def grid(self) -> Extents:
        """Split after split; in one extent, so that launches can be merged."""
        return self.tiles * self.splits, 1, 1

    @property
    def items(self) -> int:
        """Registers a lane has for its iterations, if there are so few that it can keep all elements; else 0."""
        items = -(-self.length // self.lanes)
        return 0 if items > HELD or self.splits > 1 else 2 if items <= 2 else HELD

    def constants(self) -> str:
        """Definitions that stand before the kernel."""
        sizes = f"constexpr int WIDTH = {self.width}, RESULTS = {self.results}, LANES = {self.lanes};"
        return f"{sizes}\nconstexpr bool ROWS = {'true' if self.rows else 'false'};"


def lanes_for(
    axes: ReductionAxes, width: int, *, splits_limit: int = 1, hold: bool = False, large_blocks: bool = False
) -> Lanes:
    """The plan for some loops.

    width          elements that can be moved at once along the innermost loop
    splits_limit   splits there is memory for
    hold           will lanes keep their elements in registers, if they are few?
    large_blocks   are few splits better than many, since every block combines them again?
    """
    all_ = grouped(axes.axes, width)
    kept, reduced = (tuple(axis for axis in all_ if axis.reduced == which) for which in (False, True))

    def planned(threads: int) -> Lanes:
        shared = _rows if axes.are_rows else _columns
        results, lanes = shared(iteration_count(kept), iteration_count(reduced), threads, hold)
        return Lanes(axes.are_rows, width, results, lanes, kept, reduced)

    plan = planned(THREADS)
    if not axes.are_rows and not large_blocks and THREADS < plan.length <= FEW_FOR_BLOCK and plan.tiles < BLOCKS // 2:
        # Large blocks take less time than the second launch that splits need.
        return replace(plan, lanes=4 * THREADS // plan.results)
    if plan.tiles >= BLOCKS // 2 or plan.units * plan.length * width < WORTH_SPLITS:
        return plan
    large = planned(4 * THREADS if large_blocks else 2 * THREADS)
    blocks = BLOCKS // 2 if large_blocks else BLOCKS
    # Not more blocks than run side by side: the last few would run alone.
    least = min(LEAST_ITERATIONS, LEAST_OF_LARGE) if large_blocks else LEAST_ITERATIONS
    most = large.length // (large.lanes * least)
    splits = min(blocks // large.tiles, most, splits_limit)
    if splits < 2:
        return large if most > 1 and not plan.items else plan
    return replace(large, splits=-(-large.length // -(-large.length // splits)))


def _rows(units: int, length: int, threads: int, hold: bool) -> tuple[int, int]:
    """Results per block and lanes: a few lanes of a warp for short rows, a block for long ones.

    Few different numbers, so that few different kernels are compiled.
    """
    lanes = 1 if length <= 2 else 8 if length <= 32 else 32 if length < 512 else 128 if length < 2048 else threads
    if units * lanes < FEW_THREADS and length > lanes:
        lanes = 32 if length <= 64 else threads
    elif hold and lanes == 32 and length > MOST_HELD * lanes:
        lanes = 128
    if hold and length > HELD * threads:
        lanes = 1024 if length > HELD * 512 else max(threads, 512)
    return (threads // lanes if lanes <= 32 else 1), lanes


def _columns(units: int, length: int, threads: int, hold: bool) -> tuple[int, int]:
    """Results per block and lanes: neighbouring threads read neighbouring columns, others further rows."""
    if length <= 2:
        return threads, 1
    results = min(32, power_of_two(units))
    if units <= results and length <= FEW_ROWS and threads == THREADS:
        return results, threads // results
    # Where there are few blocks, they get narrower, down to what is still a full line of the cache. Large blocks are
    # for splits, which make more of them.
    least = 8 if threads == THREADS else power_of_two(units) // 2
    while results > max(least, 8) and -(-units // results) < BLOCKS // 2 and 2 * threads // results <= length:
        results //= 2
    return results, threads // results


def most_splits(results: int, elements: int) -> int:
    """Splits that any plan for so many results of so many elements may have: what workspaces are made for."""
    if results * elements < WORTH_SPLITS or not results:
        return 1
    # A block has at most 32 x 4 results where elements are split.
    tiles = -(-results // 128)
    return max(1, min(-(-BLOCKS // tiles), elements // LEAST_ITERATIONS))


def accumulator(fields: Sequence[tuple[str, str]], merge: str, plan: Lanes) -> str:
    """`Acc` with these fields (type, name), and `combine_lanes`, after which every lane has the total of its result.

    merge   the body of `Acc merge(Acc a, Acc b)`
    """
    members = " ".join(f"{kind} {name};" for kind, name in fields)
    down = ", ".join(f"__shfl_down_sync(0xffffffffu, a.{name}, by, SPAN)" for _, name in fields)
    first = ", ".join(f"__shfl_sync(0xffffffffu, a.{name}, 0, SPAN)" for _, name in fields)
    text = f"""{plan.constants()}
struct Acc {{ {members} }};
__device__ __forceinline__ Acc merge(Acc a, Acc b) {{ {merge} }}
"""
    if plan.rows:
        return text + _combine_rows(down, first, plan)
    return text + (
        _COMBINE_COLUMNS if plan.lanes > 1 else "__device__ void combine_lanes(Acc (&)[WIDTH], int = 1) {}\n"
    )


def _combine_rows(down: str, first: str, plan: Lanes) -> str:
    lines = ["__device__ __forceinline__ void combine_lanes(Acc (&acc)[WIDTH], int = LANES) {", "    Acc a = acc[0];"]
    if plan.width > 1:
        lines.append("    #pragma unroll\n    for (int v = 1; v < WIDTH; ++v) a = merge(a, acc[v]);")
    if plan.lanes > 1:
        lines.append(f"""    constexpr int SPAN = {min(plan.lanes, 32)};
    #pragma unroll
    for (int by = SPAN / 2; by > 0; by /= 2) {{
        const Acc b = {{{down}}};
        a = merge(a, b);
    }}""")
    if 1 < plan.lanes <= 32:
        lines.append(f"    a = Acc{{{first}}};")
    elif plan.lanes > 32:
        lines.append("""    __shared__ Acc parts[LANES / 32];
    __syncthreads();  // an earlier total may still be read
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = a;
    __syncthreads();
    a = parts[0];
    #pragma unroll
    for (int warp = 1; warp < LANES / 32; ++warp) a = merge(a, parts[warp]);""")
    return "\n".join([*lines, "    acc[0] = a;", "}"])


# Lanes from `used` on have found nothing.
_COMBINE_COLUMNS = """
__device__ __forceinline__ void combine_lanes(Acc (&acc)[WIDTH], int used = LANES) {
    __shared__ Acc parts[LANES][WIDTH * RESULTS];
    const int lane = threadIdx.x / RESULTS, column = threadIdx.x % RESULTS;
    int by = LANES / 2;
    while (by > 0 && by >= used) by /= 2;
    __syncthreads();  // earlier totals may still be read
    for (; by > 0; by /= 2) {
        if (lane >= by && lane < 2 * by) {
            #pragma unroll
            for (int v = 0; v < WIDTH; ++v) parts[lane][v * RESULTS + column] = acc[v];
        }
        __syncthreads();
        if (lane < by) {
            Acc other[WIDTH];  // all are on their way before the first is used
            #pragma unroll
            for (int v = 0; v < WIDTH; ++v) other[v] = parts[lane + by][v * RESULTS + column];
            #pragma unroll
            for (int v = 0; v < WIDTH; ++v) acc[v] = merge(acc[v], other[v]);
        }
    }
    if (lane == 0) {
        #pragma unroll
        for (int v = 0; v < WIDTH; ++v) parts[0][v * RESULTS + column] = acc[v];
    }
    __syncthreads();
    #pragma unroll
    for (int v = 0; v < WIDTH; ++v) acc[v] = parts[0][v * RESULTS + column];
}
"""


def lane_indices(source: KernelSource, plan: Lanes) -> str:
    """Statements every kernel over lanes begins with: `lane`, `k` (the result or group of columns), `alive`, `begin`
    and `end` (iterations over the elements, to be taken in steps of LANES); `split` where there are several."""
    lane, result = ("%", "/") if plan.rows else ("/", "%")
    span = "LANES" if plan.rows else "RESULTS"
    units, length, chunk = source.index("units", plan.units), source.index("length", plan.length), "0"
    tile, splits = "(Index)blockIdx.x", ""
    if plan.splits > 1:
        tiles = source.extent("tiles", plan.tiles)
        splits = f"const Index split = {source.divided(tile, tiles)};"
        tile, chunk = f"({tile} - split * {tiles})", f"split * {source.index('chunk', plan.chunk)}"
    end = f"({length} < first + chunk ? {length} : first + chunk)" if plan.splits > 1 else length
    return f"""
    const int lane = threadIdx.x {lane} {span};
    {splits}
    const Index k = {tile} * RESULTS + threadIdx.x {result} {span};
    const bool alive = k < {units};
    const Index first = {chunk};
    const Index begin = first + lane, end = alive ? {end} : 0;
"""


def each_element(source: KernelSource, plan: Lanes, operands: Sequence[str]) -> str:
    """Functions `NAME_at(r)`, the offset of an element from the start of its result, for operands in their order."""
    text = []
    for position, name in enumerate(operands):
        if not name:
            continue
        offsets = [""] * position + [f"{name}_offset"]
        inside = source.unraveled("r", plan.reduced, offsets, f"{name}_r")
        text.append(f"    auto {name}_at = [&](Index r) -> Index {{ {inside} return {name}_offset; }};")
    return "\n".join(text)


class ElementPasses:
    """Passes of every lane over its elements, which stay in registers after the first where they are few.

    operands   what is read: name -> dtype; their elements are `NAMEs[v]` in the text of a pass, registers
    """

    def __init__(self, plan: Lanes, operands: dict[str, DType]) -> None:
        self._operands = operands
        self.held = plan.items

    def load(self) -> str:
        """Before the first pass: declare the registers and fill them."""
        if not self.held:
            return ""
        text = [
            f"    {register_type(dtype)} {name}_held[{self.held}][WIDTH];" for name, dtype in self._operands.items()
        ]
        loads = "".join(
            f"""
            const auto {name}_group = *reinterpret_cast<const Pack<{memory_type(dtype)}, WIDTH>*>(
                {name} + {name}_start + {name}_at(r));
            #pragma unroll
            for (int v = 0; v < WIDTH; ++v) {name}_held[j][v] = {loaded(dtype, f"{name}_group.at[v]")};"""
            for name, dtype in self._operands.items()
        )
        text.append(f"""    #pragma unroll
    for (int j = 0; j < {self.held}; ++j) {{
        const Index r = begin + j * LANES;
        if (r < end) {{{loads}
        }}
    }}""")
        return "\n".join(text)

    def each(self, body: str) -> str:
        """A pass: `body` for every group of elements, the number of which is `r`."""
        if self.held:
            names = "".join(f"            auto& {name}s = {name}_held[j];\n" for name in self._operands)
            return f"""    #pragma unroll
    for (int j = 0; j < {self.held}; ++j) {{
        const Index r = begin + j * LANES;
        if (r < end) {{
{names}{body}
        }}
    }}"""
        loads = "".join(
            f"""
        {register_type(dtype)} {name}s[WIDTH];
        const auto {name}_group = *reinterpret_cast<const Pack<{memory_type(dtype)}, WIDTH>*>(
            {name} + {name}_start + {name}_at(r));
        #pragma unroll
        for (int v = 0; v < WIDTH; ++v) {name}s[v] = {loaded(dtype, f"{name}_group.at[v]")};"""
            for name, dtype in self._operands.items()
        )
        return f"""    #pragma unroll 4
    for (Index r = begin; r < end; r += LANES) {{{loads}
{body}
    }}"""


def store_group(dtype: DType, expression: str) -> str:
    """A statement in a pass: results, an expression of `v`, go where the group of elements `r` lies in `y`."""
    group = f"Pack<{memory_type(dtype)}, WIDTH>"
    return f"""            {group} made;
            #pragma unroll
            for (int v = 0; v < WIDTH; ++v) made.at[v] = {stored(dtype, expression)};
            *reinterpret_cast<{group}*>(y + y_start + y_at(r)) = made;"""


def column_step(plan: Lanes, operand: int) -> int:
    """How far an operand moves between the neighbouring columns of a group; 0 for rows."""
    return 0 if plan.rows else plan.kept[-1].strides[operand] // plan.width
