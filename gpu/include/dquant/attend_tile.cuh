// A warp's part of attention: one tile of 32 tokens, one head at a time, from letters to weighted sums of levels.
//
// Everything is in registers, in the layout of the tensor cores: lane 4 r + c holds tokens r, r + 8, r + 16 and r + 24
// of query rows 2 c and 2 c + 1 (of each eight), and of outputs channels of letters r and r + 8 (of each sixteen).
// Products have eight columns; where there are four rows, lanes of the others take tokens r + 16 and r + 24 of rows
// 2 c - 4 and 2 c - 3 over while logits become weights, and what they hold of outputs is never used.
#pragma once

#include "dquant/attend_groups.cuh"
#include "dquant/attend_query.cuh"

namespace dquant {

template <class C> struct TileAttention {
    typedef AttendShape<C> S;
    typedef typename S::Keys K;
    typedef typename S::Values V;
    typedef Schedule<C> List;
    static constexpr int rows = S::rows, row_tiles = S::row_tiles;
    // Columns of a matrix product in use: rows 2c and 2c + 1 of each eight, as far as there are rows.
    static constexpr int columns = least(rows, 8);
    static constexpr bool spread = columns == 4;
    static constexpr int tokens = spread ? 2 : 4;  // of a lane, in steps of eight, while logits become weights

    const typename C::Params& p;
    u8* const shared;
    const u32 base;
    const int warp, lane, r, c;

    typename StreamOf<K>::Type key;
    typename StreamOf<V>::Type value;
    u32 key_stage, value_stage, key_operand, value_operand;
    const u8* key_tile;                  // of the unit whose keys are decoded, or soon will be
    u32 key_query;                                        // queries of the key head, counted from shared memory
    u32 key_scale[tokens / 2], value_scale[tokens / 2];    // FP16 of the lane's tokens
    u32 key_offset[tokens / 2], value_offset[tokens / 2];  // likewise, of a min-max grid
    float key_factor;                    // 2**exponent of the page
    float value_unit;                    // power of two taken out of the value scales
    int value_exponent;                  // of the page whose scales are loaded
    int first_valid, last_valid;         // tokens of the key tile that may count: first_valid to below last_valid
    int tile_token;                      // the key tile's first token, counted in pages as are
    int first_self, pass_row;            // the first query's position; the first row of the pass

    float logits[row_tiles][2][4];
    u32 weights[row_tiles][2][2];
    float sums[row_tiles][V::tiles][4];
    float largest[row_tiles][2], total[row_tiles][2];
    float shifted[row_tiles][2];  // what sums of levels begin with, for a half's unit

    DQ_DEVICE TileAttention(const typename C::Params& p, u8* shared)
        : p(p), shared(shared), base(shared_address(shared)), warp(threadIdx.x / LANES), lane(threadIdx.x % LANES),
          r(lane / 4), c(lane % 4) {}

    // Token `j` of the lane, and row `i` of those of row tile `n`.
    DQ_DEVICE int token_at(int j) const { return r + 8 * j + (spread ? 16 * (c / 2) : 0); }
    DQ_DEVICE int row_at(int n, int i) const { return n * 8 + 2 * (spread ? c % 2 : c) + i; }

    // Numbers of the lane's tokens from a tile's affine row, two to a register; tokens that do not count get zero.
    DQ_DEVICE void load_affine(u32 (&out)[tokens / 2], const u8* row, int stride, int last) const {
#pragma unroll
        for (int j = 0; j < tokens; ++j) {
            const int t = token_at(j);
            const u32 bits = t < last ? *(const u16*)(row + t * stride) : 0;
            out[j / 2] = j % 2 ? out[j / 2] | bits << 16 : bits;
        }
    }

    // Affine numbers of the unit at `at`: keys, and the values that follow one head later.
    DQ_DEVICE void load_key_affine(const Cursor<C>& at, const u8* page) {
        tile_token = ((List::first_unit(p, at.sequence) + at.unit) * C::warps + warp) * LANES;
        last_valid = least(most(p.lengths[at.sequence] - tile_token, 0), LANES);
        first_valid = least(most(List::first_token(p, at.sequence) - tile_token, 0), LANES);
        if (C::masked) {
            first_self = p.lengths[at.sequence] + List::exact(p.tail_lengths, at.sequence) - C::positions;
            pass_row = Queries<C>::pass_of(at) * rows;
        }
        const u8* row = key_tile + S::key_affine_at;
        load_affine(key_scale, row + S::key_affine - 2, S::key_affine, last_valid);
        if (!C::Key::mid_tread) load_affine(key_offset, row, S::key_affine, last_valid);
        key_factor = exp2f((float)*(const i16*)page);
    }
    // Those of values in two steps, so that nobody waits for the first.
    DQ_DEVICE void load_value_affine(const u8* tile, const u8* page) {
        const u8* row = tile + S::value_affine_at;
        load_affine(value_scale, row + S::value_affine - 2, S::value_affine, last_valid);
        if (!C::Value::mid_tread) load_affine(value_offset, row, S::value_affine, last_valid);
        value_exponent = *(const i16*)(page + 2);
    }
    DQ_DEVICE void unite_value_affine() {
        // Of all scales (and offsets) of the tile, so that weights times scales stay within FP16 whatever the values.
        float most_scale = 0.0f;
#pragma unroll
        for (int j = 0; j < tokens / 2; ++j) {
            most_scale = fmaxf(most_scale, fmaxf(fabsf(low_half(value_scale[j])), fabsf(high_half(value_scale[j]))));
            if (!C::Value::mid_tread)
                most_scale = fmaxf(
                    most_scale, 0.25f * fmaxf(fabsf(low_half(value_offset[j])), fabsf(high_half(value_offset[j])))
                );
        }
        for (int mask = spread ? 2 : 4; mask < LANES; mask *= 2)
            most_scale = fmaxf(most_scale, from_lane_xor(most_scale, mask));
        const u32 exponent = most(float_bits(most_scale) >> 23, 64);
        const float unit = bits_float(exponent << 23), inverse = bits_float((254 - exponent) << 23);
#pragma unroll
        for (int j = 0; j < tokens / 2; ++j) {
            value_scale[j] = floats_to_halves(low_half(value_scale[j]) * inverse, high_half(value_scale[j]) * inverse);
            if (!C::Value::mid_tread)
                value_offset[j] =
                    floats_to_halves(low_half(value_offset[j]) * inverse, high_half(value_offset[j]) * inverse);
        }
        value_unit = unit * exp2f((float)value_exponent);
    }

    // Of key head `head`.  Where its queries stand is kept, or it would be computed again for every product.
    DQ_DEVICE void begin_logits(int head) {
        key_query = S::query_at + head * (K::tiles * row_tiles * columns * 32) + lane * 8;
        keep_in_register(key_query);
#pragma unroll
        for (int i = 0; i < row_tiles * 8; ++i) (&logits[0][0][0])[i] = 0.0f;
    }
    DQ_DEVICE uint2 query_operand(int tile, int n) const {
        uint2 operand = make_uint2(0, 0);
        if (r < columns) operand = *(const uint2*)(shared + key_query + (tile * row_tiles + n) * (columns * 32));
        return operand;
    }

    DQ_DEVICE void multiply_keys(int chunk) {
        uint2 operand[row_tiles][K::letter];
#pragma unroll
        for (int f = 0; f < K::letter; ++f)
#pragma unroll
            for (int n = 0; n < row_tiles; ++n) operand[n][f] = query_operand(chunk * K::letter + f, n);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            u32 letters[4], levels[4];
            load_matrices(letters, key_operand + m * 512);
#pragma unroll
            for (int f = 0; f < K::letter; ++f) {
                take_field<K>(levels, letters, f);
#pragma unroll
                for (int n = 0; n < row_tiles; ++n) multiply(logits[n][m], levels, operand[n][f].x, operand[n][f].y);
            }
        }
    }
    DQ_DEVICE void multiply_values(int chunk) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            u32 letters[4], levels[4];
            load_transposed(letters, value_operand + m * 512);
#pragma unroll
            for (int f = 0; f < V::letter; ++f) {
                take_field<V>(levels, letters, f);
#pragma unroll
                for (int n = 0; n < row_tiles; ++n)
                    multiply(sums[n][chunk * V::letter + f], levels, weights[n][m][0], weights[n][m][1]);
            }
        }
    }

    // Likewise group GROUP of a grouped key or value head.
    template <int GROUP> DQ_DEVICE void multiply_key_group() {
        u32 letters[4], high[4];
        load_matrices(letters, key_operand);
#pragma unroll
        for (int i = 0; i < 4; ++i) high[i] = letters[i] >> 6;
        multiply_tiles<K, GROUP>(letters, high, [&](int tile, const u32* first, const u32* second) {
#pragma unroll
            for (int n = 0; n < row_tiles; ++n) {
                const uint2 operand = query_operand(tile, n);
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    const u32 levels[4] = {first[2 * m], first[2 * m + 1], second[2 * m], second[2 * m + 1]};
                    multiply(logits[n][m], levels, operand.x, operand.y);
                }
            }
        });
    }
    template <int GROUP> DQ_DEVICE void multiply_value_group() {
        u32 letters[4], high[4];
        load_transposed(letters, value_operand);
#pragma unroll
        for (int i = 0; i < 4; ++i) high[i] = letters[i] >> 6;
        multiply_tiles<V, GROUP>(letters, high, [&](int tile, const u32* first, const u32* second) {
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const u32 levels[4] = {first[2 * m], second[2 * m], first[2 * m + 1], second[2 * m + 1]};
#pragma unroll
                for (int n = 0; n < row_tiles; ++n) multiply(sums[n][tile], levels, weights[n][m][0], weights[n][m][1]);
            }
        });
    }

    // Which of the unit's pages, counted from its first, this warp's tile of keys lies in.
    DQ_DEVICE int mean_group() const {
        if (C::warps % S::page_tiles == 0 || S::page_tiles % C::warps == 0) return warp * S::mean_groups / C::warps;
        const int tile = tile_token / LANES;
        return tile / S::page_tiles - (tile - warp) / S::page_tiles;
    }

    // Whether query row `row` of the pass sees token `t` of the key tile.
    DQ_DEVICE bool sees(int row, int t) const {
        if (!C::masked) return t < last_valid;
        if (t < first_valid || t >= last_valid) return false;
        const int self = first_self + (pass_row + row) / C::group, token = tile_token + t;
        return (!p.causal || token <= self) && (p.sliding_window == 0 || token > self - p.sliding_window);
    }

    // Logits to weights.
    DQ_DEVICE void soften(int head, int parity) {
        const bool partly = C::masked ? true : last_valid < LANES;
        const float2* factors = (const float2*)(shared + S::factor_at) + head * rows;
        const float* means = (const float*)(shared + S::mean_at) +
                             ((parity * S::mean_groups + mean_group()) * S::heads + head) * rows;
        if constexpr (spread) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float other = from_lane_xor(logits[0][1][i], 2);
                logits[0][0][i] = c < 2 ? logits[0][0][i] : other;
            }
        }
