// What generated CUDA C++ needs to be compiled by a host compiler, and run: the threads of a block are fibers, which
// switch where they wait for each other. No headers are included, so that a kernel compiles in a moment.
#define MLCOMPUTE_EMULATED 1
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __restrict__ __restrict
#define __shared__ static
#define __constant__ static const
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

typedef unsigned long size_t;
struct uint3 { unsigned int x, y, z; };
typedef uint3 dim3;
static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;
static const int warpSize = 32;
alignas(128) static char dynamic_shared[232448];

// Vectors --------------------------------------------------------------------------------------------------------
#define VECTORS(T, name, bytes) \
    struct alignas(bytes / 2) name##2 { T x, y; }; \
    struct alignas(bytes > 16 ? 16 : bytes) name##4 { T x, y, z, w; }; \
    static inline name##2 make_##name##2(T x, T y) { return {x, y}; } \
    static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTORS(signed char, char, 4)
VECTORS(unsigned char, uchar, 4)
VECTORS(short, short, 8)
VECTORS(unsigned short, ushort, 8)
VECTORS(int, int, 16)
VECTORS(unsigned int, uint, 16)
VECTORS(float, float, 16)
VECTORS(double, double, 32)
VECTORS(long long, longlong, 32)

// Mathematics ----------------------------------------------------------------------------------------------------
#define ONE(name) \
    static inline float name##f(float x) { return __builtin_##name##f(x); } \
    static inline double name(double x) { return __builtin_##name(x); } \
    static inline float name(float x) { return __builtin_##name##f(x); }
ONE(floor) ONE(ceil) ONE(sqrt) ONE(exp) ONE(exp2) ONE(expm1) ONE(log) ONE(log2) ONE(log10) ONE(log1p) ONE(erf) ONE(erfc)
ONE(sin) ONE(cos) ONE(tan) ONE(asin) ONE(acos) ONE(atan) ONE(sinh) ONE(cosh) ONE(tanh) ONE(asinh) ONE(acosh) ONE(atanh)
ONE(rint) ONE(fabs) ONE(trunc) ONE(round) ONE(cbrt)
#define TWO(name) \
    static inline float name##f(float x, float y) { return __builtin_##name##f(x, y); } \
    static inline double name(double x, double y) { return __builtin_##name(x, y); } \
    static inline float name(float x, float y) { return __builtin_##name##f(x, y); }
TWO(pow) TWO(fmin) TWO(fmax) TWO(fmod) TWO(copysign) TWO(atan2)
static inline float fmaf(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
static inline double fma(double x, double y, double z) { return __builtin_fma(x, y, z); }
static inline float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }
static inline float __fdividef(float x, float y) { return x / y; }
static inline float __expf(float x) { return __builtin_expf(x); }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
// Rounded by themselves: never a part of a fused multiply-add.
#define ROUNDED(name, T, operation) \
    static inline T name(T x, T y) { T z = x operation y; asm("" : "+x"(z)); return z; }
ROUNDED(__fadd_rn, float, +) ROUNDED(__fsub_rn, float, -) ROUNDED(__fmul_rn, float, *)
ROUNDED(__dadd_rn, double, +) ROUNDED(__dsub_rn, double, -) ROUNDED(__dmul_rn, double, *)
static inline bool isnan(float x) { return x != x; }
static inline bool isnan(double x) { return x != x; }
static inline bool isinf(float x) { return __builtin_isinf(x); }
static inline bool isinf(double x) { return __builtin_isinf(x); }
#define SMALLER(T) \
    static inline T min(T a, T b) { return a < b ? a : b; } \
    static inline T max(T a, T b) { return a > b ? a : b; }
SMALLER(int) SMALLER(unsigned int) SMALLER(long long) SMALLER(unsigned long long) SMALLER(float) SMALLER(double)
static inline int abs(int x) { return x < 0 ? -x : x; }
static inline long long llabs(long long x) { return x < 0 ? -x : x; }
static inline unsigned int __umulhi(unsigned int a, unsigned int b) { return (unsigned long long)a * b >> 32; }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned __int128)a * b >> 64;
}
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __popc(unsigned int x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
#define REINTERPRET(name, From, To) \
    static inline To name(From x) { To y; __builtin_memcpy(&y, &x, sizeof y); return y; }
REINTERPRET(__int_as_float, int, float)
REINTERPRET(__uint_as_float, unsigned int, float)
REINTERPRET(__float_as_int, float, int)
REINTERPRET(__float_as_uint, float, unsigned int)
REINTERPRET(__longlong_as_double, long long, double)
REINTERPRET(__double_as_longlong, double, long long)
template <typename T> static inline T __ldg(const T* p) { return *p; }
template <typename T> static inline T __ldcs(const T* p) { return *p; }
template <typename T> static inline void __stcs(T* p, T x) { *p = x; }

#define INFINITY_F __int_as_float(0x7f800000)
#define NAN_F __int_as_float(0x7fffffff)
struct alignas(2) half { unsigned short bits; };
static inline float to_float(half x) { _Float16 y; __builtin_memcpy(&y, &x, 2); return (float)y; }
static inline half to_half(float x) { _Float16 y = (_Float16)x; half h; __builtin_memcpy(&h, &y, 2); return h; }
static inline half to_half(double x) { _Float16 y = (_Float16)x; half h; __builtin_memcpy(&h, &y, 2); return h; }
struct alignas(2) bfloat16 { unsigned short bits; };
static inline bfloat16 to_bfloat16(float x) {
    unsigned int bits = __float_as_uint(x);
    if (x != x) return bfloat16{0x7fff};
    return bfloat16{(unsigned short)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

// Fibers ---------------------------------------------------------------------------------------------------------
extern "C" void mlc_switch(void** from, void* to);
#if defined(__x86_64__)
asm(".text\n.weak mlc_switch\nmlc_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
#else
#error "the emulator switches fibers on x86-64 only"
#endif

enum { MAX_THREADS = 1024, STACK = 64 << 10, DONE = 0, READY = 1, AT_BLOCK = 2, AT_WARP = 3, AT_SOME = 4 };
struct Fiber { void* top; uint3 index; int state; unsigned int mask; };
static Fiber fibers[MAX_THREADS];
static unsigned long long exchanged[MAX_THREADS];
static char* stacks;  // of all fibers: every library of the process is given the same
static void* scheduler;
static int current, thread_count;
static void (*run_body)(void** arguments);
static void** body_arguments;

static void fiber_main() {
    run_body(body_arguments);
    fibers[current].state = DONE;
    mlc_switch(&fibers[current].top, scheduler);
}

static void wait_as(int state, unsigned int mask) {
    int self = current;
    fibers[self].state = state;
    fibers[self].mask = mask;
    mlc_switch(&fibers[self].top, scheduler);
}

// Returns 0, or 1 when threads wait for others that will never come.
static int run_fibers() {
    for (int i = 0; i < thread_count; ++i) {
        void** top = (void**)(stacks + (size_t)(i + 1) * STACK);
        *--top = 0;
        *--top = (void*)fiber_main;
        for (int k = 0; k < 6; ++k) *--top = 0;
        fibers[i].top = top;
        fibers[i].state = READY;
        fibers[i].index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
    }
    for (;;) {
        bool moved = false, alive = false;
        for (int i = 0; i < thread_count; ++i) {
            if (fibers[i].state != READY) continue;
            current = i;
            threadIdx = fibers[i].index;
            mlc_switch(&scheduler, fibers[i].top);
            moved = true;
        }
        bool all_at_block = true;
        for (int i = 0; i < thread_count; ++i) {
            alive |= fibers[i].state != DONE;
            all_at_block &= fibers[i].state == DONE || fibers[i].state == AT_BLOCK;
        }
        if (!alive) return 0;
        if (all_at_block) {
            for (int i = 0; i < thread_count; ++i)
                if (fibers[i].state == AT_BLOCK) fibers[i].state = READY;
            continue;
        }
        unsigned int waiting = 0, expected = 0;
        for (int i = 0; i < thread_count; ++i)
            if (fibers[i].state == AT_SOME) ++waiting, expected = fibers[i].mask;
        if (waiting && waiting == expected)
            for (int i = 0; i < thread_count; ++i)
                if (fibers[i].state == AT_SOME) fibers[i].state = READY, moved = true;
        for (int first = 0; first < thread_count; first += 32)
            for (int i = first; i < first + 32 && i < thread_count; ++i) {
                if (fibers[i].state != AT_WARP) continue;
                bool all = true;
                for (int k = 0; k < 32 && first + k < thread_count; ++k)
                    if (fibers[i].mask >> k & 1) {
                        Fiber& other = fibers[first + k];
                        all &= other.state == DONE || (other.state == AT_WARP && other.mask == fibers[i].mask);
                    }
                if (!all) continue;
                unsigned int mask = fibers[i].mask;
                for (int k = 0; k < 32 && first + k < thread_count; ++k)
                    if ((mask >> k & 1) && fibers[first + k].state == AT_WARP) fibers[first + k].state = READY, moved = true;
            }
        if (!moved) return 1;
    }
}

static inline void __syncthreads() { wait_as(AT_BLOCK, 0); }
static inline void barrier_of(int threads) { wait_as(AT_SOME, threads); }
static inline void __syncwarp(unsigned int mask = 0xffffffffu) { wait_as(AT_WARP, mask); }
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() {}
static int block_votes[2], block_turn;
static inline int __syncthreads_or(int x) {
    static int votes; static bool cleared;
    __syncthreads(); votes = 0; __syncthreads(); votes |= x != 0; __syncthreads();
    return votes;
}
static inline int __syncthreads_and(int x) { return !__syncthreads_or(!x); }

template <typename T> static inline T exchange(unsigned int mask, T x, int lane) {
    static_assert(sizeof(T) <= 8, "");
    int self = current, first = current & ~31;
    __builtin_memcpy(&exchanged[self], &x, sizeof x);
    wait_as(AT_WARP, mask);
    T y;
    __builtin_memcpy(&y, &exchanged[first + lane], sizeof y);
    wait_as(AT_WARP, mask);
    return y;
}
template <typename T> static inline T __shfl_sync(unsigned int mask, T x, int lane, int width = 32) {
    int own = current & 31;
    return exchange(mask, x, (own & ~(width - 1)) + (lane & (width - 1)));
}
template <typename T> static inline T __shfl_xor_sync(unsigned int mask, T x, int bits, int width = 32) {
    int own = current & 31, lane = own ^ bits;
    return exchange(mask, x, (lane & ~(width - 1)) > (own & ~(width - 1)) ? own : lane);
}
template <typename T> static inline T __shfl_down_sync(unsigned int mask, T x, unsigned int by, int width = 32) {
    int own = current & 31;
    return exchange(mask, x, (int)((own & (width - 1)) + by) < width ? own + by : own);
}
template <typename T> static inline T __shfl_up_sync(unsigned int mask, T x, unsigned int by, int width = 32) {
    int own = current & 31;
    return exchange(mask, x, (own & (width - 1)) >= (int)by ? own - by : own);
}
static inline unsigned int __ballot_sync(unsigned int mask, int x) {
    unsigned int votes = 0;
    int first = current & ~31;
    exchanged[current] = x != 0;
    wait_as(AT_WARP, mask);
    for (int k = 0; k < 32; ++k) if (mask >> k & 1) votes |= (unsigned int)exchanged[first + k] << k;
    wait_as(AT_WARP, mask);
    return votes;
}
static inline int __any_sync(unsigned int mask, int x) { return __ballot_sync(mask, x) != 0; }
static inline int __all_sync(unsigned int mask, int x) { return __ballot_sync(mask, !x) == 0; }
static inline unsigned int __activemask() { return 0xffffffffu; }
template <typename T> static inline T atomicAdd(T* p, T x) { T old = *p; *p += x; return old; }
template <typename T> static inline T atomicMax(T* p, T x) { T old = *p; if (x > old) *p = x; return old; }
template <typename T> static inline T atomicMin(T* p, T x) { T old = *p; if (x < old) *p = x; return old; }
template <typename T> static inline T atomicExch(T* p, T x) { T old = *p; *p = x; return old; }
template <typename T> static inline T atomicOr(T* p, T x) { T old = *p; *p |= x; return old; }
template <typename T> static inline T atomicCAS(T* p, T expected, T x) { T old = *p; if (old == expected) *p = x; return old; }

// Tensor cores: see the prelude. Factors keep all their bits.
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

// Runs a grid. Kernels whose threads never wait for each other need no fibers.
static int run_grid(void (*body)(void**), void** arguments, const unsigned int* extents, char* memory, int waits) {
    gridDim = {extents[0], extents[1], extents[2]};
    blockDim = {extents[3], extents[4], extents[5]};
    thread_count = blockDim.x * blockDim.y * blockDim.z;
    if (thread_count > MAX_THREADS) return 2;
    run_body = body, body_arguments = arguments, stacks = memory;
    for (unsigned int z = 0; z < gridDim.z; ++z)
        for (unsigned int y = 0; y < gridDim.y; ++y)
            for (unsigned int x = 0; x < gridDim.x; ++x) {
                blockIdx = {x, y, z};
                if (waits) {
                    if (int failed = run_fibers()) return failed;
                    continue;
                }
                for (int i = 0; i < thread_count; ++i) {
                    threadIdx = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
                    body(arguments);
                }
            }
    return 0;
}
