"""CUDA C++ of GRUs and simple recurrent layers: all times in one kernel as in `lstm_source`, or one time per kernel.

A cell is a few statements per hidden unit. Forward they turn the sums `z[]` into what is kept of them and make `next`
of the state `h`; backward they make `d[]`, the gradients of the sums, of `dh` and the kept `g[]`, and set `through`,
what of dh goes to the time before as it is.
"""

from __future__ import annotations

from mlcompute.devices.cuda.codegen.indexing import BLOCK
from mlcompute.devices.cuda.kernels.lstm_source import BACKWARD_WEIGHT, FORWARD_WEIGHT, Form, multiply
from mlcompute.ops.rnn import CELLS

_FORWARD = {
    "gru": """float reset = sigmoid(z[1]), update = sigmoid(z[2]), made = tanhf(z[0] + reset * z[3]);
        z[0] = made, z[1] = reset, z[2] = update;
        float next = made + update * (h - made);""",
    "tanh": "float next = tanhf(z[0]); z[0] = next;",
    "relu": "float next = z[0] < 0.0f ? 0.0f : z[0]; z[0] = next;",
}
_BACKWARD = {
    "gru": """float through = dh * g[2];
        d[0] = (dh - through) * (1.0f - g[0] * g[0]);
        d[1] = d[0] * g[3] * g[1] * (1.0f - g[1]);
        d[2] = through * (h - g[0]) * (1.0f - g[2]);
        d[3] = d[0] * g[1];""",
    "tanh": "float through = 0.0f; d[0] = dh * (1.0f - g[0] * g[0]);",
    "relu": "float through = 0.0f; d[0] = g[0] > 0.0f ? dh : 0.0f;",
}


def _constants(cell: str) -> str:
    """Parts of the sums: all, those of the inputs, and the first of those of the hidden state."""
    rule = CELLS[cell]
    first = rule.gates - rule.hidden_gates
    return f"    const int GATES = {rule.gates}, INPUT = {rule.input_gates}, FIRST = {first};"


def forward_source(cell: str, form: Form) -> str:
    """gates holds x wxᵀ in its leading parts and becomes the gates; weights is whᵀ (h, hidden gates * h)."""
    return f"""
{form.macros(FORWARD_WEIGHT)}
    float* gates, const float* weights, const float* bias, const float* h0, float* y, float* last_h, int n, int steps,
    long long bias_stride, long long h0_row, long long h0_column{form.lengths}) {{
{form.constants}
{_constants(cell)}
    __align__(16) __shared__ float hs[S][4 * FOURS];
    __shared__ float zs[S][G];
{form.begin(True)}
    float b[GATES], x[S][INPUT];
    for (int k = 0; k < GATES; ++k) b[k] = j < H ? bias[(k * H + j) * bias_stride] : 0.0f;
    for (int s = 0; s < S; ++s)
        for (int k = j; k < 4 * FOURS; k += T)
            hs[s][k] = first + s < n && k < H ? h0[(first + s) * h0_row + k * h0_column] : 0.0f;
    __syncthreads();
    for (int step = 0; step < steps; ++step) {{
        int t = {"steps - 1 - step" if form.reverse else "step"};
        if (j < H) {{
            #pragma unroll
            for (int s = 0; s < S; ++s)
                #pragma unroll
                for (int k = 0; k < INPUT; ++k)
                    if (first + s < n) x[s][k] = gates[((long long)(first + s) * steps + t) * (GATES * H) + k * H + j];
        }}
        if (j < G) {{
            float sum[S];
            #pragma unroll
            for (int s = 0; s < S; ++s) sum[s] = 0.0f;
{multiply("hs[s]")}
            #pragma unroll
            for (int s = 0; s < S; ++s) zs[s][j] = sum[s];
        }}
        __syncthreads();
        if (j < H) {{
            #pragma unroll
            for (int s = 0; s < S; ++s) {{
                if (first + s >= n) continue;
                bool now = t < length[s];
                float h = hs[s][j], z[GATES];
                #pragma unroll
                for (int k = 0; k < GATES; ++k) {{
                    z[k] = b[k];
                    if (k < INPUT) z[k] += x[s][k < INPUT ? k : 0];
                    if (k >= FIRST) z[k] += zs[s][(k - FIRST) * H + j];
                }}
                {_FORWARD[cell]}
                long long row = (long long)(first + s) * steps + t;
                #pragma unroll
                for (int k = 0; k < GATES; ++k) gates[row * (GATES * H) + k * H + j] = now ? z[k] : 0.0f;
                y[row * H + j] = now ? next : 0.0f;
                if (now) hs[s][j] = next;
            }}
        }}
        __syncthreads();
    }}
    if (j < H)
        for (int s = 0; s < S; ++s)
            if (first + s < n) last_h[(long long)(first + s) * H + j] = hs[s][j];
}}
"""


