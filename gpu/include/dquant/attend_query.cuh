// Queries of one segment: rotated once instead of every key (paper, section 4.5), laid out for the tensor cores.
//
// With a key `s (m - middle) + mean` in rotated form, and `q` the rotated query, a logit is `s (q . m - middle sum(q))
// + q . mean`.  Rotated queries are kept as FP16 of a power of two apart, in which the largest lies in [1, 2); their
// sums are sums of the rounded numbers, so that rounding does not disturb the difference.
#pragma once

#include "dquant/attend_groups.cuh"
#include "dquant/attend_schedule.cuh"
#include "dquant/rotation.cuh"

namespace dquant {

// FP32 of an element of queries.
template <int ELEMENT> DQ_DEVICE float load_element(const void* from, i64 at) {
    if (ELEMENT == 0) return ((const float*)from)[at];
    const u16 bits = ((const u16*)from)[at];
    return ELEMENT == 1 ? half_to_float(bits) : bits_float((u32)bits << 16);
}

// One rotated row in registers, value `lane + 32 * i` in `y[i]`, without the factors.  For head sizes that are no power
// of two, `matrix` [D, D] says how input `k` counts in output `d`; BACKWARD exchanges the two.
template <int D, bool BACKWARD> DQ_DEVICE void turn_lanes(float (&y)[D / LANES], const i8* matrix, int lane) {
    if constexpr ((D & (D - 1)) == 0) {
        lane_butterflies<D / LANES>(y, lane);
    } else {
        float sum[D / LANES] = {};
        for (int from = 0; from < LANES; ++from) {
#pragma unroll
            for (int i = 0; i < D / LANES; ++i) {
                const int k = from + LANES * i;
                const float value = from_lane(y[i], from);
#pragma unroll
                for (int j = 0; j < D / LANES; ++j) {
                    const int d = lane + LANES * j;
                    sum[j] += value * (float)matrix[BACKWARD ? d * D + k : k * D + d];
                }
            }
        }
#pragma unroll
        for (int j = 0; j < D / LANES; ++j) y[j] = sum[j];
    }
}

template <class C> struct Queries {
    typedef AttendShape<C> S;
    typedef typename S::Keys L;
    typedef typename C::Params Params;
    static constexpr int per_lane = S::dim / LANES;
    static constexpr int fragment_lanes = least(S::rows, 8) * 4;

    // Row `row` of pass `pass`: the query head and position it stands for; false if there is none.
    DQ_DEVICE static bool place(int pass, int row, int& position, int& member) {
        const int all = pass * S::rows + row;
        position = all / C::group;
        member = all % C::group;
        return all < S::all_rows;
    }

    // The pass over query rows that an item is part of.
    DQ_DEVICE static int pass_of(const Cursor<C>& at) { return S::passes == 1 ? 0 : at.group / C::substreams; }

    // Which head stands at place `coded` of the streams.
    DQ_DEVICE static int head_at(const Params& p, int coded) {
        if constexpr (C::grouped)
            return p.heads[coded];
        else
            return coded;
    }
    // Where in `query` row `row` of a pass over a head begins; false if there is none.
    DQ_DEVICE static bool row_of(const Cursor<C>& at, int pass, int head, int row, i64& from) {
        int position, member;
        const bool there = place(pass, row, position, member);
        const i64 first = ((i64)at.sequence * C::positions + position) * (C::heads * C::group);
        from = (first + head * C::group + member) * S::dim;
        return there;
    }

    // Brings the rows of a segment near.
    DQ_DEVICE static void touch_rows(const Params& p, const Cursor<C>& at, u32 unused, int warp, int lane) {
        constexpr int element_bytes = C::element == 0 ? 4 : 2;
        for (int r = warp; r < S::heads * S::rows; r += C::warps) {
            const int head = head_at(p, at.group % C::substreams * S::heads + r / S::rows);
            i64 from;
            if (row_of(at, pass_of(at), head, r % S::rows, from) && lane * 32 < S::dim * element_bytes)
                touch(unused, (const u8*)p.query + from * element_bytes + lane * 32);
        }
    }

    // Rows of all heads of a segment: FP16 rows, and factors (logit of a unit of them, the same times their sum).
    DQ_DEVICE static void rotate_rows(const Params& p, const Cursor<C>& at, u8* shared, int warp, int lane) {
        u16* rows = (u16*)(shared + S::row_at);
        float2* factors = (float2*)(shared + S::factor_at);
        const int pass = pass_of(at), first_head = at.group % C::substreams * S::heads;
        for (int r = warp; r < S::heads * S::rows; r += C::warps) {
            const int head = head_at(p, first_head + r / S::rows);
            i64 from;
            const bool there = row_of(at, pass, head, r % S::rows, from);
            float y[per_lane], middle[per_lane];
#pragma unroll
            for (int i = 0; i < per_lane; ++i) {
                const int d = lane + LANES * i;
                y[i] = there ? load_element<C::element>(p.query, from + d) : 0.0f;
                middle[i] = 1.0f;
            }
            if constexpr (L::rotated) {
#pragma unroll
                for (int i = 0; i < per_lane; ++i) y[i] *= p.factors[head * S::dim + lane + LANES * i];
                turn_lanes<S::dim, false>(y, p.matrix, lane);
            }
            if constexpr (C::grouped) {
                // Gains of the channels' classes; the sum counts each as often as half its levels.
#pragma unroll
                for (int i = 0; i < per_lane; ++i) {
                    y[i] *= p.key_gains[head * S::dim + lane + LANES * i];
                    middle[i] = p.key_middles[head * S::dim + lane + LANES * i];
                }
            }
            float largest = 0.0f;
#pragma unroll
            for (int i = 0; i < per_lane; ++i) largest = fmaxf(largest, fabsf(y[i]));
            for (int mask = 16; mask > 0; mask /= 2) largest = fmaxf(largest, from_lane_xor(largest, mask));
            // Exponents at the edges of FP32 are out of reach of their inverse.
            const u32 exponent = (u32)most(2, least(252, (int)(float_bits(largest) >> 23)));
            const float unit = bits_float(exponent << 23), inverse = bits_float((254 - exponent) << 23);
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < per_lane; ++i) {
                const u16 half = float_to_half(y[i] * inverse);
                rows[r * S::dim + lane + LANES * i] = half;
                sum += half_to_float(half) * middle[i];
            }
            sum = warp_sum(sum);
            const float factor = p.scale * LOG2_E * unit;
            if (lane == 0) factors[r] = make_float2(factor, factor * sum);
        }
    }

