"""CUDA C++ of the LSTM's recurrence: all time steps in one kernel, a few samples per block.

Samples do not see each other, so blocks never wait for each other. A thread owns one row of the recurrent weights (of
their transpose, backward) and keeps as much of it as fits in registers, then shared memory; only the rest is read from
the cache at every time step. `FORWARD` and `BACKWARD` read what the next time step needs before they multiply.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Hidden units up to which a block's threads have one row each.
MOST_HIDDEN = 256


@dataclass(frozen=True)
class Form:
    """What the text depends on.

    hidden         units
    samples        per block
    length_type    of the sequences' lengths in CUDA C++; empty without them
    shared_bytes   that a block may use for weights
    rows           of the recurrent weights, per unit
    """

    hidden: int
    samples: int
    reverse: bool
    length_type: str
    shared_bytes: int
    rows: int = 4

    @property
    def threads(self) -> int:
        return max(32, -(-self.rows * self.hidden // 32) * 32)

    @property
    def fours(self) -> int:
        """Groups of four weights in a row."""
        return -(-self.hidden // 4)

    @property
    def in_registers(self) -> int:
        """Groups of a row that are kept in registers."""
        most = 28 if self.threads <= 256 else 18 if self.threads <= 512 else 5
        return min(self.fours, max(0, most - 2 * (self.samples - 1)))

    @property
    def in_shared(self) -> int:
        """Groups of a row that are kept in shared memory."""
        return min(self.fours - self.in_registers, self.shared_bytes // (16 * self.threads))

    @property
    def dynamic_bytes(self) -> int:
        return 16 * self.threads * self.in_shared

    @property
    def constants(self) -> str:
        return (
            f"    const int H = {self.hidden}, G = {self.rows * self.hidden}, S = {self.samples}, T = {self.threads};\n"
            f"    const int FOURS = {self.fours}, REGS = {self.in_registers}, SHARED = {self.in_shared};"
        )

    @property
    def lengths(self) -> str:
        """A parameter, or nothing."""
        return f", const {self.length_type}* lengths, long long lengths_stride, int* status" if self.length_type else ""

    def length_of(self, check: bool) -> str:
        """Statements: `length[s]` of each of the block's samples."""
        if not self.length_type:
            return "length[s] = steps;"
        checked = "if (threadIdx.x == 0) { status[0] = 1; status[1] = (int)given; }" if check else ""
        return f"""long long given = (long long)lengths[(first + s) * lengths_stride];
            if (given < 1 || given > steps) {{ {checked} given = given < 1 ? 1 : steps; }}
            length[s] = (int)given;"""

    def macros(self, weight: str) -> str:
        """Before a kernel's parameters: how it reads its weights, and what it is."""
        return f"""#define WEIGHT(k) ((k) < H ? weights[{weight}] : 0.0f)
#define WEIGHTS(k) make_float4(WEIGHT(4 * (k)), WEIGHT(4 * (k) + 1), WEIGHT(4 * (k) + 2), WEIGHT(4 * (k) + 3))
extern "C" __global__ void __launch_bounds__({self.threads}, 1) KERNEL("""

    def begin(self, check: bool) -> str:
        """Statements: which row a thread has (`j`; part `q` and `unit` of it), lengths, and loading its weights."""
        return f"""    int j = threadIdx.x, first = blockIdx.x * S;
    [[maybe_unused]] int q = j / H, unit = j % H;
    int length[S];
    for (int s = 0; s < S; ++s) {{
        length[s] = 0;
        if (first + s < n) {{
            {self.length_of(check)}
        }}
    }}

    float4 kept[REGS > 0 ? REGS : 1];
    extern __shared__ float4 cached[];
    if (j < G) {{
        #pragma unroll
        for (int k = 0; k < REGS; ++k) kept[k] = WEIGHTS(k);
        for (int k = 0; k < SHARED; ++k) cached[k * T + j] = WEIGHTS(REGS + k);
    }}
"""


#: Where the k-th weight of a thread's row lies: of the recurrent weights, or of their transpose.
FORWARD_WEIGHT = "(long long)(k) * G + j"
BACKWARD_WEIGHT = "(q * H + (k)) * weights_row + unit * weights_column"


