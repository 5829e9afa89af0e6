"""CUDA C++ of attention and its gradient: scores exist only as tiles in registers.

A block has 4 warps; each owns 16 of the block's 64 queries (of its keys, for the gradients of keys and values) and goes
through all keys (queries), a tile at a time. The softmax's maximum and sum are carried along and corrected when a
larger score appears. The gradient goes through the keys twice, for the softmax first, then for dq; a second kernel
makes dk and dv. Nothing is added in an order that depends on the run.

Tiles in which the mask forbids everything, half of them where it is causal, are skipped.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlcompute.devices.cuda.codegen.tensor_cores import PADDING, tensor_core_text

#: Rows that a block owns, and its threads.
ROWS, THREADS = 64, 128


@dataclass(frozen=True)
class Form:
    """What the text depends on: extents of queries and values rounded up to 8, options, and how elements are read.

    inner   rows of the tiles that a block goes through
    packed  may rows be read four elements at a time?
    narrow  are queries, keys, values and their gradients bfloat16? Masks, and what is computed, are float32
    """

    width: int
    value_width: int
    inner: int
    has_mask: bool
    has_keep: bool
    exact: bool
    packed: bool
    narrow: bool = False

    @property
    def pitches(self) -> tuple[int, int]:
        return self.width + PADDING, self.value_width + PADDING

    def shared_bytes(self, *tiles: tuple[int, int]) -> int:
        """Of tiles given as (rows, pitch)."""
        return 4 * sum(rows * pitch for rows, pitch in tiles)

    @property
    def forward_bytes(self) -> int:
        q, v = self.pitches
        return self.shared_bytes((ROWS, q), (self.inner, q), (self.inner, v), self._mask_tile)

    @property
    def gradient_bytes(self) -> int:
        q, v = self.pitches
        tiles = (ROWS, q), (ROWS, v), (self.inner, q), (self.inner, v), (2, self.inner), self._mask_tile
        return self.shared_bytes(*tiles)

    @property
    def _mask_tile(self) -> tuple[int, int]:
        """The larger of the two that kernels have."""
        return (ROWS, self.inner + 8) if self.has_mask else (0, 0)

    @property
    def head(self) -> str:
        """Functions, constants, and the parameters all kernels have."""
        q, v = self.pitches
        return f"""{tensor_core_text(self.exact)}
enum {{ ROWS = {ROWS}, THREADS = {THREADS}, D = {self.width}, DV = {self.value_width}, INNER = {self.inner} }};
enum {{ Q = {q}, V = {v}, MASK = INNER + 8, PACK = {4 if self.packed else 1} }};
enum {{ HAS_MASK = {int(self.has_mask)}, HAS_KEEP = {int(self.has_keep)} }};
struct Strides {{ long long sample, head, row, column; }};
struct Sizes {{ int heads, queries, keys, width, value_width; float scale; }};
using Element = {"bfloat16" if self.narrow else "float"};
__device__ __forceinline__ Element element(float x) {{ return {"to_bfloat16(x)" if self.narrow else "x"}; }}
template <typename T>
__device__ __forceinline__ const T* start(const T* p, Strides by, long long unit, int heads) {{
    return p + unit / heads * by.sample + unit % heads * by.head;
}}
// A score as softmax sees it; -inf where there is no key.
__device__ __forceinline__ float score(float product, float mask, int j, Sizes z) {{
    return j < z.keys ? (HAS_MASK ? product * z.scale + mask : product * z.scale) : -INFINITY_F;
}}
// The mask of queries from i and keys from j on, as a tile of R x C whose rows are P apart: is anything allowed there?
// All threads of the block call it together; what they did with the last tile is done when it returns.
template <int R, int C, int P>
__device__ __forceinline__ bool load_mask(float* tile, const float* mask, Strides by, int i, int j, Sizes z) {{
    __shared__ int allowed;
    __syncthreads();
    if (!HAS_MASK) return true;
    if (threadIdx.x == 0) allowed = 0;
    __syncthreads();
    bool any = false;
    for (int at = threadIdx.x; at < R * C; at += THREADS) {{
        int row = at / C, column = at % C;
        bool inside = i + row < z.queries && j + column < z.keys;
        float x = inside ? mask[(i + row) * by.row + (j + column) * by.column] : 0.0f;
        tile[row * P + column] = x;
        any = any || (inside && x != -INFINITY_F);
    }}
    if (any) allowed = 1;
    __syncthreads();
    return allowed;
}}
__device__ __forceinline__ float kept(const float* keep, Strides by, int i, int j, Sizes z) {{
    return HAS_KEEP && i < z.queries && j < z.keys ? keep[i * by.row + j * by.column] : 1.0f;
}}
// Over the four lanes that share a row.
__device__ __forceinline__ float row_max(float x) {{
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}}
__device__ __forceinline__ float row_sum(float x) {{
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}}
"""

    def parameters(self, *results: str) -> str:
        """Pointers and numbers, in the order in which `attention.py` gives them."""
        inputs = ["q", "k", "v", *(["mask"] if self.has_mask else []), *(["keep"] if self.has_keep else [])]
        if len(results) > 1:
            inputs.insert(0, "dy")
        pointers = [f"const {'float' if name in ('mask', 'keep') else 'Element'}* {name}" for name in inputs]
        made = [f"{'float' if name in ('logs', 'deltas') else 'Element'}* {name}" for name in results]
        return ", ".join([*pointers, *made, *(f"Strides {name}_by" for name in inputs), "Sizes z"])

    @property
    def options(self) -> str:
        """Statements: where a block's mask and keep begin; nothing is read where there is none."""
        lines = []
        for name, present in (("mask", self.has_mask), ("keep", self.has_keep)):
            if present:
                lines.append(f"{name} = start({name}, {name}_by, unit, z.heads);")
            else:
                lines.append(f"const float* {name} = 0; Strides {name}_by = {{0, 0, 0, 0}};")
        return " ".join(lines)


