// The grid (dquantcodec/grid.py): a warp lays it over a stream in shared memory, and fits it to the final symbols.
//
// The order of every sum is the CPU's; sums over positions are integers, exact in any order.
#pragma once

#include "dquant/numbers.cuh"
#include "dquant/plan.cuh"

namespace dquant {

// Positions count 2**-16 steps.  They stay below 2**23 and are kept as FP32, where comparing them is cheapest.
constexpr int FRACTION = 16;
constexpr i64 ONE = 1 << FRACTION;
constexpr int REACH = 2;
constexpr int BEYOND = 32;
constexpr double MOST_GAIN = 3.0;
constexpr double NOISE_SHARE = 1.0 / 8;

// Offset and scale as FP16 bits.
struct Grid {
    u16 offset, scale;
};

// A value and where it stands, so that of equal values (+0 and -0) the first one is taken.
struct Extreme {
    float value;
    int place;
};

template <class Better> DQ_DEVICE Extreme warp_extreme(Extreme best, Better better) {
    for (int mask = LANES / 2; mask > 0; mask /= 2) {
        const Extreme other = {from_lane_xor(best.value, mask), from_lane_xor(best.place, mask)};
        if (better(other.value, best.value) || (other.value == best.value && other.place < best.place)) best = other;
    }
    return best;
}

struct Less {
    DQ_DEVICE bool operator()(float a, float b) const { return a < b; }
};
struct Greater {
    DQ_DEVICE bool operator()(float a, float b) const { return a > b; }
};

template <class Better> DQ_DEVICE float row_extreme(const float* x, int count, int lane, Better better) {
    // Lanes beyond a short row repeat its first value.
    Extreme best = {x[lane < count ? lane : 0], lane < count ? lane : 0};
    for (int i = lane + LANES; i < count; i += LANES)
        if (better(x[i], best.value)) best = {x[i], i};
    return warp_extreme(best, better).value;
}

// A warp's 256 sums of squares, eight neighbours in a lane, added to one: neighbours first, then pairs, and so on.
DQ_DEVICE double all_squares(const double (&sums)[8]) {
    double total = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
    for (int mask = 1; mask < LANES; mask *= 2) total += from_lane_xor(total, mask);
    return total;
}

// The sum of squares in FP64: of every 256th value, and those sums as above.  `x` begins at a multiple of 16 bytes.
template <int COUNT> DQ_DEVICE double row_squares(const float* x, int lane) {
    double sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    for (int first = 8 * lane; first < COUNT; first += 8 * LANES) {
        if (COUNT % 8 == 0) {
            const Vector16 low = *(const Vector16*)(x + first), high = *(const Vector16*)(x + first + 4);
            const u32 words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const double value = (double)bits_float(words[j]);
                sums[j] = add_exact_product(value, value, sums[j]);
            }
        } else {
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (first + j < COUNT) sums[j] = add_exact_product((double)x[first + j], (double)x[first + j], sums[j]);
        }
    }
    return all_squares(sums);
}

// The grid of a stream and, in place of its values, their positions.
template <class C> DQ_DEVICE Grid lay_grid(float* x, int lane) {
    constexpr int n = Shape<C>::values;
    Grid grid;
    float offset = 0.0f, middle = 0.0f, bottom = 0.0f, top = (float)((C::levels - 1) * ONE);
    if (C::mid_tread) {
        float peak = 0.0f;
        for (int i = lane; i < n; i += LANES) {
            const float magnitude = bits_float(float_bits(x[i]) & 0x7FFFFFFF);
            peak = magnitude > peak ? magnitude : peak;
        }
        for (int mask = LANES / 2; mask > 0; mask /= 2) {
            const float other = from_lane_xor(peak, mask);
            peak = other > peak ? other : peak;
        }
        const double usual = square_root(row_squares<n>(x, lane) / n) * C::step;
        const double least = (double)peak / ((C::levels - 1) / 2.0 + REACH);
        grid = {0, double_to_half(usual > least ? usual : least)};
        middle = (C::levels - 1) / 2.0f;
        bottom = (float)(-BEYOND * ONE);
        top = (float)((C::levels - 1 + BEYOND) * ONE);
    } else {
        const float low = row_extreme(x, n, lane, Less()), high = row_extreme(x, n, lane, Greater());
        grid.offset = round_down_half(low);
        offset = half_to_float(grid.offset);
        grid.scale = round_up_half((high - offset) / (float)(C::levels - 1));
    }
    const float step = half_to_float(grid.scale);
    const float inverse = step > 0.0f ? 1.0f / step : 0.0f;
    warp_barrier();
    for (int i = lane; i < n; i += LANES) {
        float v = round_to_integer(((x[i] - offset) * inverse + middle) * 65536.0f);
        v = v < bottom ? bottom : v;
        v = v > top ? top : v;
        x[i] = v;
    }
    warp_barrier();
    return grid;
}