def multiply(vector: str) -> str:
    """Statements: sum[s] += a row of weights times a vector in shared memory."""
    return f"""
            #pragma unroll
            for (int k = 0; k < REGS; ++k) {{
                #pragma unroll
                for (int s = 0; s < S; ++s) {{
                    float4 v = *(const float4*)&{vector}[4 * k];
                    sum[s] += kept[k].x * v.x + kept[k].y * v.y + kept[k].z * v.z + kept[k].w * v.w;
                }}
            }}
            #pragma unroll 4
            for (int k = 0; k < SHARED; ++k) {{
                float4 m = cached[k * T + j];
                #pragma unroll
                for (int s = 0; s < S; ++s) {{
                    float4 v = *(const float4*)&{vector}[4 * (REGS + k)];
                    sum[s] += m.x * v.x + m.y * v.y + m.z * v.z + m.w * v.w;
                }}
            }}
            #pragma unroll 4
            for (int k = REGS + SHARED; k < FOURS; ++k) {{
                float4 m = WEIGHTS(k);
                #pragma unroll
                for (int s = 0; s < S; ++s) {{
                    float4 v = *(const float4*)&{vector}[4 * k];
                    sum[s] += m.x * v.x + m.y * v.y + m.z * v.z + m.w * v.w;
                }}
            }}"""


def forward_source(form: Form) -> str:
    """gates holds x wxᵀ and becomes the gates; weights is whᵀ (h, 4h)."""
    time = "steps - 1 - step" if form.reverse else "step"
    return f"""
{form.macros(FORWARD_WEIGHT)}
    float* gates, const float* weights, const float* bias, const float* h0, const float* c0,
    float* y, float* last_h, float* last_c, float* cells, int n, int steps, long long bias_stride,
    long long h0_row, long long h0_column, long long c0_row, long long c0_column{form.lengths}) {{
{form.constants}
    __align__(16) __shared__ float hs[S][4 * FOURS];
    __shared__ float zs[S][G];
{form.begin(True)}
    float c[S], z[S];
    float b = j < G ? bias[j * bias_stride] : 0.0f;
    for (int s = 0; s < S; ++s) {{
        bool inside = first + s < n;
        c[s] = inside && j < H ? c0[(first + s) * c0_row + j * c0_column] : 0.0f;
        for (int k = j; k < 4 * FOURS; k += T)
            hs[s][k] = inside && k < H ? h0[(first + s) * h0_row + k * h0_column] : 0.0f;
        int t = {"steps - 1" if form.reverse else "0"};
        z[s] = inside && j < G ? gates[((long long)(first + s) * steps + t) * G + j] : 0.0f;
    }}
    __syncthreads();
    for (int step = 0; step < steps; ++step) {{
        int t = {time};
        float sum[S];
        #pragma unroll
        for (int s = 0; s < S; ++s) sum[s] = z[s] + b;
        if (j < G) {{
            if (step + 1 < steps) {{
                int after = t + {-1 if form.reverse else 1};
                #pragma unroll
                for (int s = 0; s < S; ++s)
                    if (first + s < n) z[s] = gates[((long long)(first + s) * steps + after) * G + j];
            }}
{multiply("hs[s]")}
            #pragma unroll
            for (int s = 0; s < S; ++s) {{
                float gate = j / H == 2 ? tanhf(sum[s]) : sigmoid(sum[s]);
                zs[s][j] = gate;
                if (first + s < n)
                    gates[((long long)(first + s) * steps + t) * G + j] = t < length[s] ? gate : 0.0f;
            }}
        }}
        __syncthreads();
        if (j < H) {{
            #pragma unroll
            for (int s = 0; s < S; ++s) {{
                if (first + s >= n) continue;
                bool now = t < length[s];
                float next = zs[s][H + j] * c[s] + zs[s][j] * zs[s][2 * H + j];
                if (now) c[s] = next;
                float h = zs[s][3 * H + j] * tanhf(c[s]);
                if (now) hs[s][j] = h;
                long long at = ((long long)(first + s) * steps + t) * H + j;
                y[at] = now ? h : 0.0f;
                cells[at] = c[s];
            }}
        }}
        __syncthreads();
    }}
    if (j < H)
        for (int s = 0; s < S; ++s)
            if (first + s < n) {{
                last_h[(long long)(first + s) * H + j] = hs[s][j];
                last_c[(long long)(first + s) * H + j] = c[s];
            }}
}}
"""


