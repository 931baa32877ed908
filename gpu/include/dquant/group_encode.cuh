// Encoding of grouped streams: rows to pages, a warp a token from loading to words.
//
//     encode_head            a block a page: the page's exponent (jobs.cuh)
//     encode_channel_means   a warp a page and head, for kinds with means
//     encode_grouped         a warp a token; blocks stay, because they share tables
//
// The same arithmetic in the same order as dquantcodec/encode.py, so the same bytes.
#pragma once

#include "dquant/group_drift.cuh"
#include "dquant/group_grid.cuh"

namespace dquant {

// Shared with NumPy.
struct GroupEncodeParams {
    EncodeParams rows;
    GroupTables tables;
};
static_assert(sizeof(GroupEncodeParams) == 376, "shared with NumPy");

// The windowed means of one head by one warp; channels in fours, of which a lane has every 32nd.
template <class C, class Element>
DQ_DEVICE void encode_channel_means(const EncodeParams& params, i64 unit, int lane) {
    constexpr int D = C::head_dim, per = (D + 4 * LANES - 1) / (4 * LANES), together = per == 1 ? 16 : 1;
    const i64 window = unit / C::heads;
    const int head = (int)(unit - window * C::heads);
    if (window >= params.windows) return;
    const EncodeJob job(params, window);
    if (job.tokens == 0) return;
    const int exponent = page_exponent(job.page, params.at);
    float sums[per][4] = {};
    for (int first = 0; first < job.tokens; first += together) {
        FourNumbers<Element> raw[together][per];
        // Several loads at once keep memory busy.
#pragma unroll
        for (int k = 0; k < together; ++k) {
            const int token = first + k < job.tokens ? first + k : first;
            const typename Element::Stored* in = head_row<Element>(params, job.first + token, head);
#pragma unroll
            for (int i = 0; i < per; ++i) raw[k][i].template load<D>(in, 4 * (lane + LANES * i), params.vectors);
        }
        // Rows are added in their order; FP32 sums depend on it.
#pragma unroll
        for (int k = 0; k < together; ++k) {
            if (first + k < job.tokens) {
#pragma unroll
                for (int i = 0; i < per; ++i) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const float x = raw[k][i].number(j), value = is_finite(x) ? x : 0.0f;
                        sums[i][j] += exponent ? scale_float(value, -exponent) : value;
                    }
                }
            }
        }
    }
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < per; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            sums[i][j] /= (float)job.tokens;
            const float magnitude = bits_float(float_bits(sums[i][j]) & 0x7FFFFFFF);
            largest = magnitude > largest ? magnitude : largest;
        }
    }
    for (int mask = LANES / 2; mask > 0; mask /= 2) {
        const float other = from_lane_xor(largest, mask);
        largest = other > largest ? other : largest;
    }
    const u16 scale = round_up_half(largest / 127.0f);
    const float step = half_to_float(scale);
    if (lane == 0) *(u16*)(job.page + params.at.scale_at + 2 * head) = scale;
    u8* means = job.page + params.at.mean_at + head * D;
#pragma unroll
    for (int i = 0; i < per; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int d = 4 * (lane + LANES * i) + j;
            const float steps = step > 0.0f ? sums[i][j] / step : 0.0f;
            if (d < D) means[d] = (u8)(i8)round_to_integer(steps);
        }
    }
}

// Puts the letters of a sub-stream, each group at the rung that `starts` says, into its container, and adds up moments.
template <bool SCRATCH> struct PutLetters {
    const GroupRow<SCRATCH>& row;
    const u32 *fine, *coarse, *starts;
    u32* words;
    GroupMoments& sums;

    template <int FIELDS> DQ_DEVICE void round(int round, const u32* places) {
        const GroupTables& tables = row.tables;
        const Vector16 letter = row.letters[round * ROUND_GROUPS], field = row.fields[round * ROUND_GROUPS];
        const u32 group = row.shared.groups[round * ROUND_GROUPS + row.lane / GROUP_LETTERS];
        const u32 start = group == 0xFFFFFFFF ? 0 : starts[group >> 16];
        const u32* entries = start & FINER ? fine : coarse;
        const u32 about[4] = {field.x, field.y, field.z, field.w};
        u32 at = zero_letter(tables, letter, row.lane);
#pragma unroll
        for (int f = 0; f < FIELDS; ++f) {
            const u32 position = places[f * LANES];
            const i32 level = nearest_level(entries, position);
            at += f == 0 ? (u32)level : stride_of(letter, f) * (u32)level;
            const i32 u = (i32)(position - (about[f] & 0xFFFF0000)), y = level * (i32)(about[f] & 0xFFFF);
            sums.uy += (i64)u * y;
            sums.yy += (i64)y * y;
        }
        const u32 code = row.shared.codes[at];
        const u32 length = code >> 16, bits = code & 0xFFFF;
        u32 end = length;
#pragma unroll
        for (int distance = 1; distance < GROUP_LETTERS; distance *= 2) {
            const u32 before = from_lane_below(end, distance);
            if (row.lane % GROUP_LETTERS >= distance) end += before;
        }
        const u32 first = (start & ~FINER) + end - length, word = first >> 5, shift = first & 31;
        if (length > 0) {
            atomic_or(&words[word], bits << shift);
            if (shift + length > 32) atomic_or(&words[word + 1], bits >> (32 - shift));
        }
    }
};

