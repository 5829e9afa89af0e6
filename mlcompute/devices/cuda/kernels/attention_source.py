"""CUDA C++ of attention and its gradient: scores exist only as tiles in registers.

A block has 4 warps; each owns 16 of the block's 64 queries (of its keys, for the gradients of keys and values) and goes
through all keys (queries), a tile at a time; the next tile is copied while one is used. The softmax's maximum and sum
are carried along and corrected when a larger score appears. The gradient goes through the keys for dq, and once more
before that for the softmax where its denominators were not kept; a second kernel makes dk and dv. Nothing is added in
an order that depends on the run.

Scores are multiplied by log2(e), so that exp is exp2; logarithms that are kept are natural ones.

A kernel of its own looks at the mask once: tiles in which it forbids everything, half of them where it is causal, are
skipped, and it is only read again where it is not 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlcompute.devices.cuda.codegen.tensor_cores import tensor_core_text

#: Rows that a block owns, and its threads.
ROWS, THREADS = 64, 128
#: Blocks that find room on a multiprocessor together, of the kernels for attention and for its gradient.
_FORWARD_BLOCKS, _GRADIENT_BLOCKS = 4, 3


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
_SOFTMAX = """
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
_SCORES = """
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


def _copied(kind: str, name: str, tile: str, row: str, inner: str = "INNER") -> str:
    """A tile of `inner` rows of q or k (kind "Q"), v or dy (kind "V")."""
    width, pitch, columns = ("D", "Q", "z.width") if kind == "Q" else ("DV", "V", "z.value_width")
    count = "z.queries" if name in ("q", "dy") else "z.keys"
    return (
        f"copy_tile<{inner}, {width}, {pitch}, THREADS, PACK>({tile}, {name} + ({row}) * {name}_by.row, "
        f"{count} - ({row}), {columns}, {name}_by.row, {name}_by.column);"
    )


def _tile_loop(
    row: str, count: str, first: tuple[str, str], second: tuple[str, str], walk: str, factors: Sequence[str], body: str
) -> str:
    """Goes through tiles of two inputs (name and where tiles are kept), one being copied while one is used.

    `row` is the first row of the tile in use; `walk` are the arguments that tell `next_tile` where to look. That is
    done two tiles ahead, while others are used: it may wait for memory. `factors` are made of what the block owns.
    """

    def copies(tile: str) -> str:
        return "\n            ".join(
            _copied(kind, name, f"{tiles} + buffer * INNER * {kind}", f"{tile} * INNER")
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


def _key_loop(factors: Sequence[str], body: str) -> str:
    """Through tiles `ks` and `vs` of keys and values from `key` on."""
    walk = "map, 1, map_by.row, parts, false"
    return _tile_loop("key", "z.keys", ("k", "keys"), ("v", "values"), walk, factors, body)


def _factor(kind: str, name: str, tile: str, kept: str = "KEPT") -> str:
    """16 rows of a tile that the block owns, as a factor of products."""
    width, pitch = ("D", "Q") if kind == "Q" else ("DV", "V")
    return f"Factor<Tile, {width} / 8, {pitch}, {kept}> {name}_left({tile} + own * {pitch});"


def _first_part(own: str) -> str:
    """Where a block's part of the map begins, and of how many of the map's tiles its own rows are."""
    extent, stride = ("z.queries", "map_by.row") if own == "query" else ("z.keys", "1")
    return f"map += first / INNER * {stride}; int parts = min(ROWS / INNER, ({extent} - first + INNER - 1) / INNER);"


def map_source(inner: int) -> str:
    """What the mask has in tiles of inner x inner, 1: anything allowed, 2: anything but 0. A warp looks at a tile."""
    return f"""
