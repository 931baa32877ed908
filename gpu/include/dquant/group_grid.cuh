// The grid of grouped streams (dquantcodec/group_grid.py): a warp finds a token's scale and puts its positions in coded
// order.
#pragma once

#include "dquant/groups.cuh"
#include "dquant/jobs.cuh"

namespace dquant {

constexpr float FARTHEST = (1 << 23) - 1;
constexpr double GAIN_UNIT = 512.0;

// The means of channels `first` to `first + 8`, taken away.
template <class C> DQ_DEVICE void less_means(const u8* page, const KindLayout& at, int first, float (&x)[8]) {
    constexpr int n = C::heads * C::head_dim, D = C::head_dim;
    const u16* scales = (const u16*)(page + at.scale_at);
    const u8* means = page + at.mean_at + first;
    if constexpr (D % 8 == 0 && C::heads % 2 == 0) {
        if (first >= n) return;
        // Means begin at a multiple of 4 bytes.
        const u32 words[2] = {((const u32*)means)[0], ((const u32*)means)[1]};
        const float scale = half_to_float(scales[first / D]);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] -= scale * (float)(i8)(words[j / 4] >> (8 * (j % 4)));
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (first + j < n) x[j] -= half_to_float(scales[(first + j) / D]) * (float)(i8)means[j];
    }
}

// A token's values, scaled and less their means: eight neighbouring channels of every 256 in a lane.  Those of long
// streams are not held but loaded again.
template <class C, class Element> struct TokenValues {
    static constexpr int runs = (C::heads * C::head_dim + 255) / 256;
    static constexpr bool held = runs <= 4;
    static constexpr int unrolled = held ? runs : 1;

    const EncodeParams& params;
    const u8* page;
    i64 token;
    int exponent, lane;
    bool finite;
    float values[held ? runs : 1][8];

    DQ_DEVICE TokenValues(const EncodeParams& params_, const u8* page_, i64 token_, int lane_)
        : params(params_), page(page_), token(token_), lane(lane_), finite(true) {
        if (held) {
            // All loads before the first use.
#pragma unroll unrolled
            for (int run = 0; run < runs; ++run)
                load_eight<C, Element>(params, token, 256 * run + 8 * lane, values[held ? run : 0]);
        }
        exponent = page_exponent(page, params.at);
        if (held) {
#pragma unroll unrolled
            for (int run = 0; run < runs; ++run) prepare(256 * run + 8 * lane, values[held ? run : 0]);
        }
    }

    DQ_DEVICE void prepare(int first, float (&x)[8]) {
        keep_finite(x, finite);
        if (exponent) {
#pragma unroll
            for (int j = 0; j < 8; ++j) x[j] = scale_float(x[j], -exponent);
        }
        if constexpr (C::mean) less_means<C>(page, params.at, first, x);
    }

    // `visit(first, x)` for the lane's channels from each `first` on.
    template <class Visit> DQ_DEVICE void each(const Visit& visit) {
#pragma unroll unrolled
        for (int run = 0; run < runs; ++run) {
            const int first = 256 * run + 8 * lane;
            float(&x)[8] = values[held ? run : 0];
            if (!held) {
                load_eight<C, Element>(params, token, first, x);
                prepare(first, x);
            }
            visit(first, x);
        }
    }
};

// A token's scale; its positions in coded order, and `uu`, a lane's share of their squares' sum.
template <class C, class Element, class Tables>
DQ_DEVICE u16 place_channels(
    const EncodeParams& params, const Tables& tables, const u8* page, i64 token, u32* positions, i64& uu,
    bool& finite, int lane) {
    TokenValues<C, Element> values(params, page, token, lane);
    double sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    float needed = 0.0f;
    values.each([&](int first, const float(&x)[8]) {
        const Vector16* inverses = (const Vector16*)(tables.inverses + first);
        const Vector16 low = inverses[0], high = inverses[1];
        const u32 inverse[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            sums[j] = add_exact_product((double)x[j], (double)x[j], sums[j]);
            const float part = bits_float(float_bits(x[j]) & 0x7FFFFFFF) * bits_float(inverse[j]);
            needed = part > needed ? part : needed;
        }
    });
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2) {
        const float other = from_lane_xor(needed, mask);
        needed = other > needed ? other : needed;
    }
    const double usual = square_root(all_squares(sums) / (C::heads * C::head_dim)) * tables.step;
    const u16 scale = double_to_half(usual > (double)needed ? usual : (double)needed);
    const float step = half_to_float(scale);
    const float inverse = step > 0.0f ? 1.0f / step : 0.0f;
    values.each([&](int first, const float(&x)[8]) {
        const Vector16* channels = (const Vector16*)(tables.channels + first);
        const Vector16 low = channels[0], high = channels[1];
        const u32 channel[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float v = round_to_integer(x[j] * inverse * 65536.0f);
            v = v < -FARTHEST ? -FARTHEST : v;
            v = v > FARTHEST ? FARTHEST : v;
            const u32 place = channel[j] & LEFT_OUT;
            if (place != LEFT_OUT) {
                const i32 u = (i32)v;
                uu += (i64)u * u;
                positions[place] = (u32)u + (channel[j] >> PLACE << 16);
            }
        }
    });
    finite = values.finite;
    warp_barrier();
    return scale;
}

// Sums of u * u, u * y and y * y over positions u and levels y, weighted by gains: 2**-16 steps and 1/512.
struct GroupMoments {
    i64 uu, uy, yy;
};

// The scale for the final levels.
template <class C> DQ_DEVICE u16 fit_group_scale(const GroupMoments& sums, u16 scale) {
    const double uu = (double)warp_sum(sums.uu) / (double)(ONE * ONE);
    const double uy = (double)warp_sum(sums.uy) / (ONE * GAIN_UNIT);
    const double yy = (double)warp_sum(sums.yy) / (GAIN_UNIT * GAIN_UNIT);
    return gained_scale<C>(scale, uu, uy, yy);
}

}  // namespace dquant