def backward_source(cell: str, form: Form) -> str:
    """Writes dz (n, t, gates * h), the hidden state before every time (n, t, h) and dh0."""
    earlier = 1 if form.reverse else -1  # towards the time that was visited before
    return f"""
{form.macros(BACKWARD_WEIGHT)}
    const float* dy, const float* dh_last, const float* weights, const float* h0, const float* y, const float* gates,
    float* dz, float* before, float* dh0, int n, int steps, long long dy_row, long long dy_time, long long dy_column,
    long long dh_row, long long dh_column, long long weights_row, long long weights_column,
    long long h0_row, long long h0_column{form.lengths}) {{
{form.constants}
{_constants(cell)}
    __align__(16) __shared__ float dzs[S][G / H][4 * FOURS];
    __shared__ float parts[S][G];
{form.begin(False)}
    for (int at = j; at < S * (G / H) * 4 * FOURS; at += T) (&dzs[0][0][0])[at] = 0.0f;
    // Of the time step to come: gates, dy, and the hidden state before it.
    float gate[S][GATES], dy_now[S], h_before[S], running[S];
    #define READ(s, t) {{ \\
        long long row = (long long)(first + s) * steps + (t); \\
        for (int k = 0; k < GATES; ++k) gate[s][k] = gates[row * (GATES * H) + k * H + j]; \\
        dy_now[s] = dy[(first + s) * dy_row + (t) * dy_time + j * dy_column]; \\
        int old = (t) + ({earlier}); \\
        h_before[s] = old < 0 || old >= length[s] ? h0[(first + s) * h0_row + j * h0_column] \\
                                                 : y[(row + ({earlier})) * H + j]; \\
    }}
    if (j < H)
        for (int s = 0; s < S; ++s)
            if (first + s < n) {{
                int t = {"0" if form.reverse else "steps - 1"};
                running[s] = dh_last[(first + s) * dh_row + j * dh_column];
                READ(s, t)
            }}
    __syncthreads();
    for (int step = 0; step < steps; ++step) {{
        int t = {"step" if form.reverse else "steps - 1 - step"};
        float direct[S];
        if (j < H) {{
            #pragma unroll
            for (int s = 0; s < S; ++s) {{
                if (first + s >= n) continue;
                bool now = t < length[s];
                float dh = running[s] + dy_now[s], h = h_before[s], d[GATES];
                const float* g = gate[s];
                {_BACKWARD[cell]}
                direct[s] = through;
                long long row = (long long)(first + s) * steps + t;
                #pragma unroll
                for (int k = 0; k < GATES; ++k) {{
                    float value = now ? d[k] : 0.0f;
                    dz[row * (GATES * H) + k * H + j] = value;
                    if (k >= FIRST) dzs[s][k >= FIRST ? k - FIRST : 0][j] = value;
                }}
                before[row * H + j] = h;
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
            for (int s = 0; s < S; ++s) sum[s] = 0.0f;
{multiply("dzs[s][q]")}
            #pragma unroll
            for (int s = 0; s < S; ++s) parts[s][j] = sum[s];
        }}
        __syncthreads();
        if (j < H) {{
            #pragma unroll
            for (int s = 0; s < S; ++s)
                if (t < length[s]) {{
                    running[s] = direct[s];
                    #pragma unroll
                    for (int k = 0; k < G / H; ++k) running[s] += parts[s][k * H + j];
                }}
        }}
    }}
    if (j < H)
        for (int s = 0; s < S; ++s)
            if (first + s < n) dh0[(long long)(first + s) * H + j] = running[s];
}}
"""


