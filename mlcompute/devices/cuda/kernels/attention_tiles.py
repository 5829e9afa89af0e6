"""What kernels of attention are made of: their parameters, tiles in shared memory, scores and softmax in registers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlcompute.devices.cuda.codegen.tensor_cores import tensor_core_text

#: Rows that a block owns, and its threads.
ROWS, THREADS = 64, 128


@dataclass(frozen=True)
class Form:
    """What the text depends on: extents of queries and values rounded up to 8, options, and how elements are read.

    inner    rows of the tiles that a block goes through
    has_map  is it known what the mask has in tiles of inner x inner?
    packed   how many elements of a row may be read at a time: 1, 4, or 8 of bfloat16
    narrow   are queries, keys, values and their gradients bfloat16? Masks, and what is computed, are float32
    by_token  are results (n, l, heads, d), and are the softmax's denominators kept for the gradient?
    joined    are gradients thirds of one result (n, l, 3 heads, d)?
    """

    width: int
    value_width: int
    inner: int
    has_mask: bool
    has_map: bool
    has_keep: bool
    exact: bool
    packed: int
    narrow: bool = False
    by_token: bool = False
    joined: bool = False

    @property
    def forward_bytes(self) -> int:
        """Shared memory: the block's queries, two tiles of keys and values."""
        q, v = self._pitches
        return self._item * (ROWS * q + 2 * self.inner * (q + v))

    @property
    def gradient_bytes(self) -> int:
        """Shared memory: what the block owns, two tiles of what it goes through."""
        q, v = self._pitches
        return self._item * (ROWS + 2 * self.inner) * (q + v)

    @property
    def _pitches(self) -> tuple[int, int]:
        padding = 16 // self._item  # of either type, 16 bytes keep rows aligned and apart
        return self.width + padding, self.value_width + padding

    @property
    def narrow_tiles(self) -> bool:
        """Are tiles in shared memory bfloat16, too? What is computed between two products is then rounded to it."""
        return self.narrow and not self.exact

    @property
    def keeps_factors(self) -> bool:
        """Is there room in registers for what a warp owns? Else it is read again for every tile."""
        return not self.exact and max(self.width, self.value_width) <= 64

    @property
    def _item(self) -> int:
        return 2 if self.narrow_tiles else 4

    def bounds(self, blocks: int) -> str:
        """Registers are limited so that `blocks` find room, where they suffice."""
        return f"__launch_bounds__({THREADS}, {blocks if self.keeps_factors else 1})"

    @property
    def head(self) -> str:
        """Functions, constants, and the parameters all kernels have."""
        q, v = self._pitches
        return f"""{tensor_core_text(self.exact, self.narrow_tiles)}
enum {{ ROWS = {ROWS}, THREADS = {THREADS}, D = {self.width}, DV = {self.value_width}, INNER = {self.inner} }};
enum {{ Q = {q}, V = {v}, PACK = {self.packed}, KEPT = {int(self.keeps_factors)} }};
enum {{ HAS_MASK = {int(self.has_mask)}, HAS_MAP = {int(self.has_map)}, HAS_KEEP = {int(self.has_keep)} }};
#define LOG2_E 1.4426950408889634f
#define LOG_2 0.6931471805599453f
using Element = {"bfloat16" if self.narrow else "float"};
using Tile = {"bfloat16" if self.narrow_tiles else "float"};
__device__ __forceinline__ Element element(float x) {{ return {"to_bfloat16(x)" if self.narrow else "x"}; }}
__device__ __forceinline__ float number(Element x) {{ return {"to_float(x)" if self.narrow else "x"}; }}
{_FUNCTIONS}"""

    def parameters(self, *results: str) -> str:
        """Pointers and numbers, in the order in which `attention.py` gives them."""
        inputs = ["q", "k", "v", *(["mask"] if self.has_mask else []), *(["keep"] if self.has_keep else [])]
        if "deltas" in results:
            inputs.insert(0, "dy")
            if self.by_token:
                inputs[1:1] = ["y", "logs"]
        floats = ("mask", "keep", "logs", "deltas")
        found = [f"const {'float' if name in floats else 'Element'}* {name}" for name in inputs]
        found += [f"{'float' if name in floats else 'Element'}* {name}" for name in results]
        found += [f"Strides {name}_by" for name in inputs if name not in ("y", "logs")]
        if self.has_map:
            found += ["const int* map", "Strides map_by"]
        return ", ".join([*found, "Sizes z"])

    def row(self, count: str, index: str, of_gradient: bool = False) -> str:
        """The number of a row of a result: that of a token, then of a head, or the other way round."""
        if self.by_token:
            heads = "3 * z.heads" if self.joined and of_gradient else "z.heads"
            return f"(((long long)(unit / z.heads) * {count} + {index}) * ({heads}) + unit % z.heads)"
        return f"((long long)unit * {count} + {index})"

    def begin(self, count: str, heavy_first: str, *inputs: str) -> str:
        """Which rows of which head of which sample a block owns, which of them the lane has, where inputs begin.

        Blocks with the most work for a causal mask begin first: `heavy_first` makes a tile's number of its rank.
        """
        lines = [
            "extern __shared__ __align__(16) Tile shared[];",
            f"int tiles = ({count} + ROWS - 1) / ROWS, units = gridDim.x / tiles, rank = blockIdx.x / units;",
            f"int unit = blockIdx.x % units, first = ({heavy_first}) * ROWS, own = threadIdx.x / 32 * 16;",
            "int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;",
            "float log2_scale = z.scale * LOG2_E;",
            "long long at = (long long)unit * z.queries;  // where logs and deltas of the head begin",
        ]
        lines += [f"{name} = start({name}, {name}_by, unit, z.heads);" for name in inputs]
        for name, kind, present in (
            ("mask", "float", self.has_mask), ("keep", "float", self.has_keep), ("map", "int", self.has_map),
        ):  # fmt: skip
            if present:
                lines.append(f"{name} = start({name}, {name}_by, unit, z.heads);")
            else:  # nothing is read
                lines.append(f"const {kind}* {name} = 0; Strides {name}_by = {{0, 0, 0, 0}};")
        return "\n    ".join(lines)


