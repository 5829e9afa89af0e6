"""Small matmuls on tensor cores, as source for kernels: a warp multiplies tiles in shared memory.

A warp's accumulator of 16 rows and 8 n columns is `float sum[n][4]`: lane 4 g + t holds of columns 8 i + 2 t and
8 i + 2 t + 1 the rows g (elements 0, 1 of sum[i]) and g + 8 (elements 2, 3).

Tiles of bfloat16 are multiplied as they are. With TF32 the factors are rounded to 10 bits of mantissa. Exactly: each
factor is split into its leading bits and the rest, and all products but that of the two rests are added, which leaves
an error as small as float32's own.
"""

from __future__ import annotations

#: Rows of tiles begin this many floats further than they are long: then lanes read from different banks.
PADDING = 4

_COPIES = r"""
#ifdef MLCOMPUTE_EMULATED
template <int BYTES> static inline void copy_async(float* to, const float* from, bool inside) {
    for (int i = 0; i < BYTES / 4; ++i) to[i] = inside ? from[i] : 0.0f;
}
static inline void wait_for_copies() {}
#else
// 4 or 16 bytes to shared memory, zeros unless `inside`; aligned as they are long.
template <int BYTES>
__device__ __forceinline__ void copy_async(float* to, const float* from, bool inside) {
    unsigned int address = (unsigned int)__cvta_generic_to_shared(to);
    int size = inside ? BYTES : 0;
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(address), "l"(from), "r"(size) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: "r"(address), "l"(from), "r"(size) : "memory");
}
// Until all copies of this thread are there.
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#endif
"""

_EXACT = r"""
// What is stored in tiles, and does that differ from what they are made of?
__device__ __forceinline__ float rounded(float x) { return x; }
enum { ROUNDS = 0 };
__device__ __forceinline__ void split(const float* x, float* high, float* low, int count) {
    for (int i = 0; i < count; ++i) {
        high[i] = tf32(x[i]);
        low[i] = tf32(x[i] - high[i]);
    }
}
struct Left {
    float high[4], low[4];
    __device__ __forceinline__ Left() {}
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
// What is stored in tiles, and does that differ from what they are made of?
__device__ __forceinline__ float rounded(float x) { return tf32(x); }
enum { ROUNDS = 1 };
struct Left {
    float high[4];
    __device__ __forceinline__ Left() {}
    __device__ __forceinline__ Left(const float* x) { for (int i = 0; i < 4; ++i) high[i] = tf32(x[i]); }
};
__device__ __forceinline__ void accumulate(float* sum, const Left& a, const float* b) { mma(sum, a.high, b); }
"""

_PRODUCTS = r"""
// A factor (16, 8 K) of several products, a tile in shared memory whose rows are A apart: if KEPT, in registers.
template <typename T, int K, int A, bool KEPT>
struct Factor;
template <int K, int A, bool KEPT>
struct Factor<float, K, A, KEPT> {
    const float* tile;
    Left kept[KEPT ? K : 1];
    __device__ __forceinline__ Left read(int k) const {
        const float* p = tile + threadIdx.x % 32 / 4 * A + 8 * k + threadIdx.x % 4;
        float x[4] = {p[0], p[8 * A], p[4], p[8 * A + 4]};
        return Left(x);
    }
    __device__ __forceinline__ Factor(const float* a) : tile(a) {}
    // When the tile is there.
    __device__ __forceinline__ void load() {
        #pragma unroll
        for (int k = 0; KEPT && k < K; ++k) kept[KEPT ? k : 0] = read(k);
    }
};
// sum (16, 8 N) += a (16, 8 K) bᵀ, of a factor a and a tile b (8 N, 8 K) in shared memory, whose rows are B apart
template <int N, int B, int K, int A, bool KEPT>
__device__ __forceinline__ void multiply_rows(float (*sum)[4], const Factor<float, K, A, KEPT>& a, const float* b) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    #pragma unroll
    for (int k = 0; k < K; ++k) {
        Left left = KEPT ? a.kept[KEPT ? k : 0] : a.read(k);
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
// Four elements in a row, as floats.
__device__ __forceinline__ float4 four_of(const float* p) { return *(const float4*)p; }
__device__ __forceinline__ float4 four_of(const bfloat16* p) {
    const Pack<bfloat16, 4> x = *(const Pack<bfloat16, 4>*)p;
    return make_float4(to_float(x.at[0]), to_float(x.at[1]), to_float(x.at[2]), to_float(x.at[3]));
}
// The same from an offset on, zeros unless `inside`. There is no branch: loads would wait for each other.
template <typename T>
__device__ __forceinline__ float4 four_inside(const T* p, long long offset, bool inside) {
    const float4 x = four_of(p + (inside ? offset : 0));
    return make_float4(inside ? x.x : 0.0f, inside ? x.y : 0.0f, inside ? x.z : 0.0f, inside ? x.w : 0.0f);
}
// Begins to copy an element, or four in a row, as floats: zeros unless `inside`.
template <int PACK>
__device__ __forceinline__ void copy_floats(float* to, const float* from, bool inside) {
    copy_async<4 * PACK>(to, from, inside);
}
template <int PACK>
__device__ __forceinline__ void copy_floats(float* to, const bfloat16* from, bool inside) {
    Pack<bfloat16, PACK> x = {};
    if (inside) x = *(const Pack<bfloat16, PACK>*)from;
    if (PACK == 4)
        *(float4*)to = make_float4(
            to_float(x.at[0]), to_float(x.at[1 % PACK]), to_float(x.at[2 % PACK]), to_float(x.at[3 % PACK]));
    else
        *to = to_float(x.at[0]);
}
// Begins to copy a tile of ROWS x COLUMNS floats, whose rows are PITCH apart: `rows` x `columns` from memory, zeros
// elsewhere. It is there after `wait_for_copies`, `finish_tile` with the same numbers, and a barrier.
template <int ROWS, int COLUMNS, int PITCH, int THREADS, int PACK, typename T>
__device__ __forceinline__ void copy_tile(
    float* tile, const T* from, int rows, int columns, long long by_row, long long by_column) {
    #pragma unroll
    for (int first = 0; first < ROWS * COLUMNS / PACK; first += THREADS) {
        const int at = first + threadIdx.x;
        if (ROWS * COLUMNS / PACK % THREADS && at >= ROWS * COLUMNS / PACK) break;
        int row = at / (COLUMNS / PACK), column = at % (COLUMNS / PACK) * PACK;
        bool inside = row < rows && column < columns;
        long long offset = PACK == 4 ? row * by_row + column : row * by_row + column * by_column;
        copy_floats<PACK>(tile + row * PITCH + column, inside ? from + offset : from, inside);
    }
}
// Rounds what this thread copied, after `wait_for_copies`.
template <int ROWS, int COLUMNS, int PITCH, int THREADS, int PACK>
__device__ __forceinline__ void finish_tile(float* tile) {
    if (!ROUNDS) return;
    #pragma unroll
    for (int first = 0; first < ROWS * COLUMNS / PACK; first += THREADS) {
        const int at = first + threadIdx.x;
        if (ROWS * COLUMNS / PACK % THREADS && at >= ROWS * COLUMNS / PACK) break;
        float* p = tile + at / (COLUMNS / PACK) * PITCH + at % (COLUMNS / PACK) * PACK;
        if (PACK == 4) {
            float4 x = *(const float4*)p;
            *(float4*)p = make_float4(rounded(x.x), rounded(x.y), rounded(x.z), rounded(x.w));
        } else {
            *p = rounded(*p);
        }
    }
}
"""

