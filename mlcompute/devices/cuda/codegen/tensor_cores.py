"""Small matrix products by tensor cores, as text that kernels begin with: a warp multiplies tiles in shared memory.

A warp's accumulator of 16 rows and 8 n columns is `float sum[n][4]`: lane 4 g + t holds of columns 8 i + 2 t and
8 i + 2 t + 1 the rows g (elements 0, 1 of sum[i]) and g + 8 (elements 2, 3).

With TF32 the factors are rounded to 10 bits of mantissa. Exactly: each factor is split into its leading bits and the
rest, and all products but that of the two rests are added, which leaves an error as small as float32's own.
"""

from __future__ import annotations

#: Rows of tiles begin this many floats further than they are long: then lanes read from different banks.
PADDING = 4

_MMA = r"""
#ifdef MLCOMPUTE_EMULATED
static inline float tf32(float x) { return x; }
static inline void mma(float* c, const float* a, const float* b) {
    static float left[32][32][4], right[32][32][2];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) left[warp][lane][i] = a[i];
    for (int i = 0; i < 2; ++i) right[warp][lane][i] = b[i];
    __syncwarp();
    for (int e = 0; e < 4; ++e)
        for (int k = 0; k < 8; ++k)
            c[e] += left[warp][g * 4 + k % 4][(e >= 2) + 2 * (k >= 4)]
                * right[warp][(2 * t + (e & 1)) * 4 + k % 4][k >= 4];
    __syncwarp();
}
#else
__device__ __forceinline__ float tf32(float x) {
    unsigned int y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return __uint_as_float(y);
}
// c (16, 8) += a (16, 8) b (8, 8)
__device__ __forceinline__ void mma(float* c, const float* a, const float* b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
                   "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}
#endif
"""

_EXACT = r"""
// What is stored in tiles.
__device__ __forceinline__ float rounded(float x) { return x; }
__device__ __forceinline__ void split(const float* x, float* high, float* low, int count) {
    for (int i = 0; i < count; ++i) {
        high[i] = tf32(x[i]);
        low[i] = tf32(x[i] - high[i]);
    }
}
struct Left {
    float high[4], low[4];
    __device__ __forceinline__ Left(const float* x) { split(x, high, low, 4); }
};
__device__ __forceinline__ void accumulate(float* sum, const Left& a, const float* b) {
    float high[2], low[2];
    split(b, high, low, 2);
    mma(sum, a.low, high);
    mma(sum, a.high, low);
    mma(sum, a.high, high);
}
"""

_TF32 = r"""
// What is stored in tiles.
__device__ __forceinline__ float rounded(float x) { return tf32(x); }
struct Left {
    float high[4];
    __device__ __forceinline__ Left(const float* x) { for (int i = 0; i < 4; ++i) high[i] = tf32(x[i]); }
};
__device__ __forceinline__ void accumulate(float* sum, const Left& a, const float* b) { mma(sum, a.high, b); }
"""

_PRODUCTS = r"""
// sum (16, 8 N) += a (16, 8 K) bᵀ, of tiles a (16, 8 K) and b (8 N, 8 K) in shared memory, whose rows are A and B apart
template <int N, int K, int A, int B>
__device__ __forceinline__ void multiply_rows(float (*sum)[4], const float* a, const float* b) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    #pragma unroll
    for (int k = 0; k < K; ++k) {
        const float* p = a + g * A + 8 * k + t;
        float x[4] = {p[0], p[8 * A], p[4], p[8 * A + 4]};
        Left left(x);
        #pragma unroll
        for (int n = 0; n < N; ++n) {
            const float* q = b + (8 * n + g) * B + 8 * k + t;
            float y[2] = {q[0], q[4]};
            accumulate(sum[n], left, y);
        }
    }
}
// sum (16, 8 N) += a (16, 8 K) b, of an accumulator a and a tile b (8 K, 8 N) in shared memory, whose rows are B apart.
// Terms of the sum may come in any order: they are taken as lanes have them in the accumulator.
template <int N, int K, int B>
__device__ __forceinline__ void multiply_columns(float (*sum)[4], float (*a)[4], const float* b) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    #pragma unroll
    for (int k = 0; k < K; ++k) {
        float x[4] = {a[k][0], a[k][2], a[k][1], a[k][3]};
        Left left(x);
        #pragma unroll
        for (int n = 0; n < N; ++n) {
            const float* q = b + (8 * k + 2 * t) * B + 8 * n + g;
            float y[2] = {q[0], q[B]};
            accumulate(sum[n], left, y);
        }
    }
}
__device__ __forceinline__ float number(float x) { return x; }
__device__ __forceinline__ float number(bfloat16 x) { return to_float(x); }
// A tile of ROWS x COLUMNS floats, whose rows are PITCH apart: the first `rows` x `columns` from memory, 0 elsewhere.
template <int ROWS, int COLUMNS, int PITCH, int THREADS, int PACK, typename T>
__device__ __forceinline__ void load_tile(
    float* tile, const T* from, int rows, int columns, long long by_row, long long by_column) {
    for (int at = threadIdx.x; at < ROWS * COLUMNS / PACK; at += THREADS) {
        int row = at / (COLUMNS / PACK), column = at % (COLUMNS / PACK) * PACK;
        if (PACK == 4) {
            Pack<T, 4> x = {};
            if (row < rows && column < columns) x = *(const Pack<T, 4>*)(from + row * by_row + column);
            *(float4*)(tile + row * PITCH + column) = make_float4(
                rounded(number(x.at[0])), rounded(number(x.at[1])), rounded(number(x.at[2])), rounded(number(x.at[3])));
        } else {
            bool inside = row < rows && column < columns;
            tile[row * PITCH + column] = rounded(inside ? number(from[row * by_row + column * by_column]) : 0.0f);
        }
    }
}
"""


def tensor_core_text(exact: bool) -> str:
    """The functions `multiply_rows`, `multiply_columns` and `load_tile`."""
    return _MMA + (_EXACT if exact else _TF32) + _PRODUCTS