// Sums of m, m*m, u, u*m, u*u over symbols m and their positions u.
struct Moments {
    // A lane's share of m*m stays below 2**12 * 63**2.
    i32 m, mm;
    i64 u, um, uu;

    DQ_DEVICE void add(float position, float level) {
        const i32 at = (i32)position, symbol = (i32)level;
        m += symbol;
        mm += symbol * symbol;
        u += at;
        um += (i64)at * symbol;
        uu += (i64)at * at;
    }
    DQ_DEVICE Moments over_warp() const {
        return {warp_sum(m), warp_sum(mm), warp_sum(u), warp_sum(um), warp_sum(uu)};
    }
};

DQ_DEVICE double half_to_double(u16 bits) { return (double)half_to_float(bits); }

// Sum of (u - a - b m)**2, in squared steps of the old grid.
DQ_DEVICE double squared_error(const Moments& sums, double n, double a, double b) {
    const double m = (double)sums.m, mm = (double)sums.mm;
    const double u = (double)sums.u / ONE, um = (double)sums.um / ONE, uu = (double)sums.uu / (double)(ONE * ONE);
    return uu - 2.0 * (a * u + b * um) + n * a * a + 2.0 * a * b * m + b * b * mm;
}

// The least-squares grid, if it lowers the squared error after rounding to FP16.
template <class C> DQ_DEVICE Grid refit(const Moments& sums, Grid grid) {
    const double n = Shape<C>::values;
    const double m = (double)sums.m, mm = (double)sums.mm;
    const double u = (double)sums.u / ONE, um = (double)sums.um / ONE;
    const double spread = n * mm - m * m;
    const double slope = spread > 0.0 ? (n * um - m * u) / spread : 0.0;
    const double intercept = (u - slope * m) / n;
    const double offset = half_to_double(grid.offset), scale = half_to_double(grid.scale);
    const Grid fitted = {double_to_half(offset + scale * intercept), double_to_half(scale * slope)};
    if (!(scale > 0.0)) return grid;
    const double a = (half_to_double(fitted.offset) - offset) / scale;
    const double before = squared_error(sums, n, 0.0, 1.0);
    return squared_error(sums, n, a, half_to_double(fitted.scale) / scale) < before ? fitted : grid;
}

// `scale` times the gain that sums of squares and products of positions v and levels y ask for: least squares or nearly
// unbiased.
template <class C> DQ_DEVICE u16 gained_scale(u16 scale, double vv, double vy, double yy) {
    const bool useful = yy > 0.0 && vy > 0.0;
    double gain = useful ? vy / yy : 1.0;
    if (C::unbiased) {
        const double kept = useful ? vy * vy / (vv * yy) : 1.0;
        gain = gain / (kept + (1.0 - kept) * NOISE_SHARE);
    }
    const u16 fitted = double_to_half(half_to_double(scale) * (gain < MOST_GAIN ? gain : MOST_GAIN));
    return half_is_finite(fitted) ? fitted : scale;
}

// The scale of a mid-tread grid for the final symbols.
template <class C> DQ_DEVICE Grid regain(const Moments& sums, Grid grid) {
    const double n = Shape<C>::values, middle = (C::levels - 1) / 2.0;
    const double m = (double)sums.m, mm = (double)sums.mm;
    const double u = (double)sums.u / ONE, um = (double)sums.um / ONE, uu = (double)sums.uu / (double)(ONE * ONE);
    const double yy = mm - 2.0 * middle * m + n * (middle * middle);
    const double vy = um - middle * (u + m) + n * (middle * middle);
    const double vv = uu - 2.0 * middle * u + n * (middle * middle);
    return {0, gained_scale<C>(grid.scale, vv, vy, yy)};
}

}  // namespace dquant