_FUNCTIONS = """
#ifdef MLCOMPUTE_EMULATED
static inline float power(float x) { return exp2f(x); }
#else
// 2 to the x; 0 where that is less than any normal number. exp2f takes several instructions to be right there, too.
__device__ __forceinline__ float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif
struct Strides { long long sample, head, row, column; };
struct Sizes { int heads, queries, keys, width, value_width; float scale; };
template <typename T>
__device__ __forceinline__ const T* start(const T* p, Strides by, int unit, int heads) {
    return p + unit / heads * by.sample + unit % heads * by.head;
}
// Of 32 tiles from `first` on, in which anything is allowed, and of which the mask has to be read: a bit of each.
struct Seen { int first; unsigned int allowed, masked; };
// The first tile from `tile` on where anything is allowed, `tiles` if there is none; and does its mask have to be read?
// A tile is `parts` of the map's, which are `by_part` apart. Lanes look at different tiles.
__device__ __forceinline__ int next_tile(
    const int* map, long long by_tile, long long by_part, int parts, bool all, Seen& seen, int tile, int tiles,
    bool& masked) {
    masked = HAS_MASK;
    if (!HAS_MAP) return tile;
    for (; tile < tiles; tile = seen.first + 32) {
        if (tile >= seen.first + 32) {
            int at = tile + threadIdx.x % 32, found = 0;
            for (int part = 0; part < parts && at < tiles; ++part) found |= map[at * by_tile + part * by_part];
            seen.first = tile;
            seen.allowed = __ballot_sync(0xffffffffu, at < tiles && (all || (found & 1)));
            seen.masked = __ballot_sync(0xffffffffu, found & 2);
        }
        unsigned int allowed = seen.allowed >> (tile - seen.first);
        if (allowed) {
            tile += __ffs(allowed) - 1;
            masked = seen.masked >> (tile - seen.first) & 1;
            return tile;
        }
    }
    return tiles;
}
// An element of a matrix over scores; where there is none, a neighbour is read and something else given. With a branch
// every element would wait for the one before it.
__device__ __forceinline__ float of_score(const float* p, Strides by, int i, int j, Sizes z, float otherwise) {
    const float x = p[min(i, z.queries - 1) * by.row + min(j, z.keys - 1) * by.column];
    return i < z.queries && j < z.keys ? x : otherwise;
}
// What the mask adds to a score, in units of log2.
__device__ __forceinline__ float added(const float* mask, Strides by, int i, int j, Sizes z) {
    return of_score(mask, by, i, j, z, 0.0f) * LOG2_E;
}
__device__ __forceinline__ float kept(const float* keep, Strides by, int i, int j, Sizes z) {
    return HAS_KEEP ? of_score(keep, by, i, j, z, 1.0f) : 1.0f;
}
// Two neighbours of a row, of which some may not exist.
struct __align__(2 * sizeof(Element)) Two { Element at[2]; };
__device__ __forceinline__ void store(Element* row, int column, int columns, float x, float y) {
    if (PACK > 1) {
        if (column < columns) *(Two*)(row + column) = {element(x), element(y)};
    } else {
        if (column < columns) row[column] = element(x);
        if (column + 1 < columns) row[column + 1] = element(y);
    }
}
// Over the four lanes that share a row.
__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
"""

#: The running maximum and sum of two rows' softmax: `x` becomes exp(x - maximum), `change` what corrects sums so far.
SOFTMAX = """
        float change[2];
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
            float best = most[r];
            #pragma unroll
            for (int n = 0; n < INNER / 8; ++n) best = fmaxf(best, fmaxf(x[n][2 * r], x[n][2 * r + 1]));
            best = row_max(best);
            float base = best == -INFINITY_F ? 0.0f : best;
            change[r] = power(most[r] - base);
            most[r] = best;
            total[r] *= change[r];
            #pragma unroll
            for (int n = 0; n < INNER / 8; ++n)
                #pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; ++e) {
                    x[n][e] = power(x[n][e] - base);
                    total[r] += x[n][e];
                }
        }
"""