_BFLOAT16 = r"""
#ifdef MLCOMPUTE_EMULATED
static inline unsigned int pair(float low, float high) {
    return to_bfloat16(low).bits | (unsigned int)to_bfloat16(high).bits << 16;
}
static inline unsigned int pair(bfloat16 low, bfloat16 high) { return low.bits | (unsigned int)high.bits << 16; }
static inline void mma(float* c, const unsigned int* a, const unsigned int* b) {
    static unsigned int left[32][32][4], right[32][32][2];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) left[warp][lane][i] = a[i];
    for (int i = 0; i < 2; ++i) right[warp][lane][i] = b[i];
    __syncwarp();
    for (int e = 0; e < 4; ++e)
        for (int k = 0; k < 16; ++k) {
            unsigned int x = left[warp][g * 4 + k % 8 / 2][(e >= 2) + 2 * (k >= 8)];
            unsigned int y = right[warp][(2 * t + (e & 1)) * 4 + k % 8 / 2][k >= 8];
            bfloat16 p, q;
            p.bits = (unsigned short)(x >> 16 * (k % 2)), q.bits = (unsigned short)(y >> 16 * (k % 2));
            c[e] += to_float(p) * to_float(q);
        }
    __syncwarp();
}
static inline void load_left(unsigned int* a, const bfloat16* tile, int pitch) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int i = 0; i < 4; ++i) {
        const bfloat16* p = tile + (g + i % 2 * 8) * pitch + 2 * t + i / 2 * 8;
        a[i] = pair(p[0], p[1]);
    }
}
static inline void load_rows(unsigned int* b, const bfloat16* tile, int pitch) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int i = 0; i < 4; ++i) {
        const bfloat16* p = tile + (g + i / 2 * 8) * pitch + 2 * t + i % 2 * 8;
        b[i] = pair(p[0], p[1]);
    }
}
static inline void load_columns(unsigned int* b, const bfloat16* tile, int pitch) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int i = 0; i < 4; ++i) {
        const bfloat16* p = tile + (2 * t + i % 2 * 8) * pitch + g + i / 2 * 8;
        b[i] = pair(p[0], p[pitch]);
    }
}
template <int PACK> static inline void copy_async(bfloat16* to, const bfloat16* from, bool inside) {
    for (int i = 0; i < PACK; ++i) to[i] = inside ? from[i] : to_bfloat16(0.0f);
}
#else
__device__ __forceinline__ unsigned int pair(float low, float high) {
    unsigned int y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
// c (16, 8) += a (16, 16) b (16, 8)
__device__ __forceinline__ void mma(float* c, const unsigned int* a, const unsigned int* b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Four matrices of 8 x 8; each lane gives the address of one row.
__device__ __forceinline__ void load_matrices(unsigned int* x, const bfloat16* row) {
    unsigned int address = (unsigned int)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
}
// a (16, 16) of a tile
__device__ __forceinline__ void load_left(unsigned int* a, const bfloat16* tile, int pitch) {
    int lane = threadIdx.x % 32;
    load_matrices(a, tile + lane % 16 * pitch + lane / 16 * 8);
}
// bᵀ (16, 16) of a tile: two factors b (16, 8)
__device__ __forceinline__ void load_rows(unsigned int* b, const bfloat16* tile, int pitch) {
    int lane = threadIdx.x % 32;
    load_matrices(b, tile + (lane / 16 * 8 + lane % 8) * pitch + lane / 8 % 2 * 8);
}
// b (16, 16) of a tile: two factors b (16, 8)
__device__ __forceinline__ void load_columns(unsigned int* b, const bfloat16* tile, int pitch) {
    int lane = threadIdx.x % 32;
    unsigned int address = (unsigned int)__cvta_generic_to_shared(tile + lane % 16 * pitch + lane / 16 * 8);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(address) : "memory");
}
template <int PACK>
__device__ __forceinline__ void copy_async(bfloat16* to, const bfloat16* from, bool inside) {
    unsigned int address = (unsigned int)__cvta_generic_to_shared(to);
    int size = inside ? 2 * PACK : 0;
    if (PACK == 8)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(address), "l"(from), "r"(size) : "memory");
    else if (PACK == 4)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" :: "r"(address), "l"(from), "r"(size) : "memory");
    else
        to->bits = inside ? from->bits : 0;
}
#endif
// The same factors and products as above, of tiles of bfloat16; N and K are even.
template <int K, int A, bool KEPT>
struct Factor<bfloat16, K, A, KEPT> {
    const bfloat16* tile;
    unsigned int kept[KEPT ? K / 2 : 1][4];
    __device__ __forceinline__ Factor(const bfloat16* a) : tile(a) {}
    __device__ __forceinline__ void load() {
        #pragma unroll
        for (int k = 0; KEPT && k < K / 2; ++k) load_left(kept[KEPT ? k : 0], tile + 16 * k, A);
    }
};
template <int N, int B, int K, int A, bool KEPT>
__device__ __forceinline__ void multiply_rows(
    float (*sum)[4], const Factor<bfloat16, K, A, KEPT>& a, const bfloat16* b) {
    #pragma unroll
    for (int k = 0; k < K / 2; ++k) {
        unsigned int read[4], y[4];
        if (!KEPT) load_left(read, a.tile + 16 * k, A);
        const unsigned int* x = KEPT ? a.kept[KEPT ? k : 0] : read;
        #pragma unroll
        for (int n = 0; n < N; n += 2) {
            load_rows(y, b + 8 * n * B + 16 * k, B);
            mma(sum[n], x, y);
            mma(sum[n + 1], x, y + 2);
        }
    }
}
template <int N, int K, int B>
__device__ __forceinline__ void multiply_columns(float (*sum)[4], float (*a)[4], const bfloat16* b) {
    #pragma unroll
    for (int k = 0; k < K; k += 2) {
        unsigned int x[4] = {
            pair(a[k][0], a[k][1]), pair(a[k][2], a[k][3]), pair(a[k + 1][0], a[k + 1][1]),
            pair(a[k + 1][2], a[k + 1][3])};
        unsigned int y[4];
        #pragma unroll
        for (int n = 0; n < N; n += 2) {
            load_columns(y, b + 8 * k * B + 8 * n, B);
            mma(sum[n], x, y);
            mma(sum[n + 1], x, y + 2);
        }
    }
}
template <int ROWS, int COLUMNS, int PITCH, int THREADS, int PACK>
__device__ __forceinline__ void copy_tile(
    bfloat16* tile, const bfloat16* from, int rows, int columns, long long by_row, long long by_column) {
    #pragma unroll
    for (int first = 0; first < ROWS * COLUMNS / PACK; first += THREADS) {
        const int at = first + threadIdx.x;
        if (ROWS * COLUMNS / PACK % THREADS && at >= ROWS * COLUMNS / PACK) break;
        int row = at / (COLUMNS / PACK), column = at % (COLUMNS / PACK) * PACK;
        bool inside = row < rows && column < columns;
        long long offset = PACK > 1 ? row * by_row + column : row * by_row + column * by_column;
        copy_async<PACK>(tile + row * PITCH + column, inside ? from + offset : from, inside);
    }
}
template <int ROWS, int COLUMNS, int PITCH, int THREADS, int PACK>
__device__ __forceinline__ void finish_tile(bfloat16*) {}
"""


def tensor_core_text(exact: bool, bfloat16: bool = False) -> str:
    """The functions `multiply_rows`, `multiply_columns`, `copy_tile` and `finish_tile`, and what they are made of.

    bfloat16   for tiles of that type, too
    """
    return _COPIES + (_EXACT if exact else _TF32) + _PRODUCTS + (_BFLOAT16 if bfloat16 else "")
