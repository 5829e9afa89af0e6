"""What every kernel may use without defining it; stands before its text when it is compiled.

NVRTC comes without headers, so nothing is included: float16 and bfloat16 are converted by instructions of the device.
"""

from __future__ import annotations

from mlcompute.ops.elementwise import GELU_CUBIC, GELU_SCALE

#: Functions that only the device has.
DEVICE = r"""
#define INFINITY_F __int_as_float(0x7f800000)
#define NAN_F __int_as_float(0x7fffffff)

struct __align__(2) half { unsigned short bits; };

__device__ __forceinline__ float to_float(half x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
__device__ __forceinline__ half to_half(float x) {
    half y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
__device__ __forceinline__ half to_half(double x) {
    half y;
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(y.bits) : "d"(x));
    return y;
}

struct __align__(2) bfloat16 { unsigned short bits; };

__device__ __forceinline__ bfloat16 to_bfloat16(float x) {
    bfloat16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
// Rounded to TF32: 10 bits of mantissa.
__device__ __forceinline__ float tf32(float x) {
    unsigned int y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return __uint_as_float(y);
}
// c (16, 8) += a (16, 8) b (8, 8) by a warp: lane 4 g + t holds c[g][2 t], c[g][2 t + 1], the same of row g + 8;
// a[g][t], a[g + 8][t], a[g][t + 4], a[g + 8][t + 4]; b[t][g] and b[t + 4][g].
__device__ __forceinline__ void mma(float* c, const float* a, const float* b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
                   "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}
// A barrier for the first so many threads of a block, whole warps; the others need not come.
__device__ __forceinline__ void barrier_of(int threads) {
    asm volatile("barrier.sync 1, %0;" :: "r"(threads) : "memory");  // not `aligned`: warps may have diverged before it
}
"""

#: Functions in plain C++, the same wherever kernels are compiled.
COMMON = (
    f"""
#define GELU_CUBIC {GELU_CUBIC!r}
#define GELU_FACTOR {2.0 * GELU_SCALE!r}
"""
    + r"""
// Neighbouring elements that are loaded and stored together.
template <typename T, int N> struct __align__(sizeof(T) * N) Pack { T at[N]; };

// Division of an index below 2^31 by a number known before the launch: (n * multiplier >> 32) + n >> shift.
struct Divisor { unsigned int divisor, multiplier, shift; };
__device__ __forceinline__ unsigned int quotient(unsigned int n, Divisor by) {
    return (__umulhi(n, by.multiplier) + n) >> by.shift;
}

// bfloat16 is the upper half of a float.
__device__ __forceinline__ float to_float(bfloat16 x) { return __uint_as_float((unsigned int)x.bits << 16); }

// Both 16-bit types are computed in float and rounded after every operation.
__device__ __forceinline__ float round_half(float x) { return to_float(to_half(x)); }
__device__ __forceinline__ float round_bfloat16(float x) { return to_float(to_bfloat16(x)); }

// NumPy's minimum and maximum: NaN if either is.
template <typename T> __device__ __forceinline__ T minimum(T a, T b) { return a < b || a != a ? a : b; }
template <typename T> __device__ __forceinline__ T maximum(T a, T b) { return a > b || a != a ? a : b; }
template <typename T> __device__ __forceinline__ T sign_of(T x) {
    return x > T(0) ? T(1) : x < T(0) ? T(0) - T(1) : x + T(0);
}
__device__ __forceinline__ float sigmoid(float x) {
    float e = expf(-fabsf(x));
    return (x >= 0.0f ? 1.0f : e) / (1.0f + e);
}
__device__ __forceinline__ double sigmoid(double x) {
    double e = exp(-fabs(x));
    return (x >= 0.0 ? 1.0 : e) / (1.0 + e);
}
__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }
__device__ __forceinline__ double softplus(double x) { return fmax(x, 0.0) + log1p(exp(-fabs(x))); }

// x / 2 (1 + tanh z) = x sigmoid(2 z), and its slope. Never a fused multiply-add, as in sums and products of other ops.
__device__ __forceinline__ float add_rn(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float mul_rn(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double add_rn(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ double mul_rn(double a, double b) { return __dmul_rn(a, b); }
template <typename T> __device__ __forceinline__ T gelu(T x) {
    T cubic = mul_rn(mul_rn(x, x), T(GELU_CUBIC));
    return mul_rn(x, sigmoid(mul_rn(mul_rn(add_rn(cubic, T(1)), x), T(GELU_FACTOR))));
}
template <typename T> __device__ __forceinline__ T gelu_gradient(T dy, T x) {
    T cubic = mul_rn(mul_rn(x, x), T(GELU_CUBIC));
    T s = sigmoid(mul_rn(mul_rn(add_rn(cubic, T(1)), x), T(GELU_FACTOR)));
    T steep = mul_rn(mul_rn(s, T(1) - s), add_rn(mul_rn(cubic, T(3)), T(1)));
    return mul_rn(dy, add_rn(mul_rn(mul_rn(steep, x), T(GELU_FACTOR)), s));
}

// Integer powers: overflow wraps, and a negative exponent counts as 0.
template <typename T> __device__ __forceinline__ T integer_power(T a, T b) {
    T result = T(1);
    for (; b > T(0); b = T(b >> 1)) {
        if (b & T(1)) result = T(result * a);
        a = T(a * a);
    }
    return result;
}
// Float to integer toward zero; outside the range of the wider type it is computed in, its nearest end; 0 for NaN.
template <typename T> __device__ __forceinline__ T to_integer(double x) {
    if (x != x) return T(0);
    if (sizeof(T) == 8 || (sizeof(T) == 4 && T(-1) > T(0))) {
        if (x >= 9223372036854775807.0) return T(9223372036854775807LL);
        if (x <= -9223372036854775808.0) return T(-9223372036854775807LL - 1);
        return T((long long)x);
    }
    if (x >= 2147483647.0) return T(2147483647);
    if (x <= -2147483648.0) return T(-2147483647 - 1);
    return T((int)x);
}
"""
)

PRELUDE = DEVICE + COMMON
