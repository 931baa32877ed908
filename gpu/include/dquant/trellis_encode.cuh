// Encoding of streams with a trellis: as group_encode.cuh, with another drift.
#pragma once

#include "dquant/group_encode.cuh"
#include "dquant/trellis_drift.cuh"

namespace dquant {

// Shared with NumPy.
struct TrellisEncodeParams {
    EncodeParams rows;
    TrellisTables tables;
};
static_assert(sizeof(TrellisEncodeParams) == 352, "shared with NumPy");

// Adds a value's squares and products.
template <class C>
DQ_DEVICE void add_path_value(const TrellisRows<C>& rows, int at, u32 value, GroupMoments& sums) {
    const Vector16 kind = rows.shared.classes[rows.shared.kinds[at]];
    const i32 index = path_index(value);
    i32 level = index;
    if (kind.y >> 8) {
        // Half steps; quantiser 1 has the odd ones and zero.
        level = 2 * index;
        if (trellis_turn<C::states>((int)path_state(value))) level -= index > 0 ? 1 : index < 0 ? -1 : 0;
    }
    const i32 u = (i32)rows.positions[at], y = level * (i32)kind.z;
    sums.uy += (i64)u * y;
    sums.yy += (i64)y * y;
}

// The letters of a sub-stream to its container's words, `out` as in `PrefixReader`.
template <class C>
DQ_DEVICE void put_path(
    const TrellisRows<C>& rows, int substream, const PathSearch& search, u32* out, GroupMoments& sums) {
    const TrellisTables& tables = rows.tables;
    const int lane = rows.lane;
    const u16 *coarse = rows.path(0, substream), *fine = search.below < 0 ? coarse : rows.path(1, substream);
    take_fine(rows, substream, fine, coarse, search.room);
    u32* words = rows.words;
    for (int i = lane; i < tables.words; i += LANES) words[i] = 0;
    warp_barrier();
    u32 at = 1;
    for (int round = 0; round < letter_rounds(rows); ++round) {
        const PathLetter letter = path_letter(rows, substream, round);
        const u16* path = rows.ways[round] >> lane & 1 ? fine : coarse;
        const u32 code = rows.shared.codes[path_code(rows, letter, path)];
        for (int f = 0; f < letter.fields; ++f)
            add_path_value(rows, substream * tables.pitch + letter.place + f, path[letter.place + f], sums);
        const u32 length = code >> 16, bits = code & 0xFFFF;
        u32 end = length;
#pragma unroll
        for (int distance = 1; distance < LANES; distance *= 2) {
            const u32 before = from_lane_below(end, distance);
            if (lane >= distance) end += before;
        }
        const u32 first = at + end - length, word = first >> 5, shift = first & 31;
        if (length > 0) {
            atomic_or(&words[word], bits << shift);
            if (shift + length > 32) atomic_or(&words[word + 1], bits >> (32 - shift));
        }
        at += from_lane(end, LANES - 1);
    }
    warp_barrier();
    for (int i = lane; i < tables.words; i += LANES) out[i * LANES] = words[i];
    warp_barrier();
}

// How a warp codes a token of streams with a trellis; see `GroupStream`.
template <class C> struct TrellisStream {
    typedef TrellisEncodeParams Params;
    typedef SharedTrellis<C::scratch> Shared;
    typedef TrellisRoom Room;

    static DQ_DEVICE i64 warp_bytes(const TrellisTables& tables) {
        return TrellisWarpRoom(tables, C::substreams).bytes();
    }
    static DQ_DEVICE void begin(const TrellisTables&, u8*, int) {}

    template <class Element>
    static DQ_DEVICE u16 encode(
        const Params& params, const Shared& shared, const EncodeJob& job, int token, u8* own, u32* words, bool& finite,
        int lane) {
        const TrellisTables& tables = params.tables;
        const TrellisRows<C> rows(tables, shared, own, lane);
        GroupMoments sums = {0, 0, 0};
        const u16 scale = place_channels<C, Element>(
            params.rows, tables, job.page, job.first + token, rows.positions, sums.uu, finite, lane);
        PathSearch searches[C::substreams];
        search_paths(rows, searches);
#pragma unroll
        for (int j = 0; j < C::substreams; ++j)
            put_path(rows, j, searches[j], words + (i64)j * tables.words * LANES, sums);
        return fit_group_scale<C>(sums, scale);
    }
};

}  // namespace dquant