    // The operands of matrix products, from the rows: [head][key tile][row tile][lane] of four FP16.
    DQ_DEVICE static void lay_out(const Params& p, const Cursor<C>& at, u8* shared, int thread) {
        const u16* rows = (const u16*)(shared + S::row_at);
        uint2* fragments = (uint2*)(shared + S::query_at);
        constexpr int count = S::heads * L::tiles * S::row_tiles * fragment_lanes;
        for (int i = thread; i < count; i += S::threads) {
            const int lane = i % fragment_lanes, row_tile = i / fragment_lanes % S::row_tiles;
            const int tile = i / (fragment_lanes * S::row_tiles) % L::tiles;
            const int head = i / (fragment_lanes * S::row_tiles * L::tiles);
            const u16* row = rows + (head * S::rows + row_tile * 8 + lane / 4) * S::dim;
            // The field's place in the letter is undone here, at no cost in the loop.
            u32 halves[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int letter = 2 * (lane % 4) + (k & 1), half = k >> 1;
                float value = 0.0f;
                if constexpr (C::grouped) {
                    const int coded = at.group % C::substreams * S::heads + head, number = 2 * tile + half;
                    if (number < L::halves) {
                        const u32 place = p.key_order[(coded * L::halves + number) * 8 + letter];
                        value = half_to_float(row[place & 0xFFFF]) * half_to_float((u16)(place >> 16));
                    }
                } else {
                    const int number = 16 * (tile / L::letter) + letter + 8 * half, field = tile % L::letter;
                    const int d = number * L::letter + field;
                    if (number < L::per_head && d < S::dim)
                        value = half_to_float(row[d]) * bits_float((u32)(127 + field_shift(field)) << 23);
                }
                halves[k] = float_to_half(value);
            }
            fragments[i] = make_uint2(halves[0] | halves[1] << 16, halves[2] | halves[3] << 16);
        }
    }
    // Channel `d` of a row, of the operands of letters with one table for all.
    DQ_DEVICE static float laid_out(const u8* shared, int head, int row, int d) {
        if constexpr (C::grouped) return 0.0f;
        else {
            const int number = d / L::letter, field = d % L::letter, tile = number / 16 * L::letter + field;
            const int fragment = (head * L::tiles + tile) * S::row_tiles + row / 8;
            const int lane = row % 8 * 4 + number % 8 / 2, half = number % 16 / 8 * 2 + number % 2;
            const u16 bits = ((const u16*)(shared + S::query_at))[(fragment * fragment_lanes + lane) * 4 + half];
            return half_to_float(bits) * bits_float((u32)(127 - field_shift(field)) << 23);
        }
    }
    // log2 of 64 over the field's weight.
    DQ_DEVICE static int field_shift(int field) {
        int shift = 0;
        if constexpr (!C::grouped) {
#pragma unroll
            for (int f = 0; f < L::letter; ++f)
                if (f == field) shift = 6 - (L::place(f) - L::shift(f));
        }
        return shift;
    }