def backward_source(form: Form) -> str:
    """Writes dz (n, t, 4h), the hidden state before every time (n, t, h), and every block's part of db."""
    time = "step" if form.reverse else "steps - 1 - step"
    earlier = 1 if form.reverse else -1  # towards the time that was visited before
    return f"""
{form.macros(BACKWARD_WEIGHT)}
    const float* dy, const float* dh_last, const float* dc_last, const float* weights, const float* h0, const float* c0,
    const float* y, const float* gates, const float* cells, float* dz, float* before, float* db_parts,
    float* dh0, float* dc0, int n, int steps, long long dy_row, long long dy_time, long long dy_column,
    long long dh_row, long long dh_column, long long dc_row, long long dc_column,
    long long weights_row, long long weights_column,
    long long h0_row, long long h0_column, long long c0_row, long long c0_column{form.lengths}) {{
{form.constants}
    __align__(16) __shared__ float dzs[S][4][4 * FOURS];
    __shared__ float parts[S][G];
{form.begin(False)}
    for (int at = j; at < S * 16 * FOURS; at += T) (&dzs[0][0][0])[at] = 0.0f;
    // Of the time step to come: gates, the cell state after it and before it, dy, and the hidden state before it.
    float gi[S], gf[S], gg[S], go[S], cell[S], cell_before[S], d[S], h_before[S], dh[S], dc[S];
    float db = 0.0f;
    #define READ(s, t) {{ \\
        long long row = (long long)(first + s) * steps + (t); \\
        gi[s] = gates[row * G + j], gf[s] = gates[row * G + H + j]; \\
        gg[s] = gates[row * G + 2 * H + j], go[s] = gates[row * G + 3 * H + j]; \\
        d[s] = dy[(first + s) * dy_row + (t) * dy_time + j * dy_column]; \\
        int old = (t) + ({earlier}); \\
        bool is_first = old < 0 || old >= steps; \\
        cell_before[s] = is_first ? c0[(first + s) * c0_row + j * c0_column] : cells[(row + ({earlier})) * H + j]; \\
        h_before[s] = is_first || old >= length[s] ? h0[(first + s) * h0_row + j * h0_column] \\
                                                  : y[(row + ({earlier})) * H + j]; \\
    }}
    if (j < H)
        for (int s = 0; s < S; ++s)
            if (first + s < n) {{
                int t = {"0" if form.reverse else "steps - 1"};
                dh[s] = dh_last[(first + s) * dh_row + j * dh_column];
                dc[s] = dc_last[(first + s) * dc_row + j * dc_column];
                cell[s] = cells[((long long)(first + s) * steps + t) * H + j];
                READ(s, t)
            }}
    __syncthreads();
    for (int step = 0; step < steps; ++step) {{
        int t = {time};
        if (j < H) {{
            #pragma unroll
            for (int s = 0; s < S; ++s) {{
                if (first + s >= n) continue;
                bool now = t < length[s];
                float squashed = tanhf(cell[s]), dh_now = dh[s] + d[s];
                float dc_now = dc[s] + dh_now * go[s] * (1.0f - squashed * squashed);
                float zi = now ? dc_now * gg[s] * gi[s] * (1.0f - gi[s]) : 0.0f;
                float zf = now ? dc_now * cell_before[s] * gf[s] * (1.0f - gf[s]) : 0.0f;
                float zg = now ? dc_now * gi[s] * (1.0f - gg[s] * gg[s]) : 0.0f;
                float zo = now ? dh_now * squashed * go[s] * (1.0f - go[s]) : 0.0f;
                if (now) dc[s] = dc_now * gf[s];
                dzs[s][0][j] = zi, dzs[s][1][j] = zf, dzs[s][2][j] = zg, dzs[s][3][j] = zo;
                long long row = (long long)(first + s) * steps + t;
                dz[row * G + j] = zi, dz[row * G + H + j] = zf;
                dz[row * G + 2 * H + j] = zg, dz[row * G + 3 * H + j] = zo;
                before[row * H + j] = h_before[s];
                cell[s] = cell_before[s];
            }}
        }}
        __syncthreads();
        if (j < H && step + 1 < steps) {{
            int after = t + ({earlier});
            #pragma unroll
            for (int s = 0; s < S; ++s)
                if (first + s < n) READ(s, after)
        }}
        if (j < G) {{
            float sum[S];
            #pragma unroll
            for (int s = 0; s < S; ++s) sum[s] = 0.0f, db += dzs[s][q][unit];
{multiply("dzs[s][q]")}
            #pragma unroll
            for (int s = 0; s < S; ++s) parts[s][j] = sum[s];
        }}
        __syncthreads();
        if (j < H) {{
            #pragma unroll
            for (int s = 0; s < S; ++s)
                if (t < length[s])
                    dh[s] = (parts[s][j] + parts[s][H + j]) + (parts[s][2 * H + j] + parts[s][3 * H + j]);
        }}
    }}
    if (j < H)
        for (int s = 0; s < S; ++s)
            if (first + s < n) {{
                dh0[(long long)(first + s) * H + j] = dh[s];
                dc0[(long long)(first + s) * H + j] = dc[s];
            }}
    if (j < G) db_parts[(long long)blockIdx.x * G + j] = db;
}}
"""
