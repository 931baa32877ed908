// Outputs of a head, from the warps of a block to the partial result of its segment.
//
// Every warp leaves what it has in a slot of shared memory; a few warps, in turn, add the slots of all of them to what
// stands in global memory, by largest logits and totals.
#pragma once

#include "dquant/attend_tile.cuh"

namespace dquant {

template <class C> struct SlotAttention : TileAttention<C> {
    typedef TileAttention<C> Tile;
    typedef typename Tile::S S;
    typedef typename Tile::V V;
    using Tile::p; using Tile::shared; using Tile::base; using Tile::warp; using Tile::lane; using Tile::r;
    using Tile::c; using Tile::sums; using Tile::largest; using Tile::total; using Tile::rows; using Tile::row_tiles;
    using Tile::columns;

    DQ_DEVICE SlotAttention(const typename C::Params& p, u8* shared) : Tile(p, shared) {}

    // This warp's outputs of a head to its slot, its largest logits, totals and unit beside them.
    DQ_DEVICE void put_slot(float unit) const {
        u32 slot = base + S::slot_at + warp * S::slot_bytes + (r * (rows / 2) + c) * 8;
        keep_in_register(slot);
        float* summary = (float*)(shared + S::summary_at) + warp * S::summary_floats;
        if (2 * c < columns) {
#pragma unroll
            for (int n = 0; n < row_tiles; ++n) {
#pragma unroll
                for (int tile = 0; tile < V::tiles; ++tile) {
                    const float* sum = sums[n][tile];
                    const u32 low = floats_to_halves(sum[0], sum[1]), high = floats_to_halves(sum[2], sum[3]);
                    store_shared2(slot + (tile * 4 * rows + n * 4) * 8, low, high);
                }
                if (r < 2) {
                    summary[n * 8 + 2 * c + r] = r ? largest[n][1] : largest[n][0];
                    summary[rows + n * 8 + 2 * c + r] = total[n][0];
                }
            }
            if (lane == 0) summary[2 * rows] = unit;
        }
    }

    // Adds the slots of all warps for head `head` to the segment's partial result, by a few warps in turn.
    DQ_DEVICE void sum_slots(int step, int slot, int head, bool first, int parity) const {
        const int turn = (warp + C::warps - step * S::summing_warps % C::warps) % C::warps;
        if (turn >= S::summing_warps) return;
        float4* partial = (float4*)(p.partial + (i64)slot * S::partial_floats) + head * S::pieces * 2;
        float* factor = (float*)(shared + S::weight_at) + turn * (C::warps + 1) * rows;
        float2* state = (float2*)(shared + S::state_at);
        const float2* before = state + ((parity ^ 1) * S::heads + head) * rows;
        constexpr int warps_at_once = LANES / rows;
        const int row = lane % rows;
        const float* summary = (const float*)(shared + S::summary_at);
        float2 old = first ? make_float2(NO_LOGIT, 0.0f) : before[row];
        float peak = old.x;
        for (int w = lane / rows; w < C::warps; w += warps_at_once)
            peak = fmaxf(peak, summary[w * S::summary_floats + row]);
#pragma unroll
        for (int mask = rows; mask < LANES; mask *= 2) peak = fmaxf(peak, from_lane_xor(peak, mask));
        float sum = 0.0f;
        for (int w = lane / rows; w < C::warps; w += warps_at_once) {
            const float* from = summary + w * S::summary_floats;
            const float weight = power2(from[row] - peak);
            sum += weight * from[rows + row];
            factor[w * rows + row] = weight * from[2 * rows];
        }
#pragma unroll
        for (int mask = rows; mask < LANES; mask *= 2) sum += from_lane_xor(sum, mask);
        const float fading = power2(old.x - peak);
        sum += old.y * fading;
        if (lane < rows) {
            factor[C::warps * rows + row] = fading;
            if (turn == 0) {
                state[(parity * S::heads + head) * rows + row] = make_float2(peak, sum);
                ((float2*)p.state)[((i64)slot * S::heads + head) * rows + row] = make_float2(peak, sum);
            }
        }
        warp_barrier();
        for (int piece = turn * LANES + lane; piece < S::pieces; piece += S::summing_warps * LANES) {
            const float* of_row = factor + piece % (rows / 4) * 4;
            float4 low = make_float4(0, 0, 0, 0), high = low;
            if (!first) {
                const float4 fade = *(const float4*)(of_row + C::warps * rows);
                const float4 a = partial[piece * 2], b = partial[piece * 2 + 1];
                low = make_float4(a.x * fade.x, a.y * fade.y, a.z * fade.z, a.w * fade.w);
                high = make_float4(b.x * fade.x, b.y * fade.y, b.z * fade.z, b.w * fade.w);
            }
#pragma unroll 4
            for (int w = 0; w < C::warps; ++w) {
                const float4 f = *(const float4*)(of_row + w * rows);
                const uint4 v = *(const uint4*)(shared + S::slot_at + w * S::slot_bytes + piece * 16);
                low.x += f.x * low_half(v.x);
                low.y += f.y * high_half(v.x);
                high.x += f.x * low_half(v.y);
                high.y += f.y * high_half(v.y);
                low.z += f.z * low_half(v.z);
                low.w += f.w * high_half(v.z);
                high.z += f.z * low_half(v.w);
                high.w += f.w * high_half(v.w);
            }
            partial[piece * 2] = low;
            partial[piece * 2 + 1] = high;
        }
    }
};

}  // namespace dquant