// The letters of a sub-stream to its container's words, `rows` as in `PrefixReader`.
template <bool SCRATCH>
DQ_DEVICE void encode_row(const GroupRow<SCRATCH>& row, u32* own, u32* rows, GroupMoments& sums) {
    const GroupTables& tables = row.tables;
    const int lane = row.lane;
    u32 *bits = own, *starts = bits + tables.groups_each, *words = starts + tables.groups_each;
    for (int i = lane; i < tables.words; i += LANES) words[i] = 0;
    const FoundRungs found = search_rungs(row, 32 * tables.words - 1);
    const int below = found.below < 0 ? found.fits : found.below;
    const u32* places = row.positions + lane;
    // Written twice, so that the compiler knows where each one looks.
    if (row.in_window(found.fits) && row.in_window(below)) {
        const u32 *fine = row.in_shared(below), *coarse = row.in_shared(found.fits);
        CompareRungs<SCRATCH> compare = {row, fine, coarse, bits};
        visit_rounds(tables, places, compare);
        fill_groups(tables, bits, starts, found.room, lane);
        PutLetters<SCRATCH> put = {row, fine, coarse, starts, words, sums};
        visit_rounds(tables, places, put);
    } else {
        const u32 *fine = row.in_global(below), *coarse = row.in_global(found.fits);
        CompareRungs<SCRATCH> compare = {row, fine, coarse, bits};
        visit_rounds(tables, places, compare);
        fill_groups(tables, bits, starts, found.room, lane);
        PutLetters<SCRATCH> put = {row, fine, coarse, starts, words, sums};
        visit_rounds(tables, places, put);
    }
    warp_barrier();
    for (int i = lane; i < tables.words; i += LANES) rows[i * LANES] = words[i];
    warp_barrier();
}

// How a warp codes a token of streams without a trellis.
template <class C> struct GroupStream {
    typedef GroupEncodeParams Params;
    typedef SharedGroups<C::scratch> Shared;
    typedef GroupRoom Room;

    static DQ_DEVICE i64 warp_bytes(const GroupTables& tables) { return group_warp_bytes(tables, C::substreams); }

    // Once for a warp: places without a channel keep what they hold.
    static DQ_DEVICE void begin(const GroupTables& tables, u8* own, int lane) {
        for (int i = lane; i < C::substreams * tables.slots * LANES; i += LANES) ((u32*)own)[i] = tables.initial[i];
        warp_barrier();
    }

    // Returns the scale.
    template <class Element>
    static DQ_DEVICE u16 encode(
        const Params& params, const Shared& shared, const EncodeJob& job, int token, u8* own, u32* words, bool& finite,
        int lane) {
        const GroupTables& tables = params.tables;
        u32 *positions = (u32*)own, *rest = positions + C::substreams * tables.slots * LANES;
        GroupMoments sums = {0, 0, 0};
        const u16 scale = place_channels<C, Element>(
            params.rows, tables, job.page, job.first + token, positions, sums.uu, finite, lane);
        for (int j = 0; j < C::substreams; ++j) {
            const GroupRow<C::scratch> row(tables, shared, positions, j, lane);
            encode_row(row, rest, words + (i64)j * tables.words * LANES, sums);
        }
        return fit_group_scale<C>(sums, scale);
    }
};

// Token `token` of window `window`.
template <class C, class Element, class Stream>
DQ_DEVICE void encode_grouped_token(
    const typename Stream::Params& all, const typename Stream::Shared& shared, i64 window, int token, u8* own,
    int lane) {
    const EncodeParams& params = all.rows;
    const EncodeJob job(params, window);
    if (params.ready && job.tokens == 0) return;
    u8* tile = page_tile(job.page, params.at, token / LANES);
    const int place = token % LANES;
    u32* words = (u32*)(tile + params.at.words_at) + place;
    u16* affine = (u16*)(tile + params.at.affine_at);
    if (token >= job.tokens) {
        for (int i = lane; i < C::substreams * all.tables.words; i += LANES) words[i * LANES] = 0;
        if (lane == 0) affine[place] = 0;
        return;
    }
    bool finite = true;
    const u16 scale = Stream::template encode<Element>(all, shared, job, token, own, words, finite, lane);
    const u32 bad = ballot(!finite);
    if (lane == 0) {
        affine[place] = scale;
        if (params.status) params.status[job.first + token] = bad ? STATUS_NONFINITE : 0;
    }
}

// A block's share of all tokens.
template <class C, class Element, class Stream>
DQ_DEVICE void encode_grouped(
    const typename Stream::Params& params, u8* memory, u8* scratch, int block, int blocks, int thread, int threads) {
    const i64 size = (i64)params.rows.at.tiles * LANES;
    const int lane = thread % LANES, warp = thread / LANES, warps = threads / LANES;
    if (params.rows.ready) {
        // Appending is seldom due, and then there is nothing to get ready for.
        bool due = false;
        for (int window = lane; window < params.rows.windows; window += LANES) due |= params.rows.ready[window] >= 0;
        if (!ballot(due)) return;
    }
    const typename Stream::Shared shared(params.tables, C::substreams, memory, thread, threads);
    const typename Stream::Room room(params.tables, C::substreams);
    u8* own = (C::scratch ? scratch : memory + room.bytes()) + warp * Stream::warp_bytes(params.tables);
    Stream::begin(params.tables, own, lane);
    for (i64 token = (i64)block * warps + warp; token < params.rows.windows * size; token += (i64)blocks * warps) {
        const i64 window = token / size;
        encode_grouped_token<C, Element, Stream>(params, shared, window, (int)(token - window * size), own, lane);
    }
}

}  // namespace dquant