    // Logits that the page means add: [mean group][head][row] of buffer `parity`.  Does nothing without means.
    // `page_at` gives the first byte of the unit's pages by number.
    template <class PageAt>
    DQ_DEVICE static void mean_logits(
        const Params& p, const Cursor<C>& at, u8* shared, int parity, PageAt page_at, int warp, int lane
    ) {
        if constexpr (C::Key::mean) {
            float* out = (float*)(shared + S::mean_at) + parity * S::mean_groups * S::heads * S::rows;
            const u16* rows = (const u16*)(shared + S::row_at);
            const float2* factors = (const float2*)(shared + S::factor_at);
            const int first_head = at.group % C::substreams * S::heads;
            for (int i = warp; i < S::mean_groups * S::heads; i += C::warps) {
                const int h = i % S::heads, head = head_at(p, first_head + h);
                const u8* page = page_at(i / S::heads);
                const float scale = half_to_float(((const u16*)(page + S::key_scale_at))[head]);
                float mean[per_lane];
#pragma unroll
                for (int k = 0; k < per_lane; ++k)
                    mean[k] = (float)((const i8*)page)[S::key_mean_at + head * S::dim + lane + LANES * k];
                float dot[S::rows];
#pragma unroll
                for (int r = 0; r < S::rows; ++r) {
                    dot[r] = 0.0f;
                    i64 from;
                    const bool there = row_of(at, pass_of(at), head, r, from);
#pragma unroll
                    for (int k = 0; k < per_lane; ++k) {
                        const int d = lane + LANES * k;
                        if (S::rows_kept)
                            dot[r] += mean[k] * half_to_float(rows[(h * S::rows + r) * S::dim + d]);
                        else if (L::rotated)
                            dot[r] += mean[k] * laid_out(shared, h, r, d);
                        else if (there)
                            dot[r] += mean[k] * load_element<C::element>(p.query, from + d);
                    }
                }
                // Halves of the lanes take halves of the rows, until a lane has one row.
                int row = 0;
#pragma unroll
                for (int mask = LANES / 2, left = S::rows; mask > 0; mask /= 2) {
                    const bool upper = lane & mask;
                    if (left > 1) {
                        left /= 2;
                        if (upper) row += left;
#pragma unroll
                        for (int r = 0; r < S::rows / 2; ++r) {
                            if (r >= left) continue;
                            const float send = upper ? dot[r] : dot[r + left], keep = upper ? dot[r + left] : dot[r];
                            dot[r] = keep + from_lane_xor(send, mask);
                        }
                    } else {
                        dot[0] += from_lane_xor(dot[0], mask);
                    }
                }
                const int exponent = *(const i16*)page;
                if (lane % (LANES / S::rows) == 0) {
                    const float factor = L::rotated ? factors[h * S::rows + row].x : p.scale * LOG2_E;
                    out[i * S::rows + row] = dot[0] * scale * factor * exp2f((float)exponent);
                }
            }
        }
    }
};

}  // namespace dquant
