// Numbers in memory: rows of FP32, FP16 or BF16, and the conversions the format rounds by.
#pragma once

#include "dquant/platform.cuh"

namespace dquant {

// Element types of rows, by the bytes they are stored as; `store` rounds to nearest, ties to even.
struct Float32 {
    typedef float Stored;
    static DQ_DEVICE float load(float x) { return x; }
    static DQ_DEVICE float store(float x) { return x; }
};
struct Float16 {
    typedef u16 Stored;
    static DQ_DEVICE float load(u16 bits) { return half_to_float(bits); }
    static DQ_DEVICE u16 store(float x) { return float_to_half(x); }
    static DQ_DEVICE u32 store_two(float first, float second) { return floats_to_halves(first, second); }
};
struct BFloat16 {
    typedef u16 Stored;
    static DQ_DEVICE float load(u16 bits) { return bits_float((u32)bits << 16); }
    static DQ_DEVICE u16 store(float x) { return (u16)floats_to_bfloats(x, 0.0f); }
    static DQ_DEVICE u32 store_two(float first, float second) { return floats_to_bfloats(first, second); }
};

// FP64 to FP16 bits by one rounding: nearest, ties to even, beyond the largest to infinity.
DQ_DEVICE u16 double_to_half(double x) {
    const u64 bits = double_bits(x);
    const u16 sign = (u16)(bits >> 48 & 0x8000);
    const u64 magnitude = bits & 0x7FFFFFFFFFFFFFFFull;
    if (magnitude >= 0x7FF0000000000000ull) return sign | (magnitude > 0x7FF0000000000000ull ? 0x7E00 : 0x7C00);
    const int exponent = (int)(magnitude >> 52) - 1023;
    if (exponent >= 16) return sign | 0x7C00;
    if (exponent < -25) return sign;
    const u64 fraction = (magnitude & 0xFFFFFFFFFFFFFull) | 1ull << 52;
    // Below 2**-14 steps are 2**-24 wide, so more of the fraction is cut off.
    const int cut = 42 + (exponent < -14 ? -14 - exponent : 0);
    const u64 kept = fraction >> cut, half = 1ull << (cut - 1), rest = fraction & ((half << 1) - 1);
    u32 result = (u32)kept + (rest > half || (rest == half && (kept & 1)) ? 1 : 0);
    // The leading one of a normal number adds the last unit of its exponent; a carry goes on into the exponent.
    if (exponent >= -14) result += (u32)(exponent + 14) << 10;
    return sign | (u16)result;
}

// The smallest FP16 not below `x`, a finite FP32 within its range.
DQ_DEVICE u16 round_up_half(float x) {
    const u16 bits = float_to_half(x);
    if (!(half_to_float(bits) < x)) return bits;
    if ((bits & 0x7FFF) == 0) return 1;
    return bits & 0x8000 ? bits - 1 : bits + 1;
}

// The largest FP16 not above `x`.
DQ_DEVICE u16 round_down_half(float x) { return round_up_half(-x) ^ 0x8000; }

// `x * 2**exponent` of a finite FP32, rounded once; beyond the largest FP32 that number.
DQ_DEVICE float scale_float(float x, int exponent) {
    const double scaled = (double)x * power_of_two(exponent);
    const double largest = 3.4028234663852886e38;
    return (float)(scaled > largest ? largest : scaled < -largest ? -largest : scaled);
}

DQ_DEVICE bool half_is_finite(u16 bits) { return (bits & 0x7C00) != 0x7C00; }
DQ_DEVICE bool is_finite(float x) { return (float_bits(x) & 0x7F800000) != 0x7F800000; }

}  // namespace dquant