extern "C" __global__ void __launch_bounds__({THREADS}) KERNEL(
    const float* mask, int* map, long long tiles, int heads, int queries, int keys, int rows, int columns,
    long long by_sample, long long by_head, long long by_row, long long by_column) {{
    long long tile = (long long)blockIdx.x * {THREADS // 32} + threadIdx.x / 32;
    if (tile >= tiles) return;
    long long unit = tile / columns / rows;
    int i = (int)(tile / columns % rows) * {inner}, j = (int)(tile % columns) * {inner}, found = 0;
    mask += unit / heads * by_sample + unit % heads * by_head;
    #pragma unroll 8
    for (int at = threadIdx.x % 32; at < {inner * inner}; at += 32) {{
        int row = i + at / {inner}, column = j + at % {inner};
        if (row < queries && column < keys) {{
            float x = mask[row * by_row + column * by_column];
            found |= (x != -INFINITY_F) + 2 * (x != 0.0f);
        }}
    }}
    for (int by = 16; by; by /= 2) found |= __shfl_xor_sync(0xffffffffu, found, by);
    if (threadIdx.x % 32 == 0) map[tile] = found;
}}
"""


def forward_source(form: Form) -> str:
    """y (n, heads, l, dv) or (n, l, heads, dv), dense; logarithms of the softmax's denominators (n, heads, l)."""
    step = f"""{_SCORES}{_SOFTMAX}
        if (HAS_KEEP)
            #pragma unroll
            for (int n = 0; n < INNER / 8; ++n)
                #pragma unroll
                for (int e = 0; e < 4; ++e)
                    x[n][e] *= kept(keep, keep_by, first + own + g + e / 2 * 8, key + 8 * n + 2 * t + e % 2, z);
        #pragma unroll
        for (int n = 0; n < DV / 8; ++n)
            #pragma unroll
            for (int e = 0; e < 4; ++e) sum[n][e] *= change[e / 2];
        multiply_columns<DV / 8, INNER / 8, V>(sum, x, vs);"""
    logs = ["logs"] if form.by_token else []
    keep_log = "if (t == 0) logs[at + i] = (most[r] + log2f(denominator)) * LOG_2;" if form.by_token else ""
    return f"""{form.head}
extern "C" __global__ void {form.bounds(_FORWARD_BLOCKS)} KERNEL({form.parameters("y", *logs)}) {{
    {form.begin("z.queries", "tiles - 1 - rank", "q", "k", "v")}
    {_first_part("query")}
    Tile *qs = shared, *keys = qs + ROWS * Q, *values = keys + 2 * INNER * Q;
    {_copied("Q", "q", "qs", "first", "ROWS")}
    {_factor("Q", "q", "qs")}
    float sum[DV / 8][4] = {{}}, most[2] = {{-INFINITY_F, -INFINITY_F}}, total[2] = {{0.0f, 0.0f}};
{_key_loop(["q"], step)}
    #pragma unroll
    for (int r = 0; r < 2; ++r) {{
        float denominator = row_sum(total[r]);
        float factor = 1.0f / denominator;  // 0 times infinity, NaN, for a row without any key
        int i = first + own + g + 8 * r;
        if (i >= z.queries) continue;
        {keep_log}
        Element* to = y + {form.row("z.queries", "i")} * z.value_width;
        #pragma unroll
        for (int n = 0; n < DV / 8; ++n)
            store(to, 8 * n + 2 * t, z.value_width, sum[n][2 * r] * factor, sum[n][2 * r + 1] * factor);
    }}
}}
"""


def query_gradient_source(form: Form) -> str:
    """dq, dense; and for the other kernel, per query: the logarithm of the softmax's denominator, and sum of p dp."""
    statistics = f"""{_SCORES}{_SOFTMAX}
        float d[INNER / 8][4] = {{}};
        multiply_rows<INNER / 8, V>(d, y_left, vs);
        #pragma unroll
        for (int r = 0; r < 2; ++r) {{
            delta[r] *= change[r];
            #pragma unroll
            for (int n = 0; n < INNER / 8; ++n)
                #pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; ++e)
                    delta[r] += x[n][e] * d[n][e]
                        * kept(keep, keep_by, first + own + g + 8 * r, key + 8 * n + 2 * t + e % 2, z);
        }}"""
    step = f"""{_SCORES}
        float d[INNER / 8][4] = {{}};
        multiply_rows<INNER / 8, V>(d, y_left, vs);
        #pragma unroll
        for (int n = 0; n < INNER / 8; ++n)
            #pragma unroll
            for (int e = 0; e < 4; ++e) {{
                int i = first + own + g + e / 2 * 8, j = key + 8 * n + 2 * t + e % 2;
                float p = power(x[n][e] - most[e / 2]);  // 0 for a key that does not exist
                x[n][e] = p * (d[n][e] * kept(keep, keep_by, i, j, z) - delta[e / 2]);
            }}
        multiply_columns<D / 8, INNER / 8, Q>(sum, x, ks);"""
    if form.by_token:
        found = f"""
    #pragma unroll
    for (int r = 0; r < 2; ++r) {{
        int i = first + own + g + 8 * r, known = min(i, z.queries - 1);
        const Element *a = dy + known * dy_by.row, *b = y + {form.row("z.queries", "known")} * z.value_width;
        if (PACK > 1) {{
            #pragma unroll
            for (int c = 0; c < DV; c += 16) {{
                bool inside = c + 4 * t < z.value_width;
                const float4 p = four_inside(a, c + 4 * t, inside), q = four_inside(b, c + 4 * t, inside);
                delta[r] += p.x * q.x + p.y * q.y + p.z * q.z + p.w * q.w;
            }}
        }} else {{
            #pragma unroll
            for (int c = 0; c < DV; c += 4) {{
                int column = min(c + t, z.value_width - 1);
                float term = number(a[column * dy_by.column]) * number(b[column]);
                delta[r] += c + t < z.value_width ? term : 0.0f;
            }}
        }}
        most[r] = logs[at + known] * LOG2_E;
        delta[r] = row_sum(delta[r]);
        if (t == 0 && i < z.queries) deltas[at + i] = delta[r];
    }}"""
    else:
        found = f"""
    float total[2] = {{0.0f, 0.0f}};
    {_key_loop(["q", "y"], statistics)}
    #pragma unroll
    for (int r = 0; r < 2; ++r) {{
        total[r] = row_sum(total[r]);
        delta[r] = row_sum(delta[r]) / total[r];
        most[r] += log2f(total[r]);
        int i = first + own + g + 8 * r;
        if (t == 0 && i < z.queries) logs[at + i] = most[r] * LOG_2, deltas[at + i] = delta[r];
    }}
    __syncthreads();"""
    results = ("dq", "deltas") if form.by_token else ("dq", "logs", "deltas")
    least = "0.0f, 0.0f" if form.by_token else "-INFINITY_F, -INFINITY_F"
    return f"""{form.head}
extern "C" __global__ void {form.bounds(_GRADIENT_BLOCKS)} KERNEL({form.parameters(*results)}) {{
    {form.begin("z.queries", "tiles - 1 - rank", "dy", "q", "k", "v")}
    {_first_part("query")}
    Tile *qs = shared, *ys = qs + ROWS * Q, *keys = ys + ROWS * V, *values = keys + 2 * INNER * Q;
    {_copied("Q", "q", "qs", "first", "ROWS")}
    {_copied("V", "dy", "ys", "first", "ROWS")}
    {_factor("Q", "q", "qs")}
    {_factor("V", "y", "ys")}
    float most[2] = {{{least}}}, delta[2] = {{0.0f, 0.0f}};
{found}
    float sum[D / 8][4] = {{}};
{_key_loop(["q", "y"], step)}
    #pragma unroll
    for (int r = 0; r < 2; ++r) {{
        int i = first + own + g + 8 * r;
        if (i >= z.queries) continue;
        Element* to = dq + {form.row("z.queries", "i", of_gradient=True)} * z.width;
        // A row without any key is NaN, and so is its gradient, though all of its tiles were skipped.
        float scale = delta[r] != delta[r] ? delta[r] : z.scale;
        #pragma unroll
        for (int n = 0; n < D / 8; ++n)
            store(to, 8 * n + 2 * t, z.width, sum[n][2 * r] * scale, sum[n][2 * r + 1] * scale);
    }}
}}
"""


def key_gradient_source(form: Form) -> str:
    """dk and dv, dense; a block owns keys and goes through the queries."""
    step = """
        float log[INNER / 8][2], delta[INNER / 8][2];
        #pragma unroll
        for (int n = 0; n < INNER / 8; ++n)
            #pragma unroll
            for (int e = 0; e < 2; ++e) {
                int i = query + 8 * n + 2 * t + e, known = min(i, z.queries - 1);
                float own_log = logs[known], own_delta = deltas[known];
                log[n][e] = i < z.queries ? own_log * LOG2_E : 0.0f;
                delta[n][e] = i < z.queries ? own_delta : 0.0f;
            }
        float x[INNER / 8][4] = {}, d[INNER / 8][4] = {};
        multiply_rows<INNER / 8, Q>(x, k_left, qs);
        multiply_rows<INNER / 8, V>(d, v_left, dys);
        #pragma unroll
        for (int n = 0; n < INNER / 8; ++n)
            #pragma unroll
            for (int e = 0; e < 4; ++e) x[n][e] *= log2_scale;
        if (HAS_MASK && adds)
            #pragma unroll
            for (int n = 0; n < INNER / 8; ++n)
                #pragma unroll
                for (int e = 0; e < 4; ++e)
                    x[n][e] += added(mask, mask_by, query + 8 * n + 2 * t + e % 2, first + own + g + e / 2 * 8, z);
        // Rows of keys that do not exist get any numbers: they are never stored. Queries that do not exist are zeros in
        // both tiles, and so is what they add.
        #pragma unroll
        for (int n = 0; n < INNER / 8; ++n)
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                int i = query + 8 * n + 2 * t + e % 2, j = first + own + g + e / 2 * 8;
                float keeps = kept(keep, keep_by, i, j, z);
                float p = power(x[n][e] - log[n][e % 2]);
                d[n][e] = p * (d[n][e] * keeps - delta[n][e % 2]);
                x[n][e] = p * keeps;
            }
        multiply_columns<DV / 8, INNER / 8, V>(sum_v, x, dys);
        multiply_columns<D / 8, INNER / 8, Q>(sum_k, d, qs);"""
    walk = "map, map_by.row, 1, parts, has_nan"
    results = ("dk", "dv", "deltas") if form.by_token else ("dk", "dv", "logs", "deltas")
    return f"""{form.head}
extern "C" __global__ void {form.bounds(_GRADIENT_BLOCKS)} KERNEL({form.parameters(*results)}) {{
    {form.begin("z.keys", "rank", "dy", "q", "k", "v")}
    {_first_part("key")}
    Tile *ks = shared, *vs = ks + ROWS * Q, *queries = vs + ROWS * V, *gradients = queries + 2 * INNER * Q;
    logs += at, deltas += at;
    {_copied("Q", "k", "ks", "first", "ROWS")}
    {_copied("V", "v", "vs", "first", "ROWS")}
    {_factor("Q", "k", "ks", "KEPT && sizeof(Tile) == 2")}
    {_factor("V", "v", "vs", "false")}
    // A query without any key is NaN, and so is what it gives to every key: then no tile is skipped.
    bool has_nan = false;
    if (HAS_MAP) {{
        for (int i = threadIdx.x; i < z.queries; i += THREADS) has_nan = has_nan || deltas[i] != deltas[i];
        has_nan = __syncthreads_or(has_nan);
    }}
    float sum_k[D / 8][4] = {{}}, sum_v[DV / 8][4] = {{}};
{_tile_loop("query", "z.queries", ("q", "queries"), ("dy", "gradients"), walk, ["k", "v"], step)}
    #pragma unroll
    for (int r = 0; r < 2; ++r) {{
        int j = first + own + g + 8 * r;
        if (j >= z.keys) continue;
        long long row = {form.row("z.keys", "j", of_gradient=True)};
        Element *to_k = dk + row * z.width, *to_v = dv + row * z.value_width;
        #pragma unroll
        for (int n = 0; n < D / 8; ++n)
            store(to_k, 8 * n + 2 * t, z.width, sum_k[n][2 * r] * z.scale, sum_k[n][2 * r + 1] * z.scale);
        #pragma unroll
        for (int n = 0; n < DV / 8; ++n)
            store(to_v, 8 * n + 2 * t, z.value_width, sum_v[n][2 * r], sum_v[n][2 * r + 1]);
    }}
}}
"""
