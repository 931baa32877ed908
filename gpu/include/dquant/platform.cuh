// What the other headers need from a compiler: the few built-ins of a GPU that C++ does not have.
//
// Under nvcc and NVRTC these are CUDA's own.  A host compiler takes them from gpu/host/simt.h, which runs a block's
// threads as fibers, so that the very same kernels are tested without a GPU.
//
// Results depend on the exact rounding of every operation: compile with -fmad=false (host: -ffp-contract=off), without
// fast math and without flushing denormals.
#pragma once

#include "dquant/types.cuh"

#if defined(__CUDACC__)

#define DQ_DEVICE __device__ __forceinline__
#define DQ_CONSTANT __host__ __device__ constexpr
#define DQ_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

namespace dquant {

struct alignas(16) Vector16 {
    u32 x, y, z, w;
};

DQ_DEVICE u32 float_bits(float x) { return __float_as_uint(x); }
DQ_DEVICE float bits_float(u32 x) { return __uint_as_float(x); }
DQ_DEVICE u64 double_bits(double x) { return (u64)__double_as_longlong(x); }
DQ_DEVICE double bits_double(u64 x) { return __longlong_as_double((i64)x); }

// Bits n to n + 31 of the 64 bits `high:low`; n counts modulo 32.
DQ_DEVICE u32 funnel(u32 low, u32 high, u32 n) { return __funnelshift_r(low, high, n); }

// Bytes of the eight bytes `high:low` by the nibbles of `selector`, the lowest first.
DQ_DEVICE u32 permute_bytes(u32 low, u32 high, u32 selector) { return __byte_perm(low, high, selector); }

// The larger of the low and of the high 16 bits of two words, without signs.
DQ_DEVICE u32 larger_halves(u32 a, u32 b) { return __vmaxu2(a, b); }

// Two values as FP16 or BF16 bits side by side, the first lowest: nearest, ties to even.
DQ_DEVICE u32 floats_to_halves(float first, float second) {
    u32 bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
    return bits;
}
DQ_DEVICE u32 floats_to_bfloats(float first, float second) {
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
    return bits;
}

// FP16 bits to and from FP32: nearest, ties to even, beyond the largest to infinity.
DQ_DEVICE float half_to_float(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
DQ_DEVICE u16 float_to_half(float x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// Collectives of a whole warp: all 32 lanes take part.
DQ_DEVICE void warp_barrier() { __syncwarp(); }
DQ_DEVICE void block_barrier() { __syncthreads(); }
template <class T> DQ_DEVICE T from_lane(T value, int lane) { return __shfl_sync(0xFFFFFFFFu, value, lane); }
template <class T> DQ_DEVICE T from_lane_xor(T value, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, value, mask); }
template <class T> DQ_DEVICE T from_lane_below(T value, int distance) {
    return __shfl_up_sync(0xFFFFFFFFu, value, distance);
}
DQ_DEVICE u32 ballot(bool condition) { return __ballot_sync(0xFFFFFFFFu, condition); }
// The highest bit that is set, of some.
DQ_DEVICE int last_bit(u32 bits) { return 31 - __clz((int)bits); }
// Gives what stood there before.
DQ_DEVICE i32 atomic_add(i32* at, i32 value) { return atomicAdd(at, value); }
DQ_DEVICE void atomic_or(u32* at, u32 bits) { atomicOr(at, bits); }
DQ_DEVICE void atomic_max(u32* at, u32 value) { atomicMax(at, value); }

// `a * b + c` where the product is exact, so that fusing it changes nothing.
DQ_DEVICE double add_exact_product(double a, double b, double c) { return __fma_rn(a, b, c); }
DQ_DEVICE float add_exact_product(float a, float b, float c) { return __fmaf_rn(a, b, c); }
// `a + sign * b` for a sign of +1 or -1, rounded once.
DQ_DEVICE float add_signed(float a, float sign, float b) { return __fmaf_rn(sign, b, a); }
// 1 if integer `a` is above integer `b`, else 0; both below 2**23 in magnitude, or `b` so far off that it cannot
// matter.
DQ_DEVICE float exceeds(float a, float b) { return __saturatef(a - b); }
DQ_DEVICE double square_root(double x) { return __dsqrt_rn(x); }
DQ_DEVICE float round_to_integer(float x) { return rintf(x); }

}  // namespace dquant

#else
#include "simt.h"
#endif

namespace dquant {

// Lanes of a warp; the same as the tokens of a tile.
constexpr int LANES = 32;

// Power of two as FP64, for exponents in the normal range.
DQ_DEVICE double power_of_two(int exponent) { return bits_double((u64)(1023 + exponent) << 52); }

template <class T> DQ_DEVICE T warp_sum(T value) {
    for (int mask = LANES / 2; mask > 0; mask /= 2) value += from_lane_xor(value, mask);
    return value;
}

}  // namespace dquant