def cell_source(cell: str, length_parameters: str, length_of: str) -> str:
    """One time: `recurrent` (n, hidden gates * h) is h whᵀ; h is in last_h, or in h0 before the first time."""
    return f"""
extern "C" __global__ void __launch_bounds__({BLOCK}) KERNEL(
    float* gates, const float* recurrent, const float* bias, const float* h0, float* y, float* last_h,
    int n, int steps, int H, int t, int is_first, long long bias_stride, long long h0_row, long long h0_column
    {length_parameters}) {{
{_constants(cell)}
    int at = blockIdx.x * {BLOCK} + threadIdx.x;
    if (at >= n * H) return;
    int sample = at / H, unit = at % H;
    bool now = t < {length_of};
    long long row = (long long)sample * steps + t;
    float h = is_first ? h0[sample * h0_row + unit * h0_column] : last_h[at], z[GATES];
    #pragma unroll
    for (int k = 0; k < GATES; ++k) {{
        z[k] = bias[(k * H + unit) * bias_stride];
        if (k < INPUT) z[k] += gates[row * (GATES * H) + k * H + unit];
        if (k >= FIRST) z[k] += recurrent[(long long)sample * ((GATES - FIRST) * H) + (k - FIRST) * H + unit];
    }}
    {_FORWARD[cell]}
    #pragma unroll
    for (int k = 0; k < GATES; ++k) gates[row * (GATES * H) + k * H + unit] = now ? z[k] : 0.0f;
    y[row * H + unit] = now ? next : 0.0f;
    last_h[at] = now ? next : h;
}}
"""


def cell_gradient_source(cell: str, length_parameters: str, length_of: str) -> str:
    """One time; dh0 holds the running gradient, to which `part` (dz wh of the time visited before) is added first.

    later    the time visited just before this one; -1 for none
    earlier  the time that comes next; -1 for none
    t        -1 after the last: only the sum is left to do
    """
    return f"""
extern "C" __global__ void __launch_bounds__({BLOCK}) KERNEL(
    const float* dy, const float* dh_last, const float* h0, const float* y, const float* gates, const float* part,
    float* dz, float* before, float* dh0, int n, int steps, int H, int t, int later, int earlier,
    long long dy_row, long long dy_time, long long dy_column, long long dh_row, long long dh_column,
    long long h0_row, long long h0_column{length_parameters}) {{
{_constants(cell)}
    int at = blockIdx.x * {BLOCK} + threadIdx.x;
    if (at >= n * H) return;
    int sample = at / H, unit = at % H, length = {length_of};
    float running = later < 0 ? dh_last[sample * dh_row + unit * dh_column] : dh0[at];
    if (later >= 0 && later < length) running += part[at];
    dh0[at] = running;
    if (t < 0) return;
    bool now = t < length;
    long long row = (long long)sample * steps + t;
    float g[GATES], d[GATES];
    #pragma unroll
    for (int k = 0; k < GATES; ++k) g[k] = gates[row * (GATES * H) + k * H + unit];
    float h = earlier < 0 || earlier >= length ? h0[sample * h0_row + unit * h0_column]
                                               : y[((long long)sample * steps + earlier) * H + unit];
    float dh = running + dy[sample * dy_row + t * dy_time + unit * dy_column];
    {_BACKWARD[cell]}
    #pragma unroll
    for (int k = 0; k < GATES; ++k) dz[row * (GATES * H) + k * H + unit] = now ? d[k] : 0.0f;
    before[row * H + unit] = h;
    if (now) dh0[at] = through;
}}
"""