#: Scores of the block's queries and a tile of keys, as softmax sees them: -inf where there is no key.
SCORES = """
        float x[INNER / 8][4] = {};
        multiply_rows<INNER / 8, Q>(x, q_left, ks);
        #pragma unroll
        for (int n = 0; n < INNER / 8; ++n)
            #pragma unroll
            for (int e = 0; e < 4; ++e) x[n][e] *= log2_scale;
        if (key + INNER > z.keys)
            #pragma unroll
            for (int n = 0; n < INNER / 8; ++n)
                #pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (key + 8 * n + 2 * t + e % 2 >= z.keys) x[n][e] = -INFINITY_F;
        if (HAS_MASK && adds)
            #pragma unroll
            for (int n = 0; n < INNER / 8; ++n)
                #pragma unroll
                for (int e = 0; e < 4; ++e)
                    x[n][e] += added(mask, mask_by, first + own + g + e / 2 * 8, key + 8 * n + 2 * t + e % 2, z);
"""


def copied(kind: str, name: str, tile: str, row: str, inner: str = "INNER") -> str:
    """A tile of `inner` rows of q or k (kind "Q"), v or dy (kind "V")."""
    width, pitch, columns = ("D", "Q", "z.width") if kind == "Q" else ("DV", "V", "z.value_width")
    count = "z.queries" if name in ("q", "dy") else "z.keys"
    return (
        f"copy_tile<{inner}, {width}, {pitch}, THREADS, PACK>({tile}, {name} + ({row}) * {name}_by.row, "
        f"{count} - ({row}), {columns}, {name}_by.row, {name}_by.column);"
    )


def tile_loop(
    row: str, count: str, first: tuple[str, str], second: tuple[str, str], walk: str, factors: Sequence[str], body: str
) -> str:
    """Goes through tiles of two inputs (name and where tiles are kept), one being copied while one is used.

    `row` is the first row of the tile in use; `walk` are the arguments that tell `next_tile` where to look. That is
    done two tiles ahead, while others are used: it may wait for memory. `factors` are made of what the block owns.
    """

    def copies(tile: str) -> str:
        return "\n            ".join(
            copied(kind, name, f"{tiles} + buffer * INNER * {kind}", f"{tile} * INNER")
            for kind, (name, tiles) in zip("QV", (first, second), strict=True)
        )

    q, v = f"{first[0]}s", f"{second[0]}s"
    loaded = " ".join(f"{factor}_left.load();" for factor in factors)
    return f"""
    {{
    int buffer = 0, tiles = ({count} + INNER - 1) / INNER;
    bool masked, next_masked = false;
    Seen seen = {{-32, 0, 0}};
    int tile = next_tile({walk}, seen, 0, tiles, masked), next = tiles;
    if (tile < tiles) {{
            {copies("tile")}
            next = next_tile({walk}, seen, tile + 1, tiles, next_masked);
    }}
    wait_for_copies();
    __syncthreads();
    {loaded}
    while (tile < tiles) {{
        int {row} = tile * INNER;
        bool adds = masked;
        Tile *{q} = {first[1]} + buffer * INNER * Q, *{v} = {second[1]} + buffer * INNER * V;
        wait_for_copies();
        finish_tile<INNER, D, Q, THREADS, PACK>({q});
        finish_tile<INNER, DV, V, THREADS, PACK>({v});
        __syncthreads();  // the tile is there, and nobody reads the last one any more
        tile = next, masked = next_masked;
        buffer ^= 1;
        if (tile < tiles) {{
            {copies("tile")}
            next = next_tile({walk}, seen, tile + 1, tiles, next_masked);
        }}
{body}
    }}
    }}
"""


def key_loop(factors: Sequence[str], body: str) -> str:
    """Through tiles `ks` and `vs` of keys and values from `key` on."""
    walk = "map, 1, map_by.row, parts, false"
    return tile_loop("key", "z.keys", ("k", "keys"), ("v", "values"), walk, factors, body)


def factor(kind: str, name: str, tile: str, kept: str = "KEPT") -> str:
    """16 rows of a tile that the block owns, as a factor of products."""
    width, pitch = ("D", "Q") if kind == "Q" else ("DV", "V")
    return f"Factor<Tile, {width} / 8, {pitch}, {kept}> {name}_left({tile} + own * {pitch});"


def first_part(own: str) -> str:
    """Where a block's part of the map begins, and of how many of the map's tiles its own rows are."""
    extent, stride = ("z.queries", "map_by.row") if own == "query" else ("z.keys", "1")
    return f"map += first / INNER * {stride}; int parts = min(ROWS / INNER, ({extent} - first + INNER - 1) / INNER);"