#: What every block begins with: which rows of which head of which sample it owns, and which of them the lane has.
_BEGIN = """
    extern __shared__ __align__(16) float shared[];
    long long tiles = ({count} + ROWS - 1) / ROWS, unit = blockIdx.x / tiles;
    int first = (int)(blockIdx.x % tiles) * ROWS, own = threadIdx.x / 32 * 16;
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
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
            change[r] = expf(most[r] - base);
            most[r] = best;
            total[r] *= change[r];
            #pragma unroll
            for (int n = 0; n < INNER / 8; ++n)
                #pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; ++e) {
                    x[n][e] = expf(x[n][e] - base);
                    total[r] += x[n][e];
                }
        }
"""

_SCORES = """
        float x[INNER / 8][4] = {};
        multiply_rows<INNER / 8, D / 8, Q, Q>(x, qs + own * Q, ks);
        #pragma unroll
        for (int n = 0; n < INNER / 8; ++n)
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                float m = HAS_MASK ? ms[(own + g + e / 2 * 8) * MASK + 8 * n + 2 * t + e % 2] : 0.0f;
                x[n][e] = score(x[n][e], m, key + 8 * n + 2 * t + e % 2, z);
            }
"""

_KEYS = """
        if (!load_mask<ROWS, INNER, MASK>(ms, mask, mask_by, first, key, z) && !{needed}) continue;
        load_tile<INNER, D, Q, THREADS, PACK>(ks, k + key * k_by.row, z.keys - key, z.width, k_by.row, k_by.column);
        load_tile<INNER, DV, V, THREADS, PACK>(
            vs, v + key * v_by.row, z.keys - key, z.value_width, v_by.row, v_by.column);
        __syncthreads();
"""


def _keys(needed: str) -> str:
    """Loads tiles of keys and values; goes on to the next where everything is forbidden, unless it is needed."""
    return _KEYS.replace("{needed}", needed)


def forward_source(form: Form) -> str:
    """y (n, heads, l, dv), dense."""
    return f"""{form.head}
extern "C" __global__ void __launch_bounds__({THREADS}) KERNEL({form.parameters("y")}) {{
{_BEGIN.format(count="z.queries")}
    float *qs = shared, *ks = qs + ROWS * Q, *vs = ks + INNER * Q, *ms = vs + INNER * V;
    q = start(q, q_by, unit, z.heads), k = start(k, k_by, unit, z.heads), v = start(v, v_by, unit, z.heads);
    {form.options}
    load_tile<ROWS, D, Q, THREADS, PACK>(
        qs, q + first * q_by.row, z.queries - first, z.width, q_by.row, q_by.column);
    float sum[DV / 8][4] = {{}}, most[2] = {{-INFINITY_F, -INFINITY_F}}, total[2] = {{0.0f, 0.0f}};
    for (int key = 0; key < z.keys; key += INNER) {{
{_keys("false")}{_SCORES}{_SOFTMAX}
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
        multiply_columns<DV / 8, INNER / 8, V>(sum, x, vs);
    }}
    #pragma unroll
    for (int r = 0; r < 2; ++r) {{
        float all = row_sum(total[r]);
        int i = first + own + g + 8 * r;
        if (i >= z.queries) continue;
        Element* to = y + (unit * z.queries + i) * z.value_width;
        #pragma unroll
        for (int n = 0; n < DV / 8; ++n)
            #pragma unroll
            for (int e = 0; e < 2; ++e)
                if (8 * n + 2 * t + e < z.value_width) to[8 * n + 2 * t + e] = element(sum[n][2 * r + e] / all);
    }}
}}
"""


