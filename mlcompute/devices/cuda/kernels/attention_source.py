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

from mlcompute.devices.cuda.kernels.attention_tiles import (
    SCORES,
    SOFTMAX,
    THREADS,
    Form,
    copied,
    factor,
    first_part,
    key_loop,
    tile_loop,
)

#: Blocks that find room on a multiprocessor together, of the kernels for attention and for its gradient.
_FORWARD_BLOCKS, _GRADIENT_BLOCKS = 4, 3


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
    step = f"""{SCORES}{SOFTMAX}
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
    {first_part("query")}
    Tile *qs = shared, *keys = qs + ROWS * Q, *values = keys + 2 * INNER * Q;
    {copied("Q", "q", "qs", "first", "ROWS")}
    {factor("Q", "q", "qs")}
    float sum[DV / 8][4] = {{}}, most[2] = {{-INFINITY_F, -INFINITY_F}}, total[2] = {{0.0f, 0.0f}};
{key_loop(["q"], step)}
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
    statistics = f"""{SCORES}{SOFTMAX}
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
    step = f"""{SCORES}
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
    {key_loop(["q", "y"], statistics)}
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
    {first_part("query")}
    Tile *qs = shared, *ys = qs + ROWS * Q, *keys = ys + ROWS * V, *values = keys + 2 * INNER * Q;
    {copied("Q", "q", "qs", "first", "ROWS")}
    {copied("V", "dy", "ys", "first", "ROWS")}
    {factor("Q", "q", "qs")}
    {factor("V", "y", "ys")}
    float most[2] = {{{least}}}, delta[2] = {{0.0f, 0.0f}};
{found}
    float sum[D / 8][4] = {{}};
{key_loop(["q", "y"], step)}
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
    {first_part("key")}
    Tile *ks = shared, *vs = ks + ROWS * Q, *queries = vs + ROWS * V, *gradients = queries + 2 * INNER * Q;
    logs += at, deltas += at;
    {copied("Q", "k", "ks", "first", "ROWS")}
    {copied("V", "v", "vs", "first", "ROWS")}
    {factor("Q", "k", "ks", "KEPT && sizeof(Tile) == 2")}
    {factor("V", "v", "vs", "false")}
    // A query without any key is NaN, and so is what it gives to every key: then no tile is skipped.
    bool has_nan = false;
    if (HAS_MAP) {{
        for (int i = threadIdx.x; i < z.queries; i += THREADS) has_nan = has_nan || deltas[i] != deltas[i];
        has_nan = __syncthreads_or(has_nan);
    }}
    float sum_k[D / 8][4] = {{}}, sum_v[DV / 8][4] = {{}};
{tile_loop("query", "z.queries", ("q", "queries"), ("dy", "gradients"), walk, ["k", "v"], step)}
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