#pragma unroll
        for (int n = 0; n < row_tiles; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = row_at(n, i);
                const float2 factor = factors[row];
                const float mean = C::Key::mean ? means[row] : 0.0f;
                // Levels times queries come out with 2**(6 - 24).
                const float unit = factor.x * key_factor * 262144.0f, sum = factor.y * key_factor;
                float peak = NO_LOGIT;
#pragma unroll
                for (int j = 0; j < tokens; ++j) {
                    const u32 pair = key_scale[j / 2];
                    const float scale = j % 2 ? high_half(pair) : low_half(pair);
                    float x;
                    if (C::Key::mid_tread) {
                        x = scale * (logits[n][j / 2][j % 2 * 2 + i] * unit - K::middle * sum) + mean;
                    } else {
                        const u32 o = key_offset[j / 2];
                        const float offset = j % 2 ? high_half(o) : low_half(o);
                        x = scale * (logits[n][j / 2][j % 2 * 2 + i] * unit) + offset * sum + mean;
                    }
                    if (C::soft_cap) {
                        const float cap = p.soft_cap * LOG2_E;
                        x = cap - 2.0f * cap * reciprocal(1.0f + power2(x * (2.0f / p.soft_cap)));
                    }
                    if (partly && !sees(row, token_at(j))) x = -1e38f;
                    logits[n][j / 2][j % 2 * 2 + i] = x;
                    peak = fmaxf(peak, x);
                }
                largest[n][i] = peak;
            }
            largest_of_warp(largest[n]);
        }
    }
    // Over the lanes of the same rows, of both rows at once: half of the lanes take either.
    DQ_DEVICE void largest_of_warp(float (&peak)[2]) const {
        const bool odd = lane & 4;
        float mine = fmaxf(odd ? peak[1] : peak[0], from_lane_xor(odd ? peak[0] : peak[1], 4));
        mine = fmaxf(mine, from_lane_xor(mine, 8));
        mine = fmaxf(mine, from_lane_xor(mine, 16));
        if (spread) mine = fmaxf(mine, from_lane_xor(mine, 2));
        const float other = from_lane_xor(mine, 4);
        peak[0] = odd ? other : mine;
        peak[1] = odd ? mine : other;
    }
    // Likewise sums.  They end where `put_slot` takes them from: in lanes of even r that of the first row, of odd r
    // that of the second, in both numbers.
    DQ_DEVICE void total_of_warp(float (&all)[2]) const {
        const bool odd = lane & 4;
        float mine = (odd ? all[1] : all[0]) + from_lane_xor(odd ? all[0] : all[1], 4);
        mine += from_lane_xor(mine, 8);
        mine += from_lane_xor(mine, 16);
        if (spread) mine += from_lane_xor(mine, 2);
        all[0] = all[1] = mine;
    }
    // The rest, once the values' affine numbers of the same tokens are loaded.
    DQ_DEVICE void weigh() {
#pragma unroll
        for (int n = 0; n < row_tiles; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) total[n][i] = shifted[n][i] = 0.0f;
#pragma unroll
            for (int j = 0; j < tokens; ++j) {
                const float scale =
                    WEIGHT_UNIT * (j % 2 ? high_half(value_scale[j / 2]) : low_half(value_scale[j / 2]));
                float scaled[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float weight = power2(logits[n][j / 2][j % 2 * 2 + i] - largest[n][i]);
                    total[n][i] += weight;
                    scaled[i] = weight * scale;
                    if (!C::Value::mid_tread)
                        shifted[n][i] +=
                            weight * (j % 2 ? high_half(value_offset[j / 2]) : low_half(value_offset[j / 2]));
                }
                weights[n][j / 2][j % 2] = transpose(floats_to_halves(scaled[0], scaled[1]));
                // Columns 4 to 7 have the rows' later tokens.
                if constexpr (spread) weights[n][1][j] = from_lane_xor(weights[n][0][j], 16);
            }
            total_of_warp(total[n]);
            // Levels count from the middle.
            if (C::Value::mid_tread) {
                // The tensor cores multiply rounded weights, so they sum them, too: times minus 64 times the middle.
                constexpr u32 middle = 0x8000u | (u32)(V::middle * 64.0f);
                const u32 levels[4] = {middle * 0x10001u, middle * 0x10001u, middle * 0x10001u, middle * 0x10001u};
                float sum[4] = {};
#pragma unroll
                for (int m = 0; m < 2; ++m) multiply(sum, levels, weights[n][m][0], weights[n][m][1]);
#pragma unroll
                for (int i = 0; i < 2; ++i) shifted[n][i] = sum[i];
            } else {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
#pragma unroll
                    for (int mask = spread ? 2 : 4; mask < LANES; mask *= 2)
                        shifted[n][i] += from_lane_xor(shifted[n][i], mask);
                    shifted[n][i] *= 64.0f / OUTPUT_UNIT;
                }
            }
        }
    }

    // Sums of the levels of value head `coded` begin with minus the middle, or with offsets of a min-max grid, so that
    // they are small enough for FP16 when they end.
    DQ_DEVICE void begin_sums(int coded) {
#pragma unroll
        for (int tile = 0; tile < V::tiles; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float middle = Output<C>::middle(p, coded, tile, half);
#pragma unroll
                for (int n = 0; n < row_tiles; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i) sums[n][tile][2 * half + i] = shifted[n][i] * middle;
            }
        }
    }
};

}  // namespace dquant