def query_gradient_source(form: Form) -> str:
    """dq, dense; and for the other kernel, per query: log of the softmax's denominator, and sum of p dp."""
    return f"""{form.head}
extern "C" __global__ void __launch_bounds__({THREADS}) KERNEL({form.parameters("dq", "logs", "deltas")}) {{
{_BEGIN.format(count="z.queries")}
    float *qs = shared, *ys = qs + ROWS * Q, *ks = ys + ROWS * V, *vs = ks + INNER * Q, *ms = vs + INNER * V;
    q = start(q, q_by, unit, z.heads), k = start(k, k_by, unit, z.heads), v = start(v, v_by, unit, z.heads);
    dy = start(dy, dy_by, unit, z.heads);
    {form.options}
    load_tile<ROWS, D, Q, THREADS, PACK>(
        qs, q + first * q_by.row, z.queries - first, z.width, q_by.row, q_by.column);
    load_tile<ROWS, DV, V, THREADS, PACK>(
        ys, dy + first * dy_by.row, z.queries - first, z.value_width, dy_by.row, dy_by.column);
    float most[2] = {{-INFINITY_F, -INFINITY_F}}, total[2] = {{0.0f, 0.0f}}, delta[2] = {{0.0f, 0.0f}};
    for (int key = 0; key < z.keys; key += INNER) {{
{_keys("false")}{_SCORES}{_SOFTMAX}
        float d[INNER / 8][4] = {{}};
        multiply_rows<INNER / 8, DV / 8, V, V>(d, ys + own * V, vs);
        #pragma unroll
        for (int r = 0; r < 2; ++r) {{
            delta[r] *= change[r];
            #pragma unroll
            for (int n = 0; n < INNER / 8; ++n)
                #pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; ++e)
                    delta[r] += x[n][e] * d[n][e]
                        * kept(keep, keep_by, first + own + g + 8 * r, key + 8 * n + 2 * t + e % 2, z);
        }}
    }}
    // A row without any key is NaN, and so is its gradient, wherever it comes from.
    __shared__ int nan_rows;
    if (threadIdx.x == 0) nan_rows = 0;
    __syncthreads();
    #pragma unroll
    for (int r = 0; r < 2; ++r) {{
        float all = row_sum(total[r]);
        if (all == 0.0f && first + own + g + 8 * r < z.queries) nan_rows = 1;
        delta[r] = row_sum(delta[r]) / all;
        most[r] += logf(all);
        int i = first + own + g + 8 * r;
        if (t == 0 && i < z.queries) logs[unit * z.queries + i] = most[r], deltas[unit * z.queries + i] = delta[r];
    }}
    __syncthreads();
    bool is_nan = nan_rows;
    float sum[D / 8][4] = {{}};
    for (int key = 0; key < z.keys; key += INNER) {{
{_keys("is_nan")}{_SCORES}
        float d[INNER / 8][4] = {{}};
        multiply_rows<INNER / 8, DV / 8, V, V>(d, ys + own * V, vs);
        #pragma unroll
        for (int n = 0; n < INNER / 8; ++n)
            #pragma unroll
            for (int e = 0; e < 4; ++e) {{
                int j = key + 8 * n + 2 * t + e % 2;
                float keeps = kept(keep, keep_by, first + own + g + e / 2 * 8, j, z);
                float p = j < z.keys ? expf(x[n][e] - most[e / 2]) : 0.0f;
                x[n][e] = p * (d[n][e] * keeps - delta[e / 2]) * z.scale;
            }}
        multiply_columns<D / 8, INNER / 8, Q>(sum, x, ks);
    }}
    #pragma unroll
    for (int n = 0; n < D / 8; ++n)
        #pragma unroll
        for (int e = 0; e < 4; ++e) {{
            int i = first + own + g + e / 2 * 8, column = 8 * n + 2 * t + e % 2;
            if (i < z.queries && column < z.width) dq[(unit * z.queries + i) * z.width + column] = element(sum[n][e]);
        }}
}}
"""


def key_gradient_source(form: Form) -> str:
    """dk and dv, dense; a block owns keys and goes through the queries."""
    return f"""{form.head}
extern "C" __global__ void __launch_bounds__({THREADS}) KERNEL({form.parameters("dk", "dv", "logs", "deltas")}) {{
{_BEGIN.format(count="z.keys")}
    float *ks = shared, *vs = ks + ROWS * Q, *qs = vs + ROWS * V, *ys = qs + INNER * Q, *stats = ys + INNER * V;
    float* ms = stats + 2 * INNER;
    q = start(q, q_by, unit, z.heads), k = start(k, k_by, unit, z.heads), v = start(v, v_by, unit, z.heads);
    dy = start(dy, dy_by, unit, z.heads);
    {form.options}
    load_tile<ROWS, D, Q, THREADS, PACK>(ks, k + first * k_by.row, z.keys - first, z.width, k_by.row, k_by.column);
    load_tile<ROWS, DV, V, THREADS, PACK>(
        vs, v + first * v_by.row, z.keys - first, z.value_width, v_by.row, v_by.column);
    float sum_k[D / 8][4] = {{}}, sum_v[DV / 8][4] = {{}};
    for (int query = 0; query < z.queries; query += INNER) {{
        bool any = load_mask<INNER, ROWS, ROWS + {PADDING}>(ms, mask, mask_by, query, first, z);
        for (int at = threadIdx.x; at < INNER; at += THREADS) {{
            bool inside = query + at < z.queries;
            stats[at] = inside ? logs[unit * z.queries + query + at] : 0.0f;
            stats[INNER + at] = inside ? deltas[unit * z.queries + query + at] : 0.0f;
        }}
        if (!any) {{
            // A row without any key is NaN, and so is what it gives to every key.
            __syncthreads();
            bool is_nan = false;
            for (int at = 0; at < INNER; ++at) is_nan = is_nan || stats[INNER + at] != stats[INNER + at];
            if (!is_nan) continue;
        }}
        load_tile<INNER, D, Q, THREADS, PACK>(
            qs, q + query * q_by.row, z.queries - query, z.width, q_by.row, q_by.column);
        load_tile<INNER, DV, V, THREADS, PACK>(
            ys, dy + query * dy_by.row, z.queries - query, z.value_width, dy_by.row, dy_by.column);
        __syncthreads();
        float x[INNER / 8][4] = {{}}, d[INNER / 8][4] = {{}};
        multiply_rows<INNER / 8, D / 8, Q, Q>(x, ks + own * Q, qs);
        multiply_rows<INNER / 8, DV / 8, V, V>(d, vs + own * V, ys);
        #pragma unroll
        for (int n = 0; n < INNER / 8; ++n)
            #pragma unroll
            for (int e = 0; e < 4; ++e) {{
                int at = 8 * n + 2 * t + e % 2, i = query + at, j = first + own + g + e / 2 * 8;
                float keeps = kept(keep, keep_by, i, j, z);
                bool inside = i < z.queries && j < z.keys;
                float m = HAS_MASK ? ms[at * (ROWS + {PADDING}) + own + g + e / 2 * 8] : 0.0f;
                float p = inside ? expf(score(x[n][e], m, j, z) - stats[at]) : 0.0f;
                d[n][e] = inside ? p * (d[n][e] * keeps - stats[INNER + at]) * z.scale : 0.0f;
                x[n][e] = p * keeps;
            }}
        multiply_columns<DV / 8, INNER / 8, V>(sum_v, x, ys);
        multiply_columns<D / 8, INNER / 8, Q>(sum_k, d, qs);
    }}
    #pragma unroll
    for (int n = 0; n < (D > DV ? D : DV) / 8; ++n)
        #pragma unroll
        for (int e = 0; e < 4; ++e) {{
            int j = first + own + g + e / 2 * 8, column = 8 * n + 2 * t + e % 2;
            if (j >= z.keys) continue;
            long long row = unit * z.keys + j;
            if (n < D / 8 && column < z.width) dk[row * z.width + column] = element(sum_k[n < D / 8 ? n : 0][e]);
            if (n < DV / 8 && column < z.value_width)
                dv[row * z.value_width + column] = element(sum_v[n < DV / 8 ? n : 0][e]);
        }}
}}
"""
