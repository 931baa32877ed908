// Decoding grouped streams (specification, clauses 6.6 and 6.7): pages to rows.
//
// A warp takes one sub-stream of one tile, a lane one token.  All lanes read the same group at the same time, so
// tables, fields and channels are the same for a whole warp.  Levels of a head go to the places of their channels in
// shared memory, then eight lanes take a token each time: nothing is rotated.  Shapes and tables are data; one kernel
// serves all layers of a geometry.
#pragma once

#include "dquant/decode.cuh"

namespace dquant {

constexpr int GROUP_LETTERS_AT_ONCE = 8;
constexpr int MOST_GROUP_FIELDS = 4;
constexpr u32 LENGTH_MASK = 15;

// Shared with NumPy.
struct GroupDecodeParams {
    DecodeParams rows;         // of its tables and factors nothing is used
    const u16* windows;        // [2**p] of every state of every table: code length, from bit 4 on the fields, the state
    const Vector16* groups;    // [H * G] in coded order, see Group
    const u32* channels;       // [rows of fields][8]: the channels of a field, counted within their head
    const i32* heads;          // [H]: which head stands at a place of the coded order
    const float* multipliers;  // [H, D]: gain of the channel's class; 0 of channels left out
    const float* offsets;      // [H, D]: minus the middle level times the gain
    i32 window_bytes;          // a multiple of 16
    i32 groups_each;           // groups of a head
    i32 reserved[2];
};
static_assert(sizeof(GroupDecodeParams) == 200, "shared with NumPy");

// x: first entry of the table; y: precision, letters, fields, one byte each; z: lowest bits of the fields, a byte each;
// w: first row of the group in `channels`.
struct Group {
    const u16* window;
    u32 mask, precision, shifts;
    int letters, fields, first;

    DQ_DEVICE Group(const Vector16& record, const u16* windows)
        : window(windows + record.x), mask((1u << (record.y & 255)) - 1), precision(record.y & 255), shifts(record.z),
          letters((int)(record.y >> 8 & 255)), fields((int)(record.y >> 16 & 255)), first((int)record.w) {}
};

template <class C> struct GroupShape {
    static constexpr int vectors = (C::head_dim + 63) / 64;  // of eight channels, that a lane takes of a token
    // An odd number of words, so that lanes that write to different tokens never meet in a bank.
    static constexpr int levels_pitch = 64 * vectors + 4;
    static constexpr bool staged = Shape<C>::stream_bytes <= 24 * 1024;
    static constexpr int words_bytes = staged ? Shape<C>::stream_bytes : 0;
    static constexpr int warp_bytes = words_bytes + LANES * levels_pitch;
    static constexpr int state_bits = bit_length(C::states - 1);
};

// The entries of a group's letters; WHOLE: of all eight.
template <class C, bool WHOLE>
DQ_DEVICE void read_letters(PrefixReader<C>& reader, const Group& group, u32& state, u32 (&entries)[8]) {
    constexpr int down = 16 - GroupShape<C>::state_bits;
#pragma unroll
    for (int i = 0; i < GROUP_LETTERS_AT_ONCE; i += 2) {
        if (!WHOLE && i >= group.letters) break;
        const u32 bits = reader.peek();
        const u16* window = group.window;
        if (C::states > 1) window += state << group.precision;
        entries[i] = window[bits & group.mask];
        u32 length = entries[i] & LENGTH_MASK;
        if (C::states > 1) state = entries[i] >> down;
        if (WHOLE || i + 1 < group.letters) {
            if (C::states > 1) window = group.window + (state << group.precision);
            entries[i + 1] = window[bits >> length & group.mask];
            length += entries[i + 1] & LENGTH_MASK;
            if (C::states > 1) state = entries[i + 1] >> down;
        }
        reader.pass(length);
    }
}

// A group's levels to the places of their channels; FIELDS of them, at most if not WHOLE.
template <class C, int FIELDS, bool WHOLE>
DQ_DEVICE void read_group_levels(
    const Group& group, const Vector16* channels, PrefixReader<C>& reader, u32& state, u8* levels) {
    // On their way while letters are looked up.
    Vector16 places[FIELDS][2];
#pragma unroll
    for (int f = 0; f < FIELDS; ++f) {
        if (!WHOLE && f >= group.fields) break;
        places[f][0] = channels[2 * (group.first + f)];
        places[f][1] = channels[2 * (group.first + f) + 1];
    }
    u32 entries[GROUP_LETTERS_AT_ONCE];
    read_letters<C, WHOLE>(reader, group, state, entries);
#pragma unroll
    for (int f = 0; f < FIELDS; ++f) {
        if (!WHOLE && f >= group.fields) break;
        const u32 shift = group.shifts >> (8 * f) & 15, width = group.shifts >> (8 * f + 4) & 15;
        const u32 mask = (1u << width) - 1;
#pragma unroll
        for (int i = 0; i < GROUP_LETTERS_AT_ONCE; ++i) {
            if (!WHOLE && i >= group.letters) break;
            const Vector16& four = places[f][i / 4];
            const u32 place = i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
            levels[place] = (u8)(entries[i] >> shift & mask);
        }
    }
}

// A head of a token's levels to the places of their channels in its row.
template <class C>
DQ_DEVICE void read_grouped_head(
    const GroupDecodeParams& params, const u16* windows, PrefixReader<C>& reader, u32& state, int coded_head,
    u8* levels) {
    const Vector16* records = params.groups + (i64)coded_head * params.groups_each;
    const Vector16* channels = (const Vector16*)params.channels;
    Vector16 next = records[0];
#pragma unroll 1
    for (int g = 0; g < params.groups_each; ++g) {
        const Group group(next, windows);
        if (g + 1 < params.groups_each) next = records[g + 1];
        if (group.letters < GROUP_LETTERS_AT_ONCE)
            read_group_levels<C, MOST_GROUP_FIELDS, false>(group, channels, reader, state, levels);
        else if (group.fields == 3)
            read_group_levels<C, 3, true>(group, channels, reader, state, levels);
        else if (group.fields == 2)
            read_group_levels<C, 2, true>(group, channels, reader, state, levels);
        else if (group.fields == 1)
            read_group_levels<C, 1, true>(group, channels, reader, state, levels);
        else
            read_group_levels<C, 4, true>(group, channels, reader, state, levels);
    }
}

// Levels of a head of 32 tokens to rows.  Lane g of eight holds channels 64 v + 8 g on of a token.
template <class C, class Element>
DQ_DEVICE void store_levels(
    const GroupDecodeParams& params, const u8* page, int head, int exponent, float scale, const u8* levels,
    const HeadRows<Element>& rows, int lane) {
    typedef typename Element::Stored Stored;
    constexpr int D = C::head_dim, pitch = GroupShape<C>::levels_pitch;
    const DecodeParams& of = params.rows;
    float mean_scale = 0.0f;
    if (C::mean) mean_scale = half_to_float(*(const u16*)(page + of.at.scale_at + 2 * head));
#pragma unroll 1
    for (int v = 0; v < GroupShape<C>::vectors; ++v) {
        const int first = 64 * v + 8 * (lane % 8);
        float multiplier[8], offset[8], mean[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int d = head * D + (first + i < D ? first + i : 0);
            multiplier[i] = params.multipliers[d];
            offset[i] = params.offsets[d];
            mean[i] = C::mean ? mean_scale * (float)(i8)page[of.at.mean_at + d] : 0.0f;
        }
#pragma unroll 2
        for (int begin = 0; begin < LANES; begin += 4) {
            const int token = begin + lane / 8;
            const float token_scale = from_lane(scale, token);
            const u32* words = (const u32*)(levels + token * pitch + first);
            const u32 low = words[0], high = words[1];
            float y[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                // A byte below the bits of 2**23: less work than a conversion.
                const u32 bits = permute_bytes(i < 4 ? low : high, 0x4B000000u, 0x7440 + i % 4);
                y[i] = add_exact_product(bits_float(bits) - 8388608.0f, multiplier[i], offset[i]) * token_scale;
                if (C::mean) y[i] += mean[i];
            }
            if (exponent) {
#pragma unroll
                for (int i = 0; i < 8; ++i) y[i] = scale_float(y[i], exponent);
            }
            if (token < rows.first || token >= rows.last) continue;
            Stored* out = rows.out + token * rows.token_stride + first;
            if (D % 8 == 0 && of.vectors) {
                if (D % 64 == 0 || first < D) {
                    Vector16 packed[sizeof(Stored) / 2];
                    pack_values<Element>(y, packed);
#pragma unroll
                    for (int i = 0; i < (int)sizeof(Stored) / 2; ++i) ((Vector16*)out)[i] = packed[i];
                }
            } else {
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (first + i < D) out[i] = Element::store(y[i]);
            }
        }
    }
}

// One sub-stream of tile `index` (of the sequence) by one warp; `shared` is the warp's own.
template <class C, class Element>
DQ_DEVICE void decode_grouped_unit(
    const GroupDecodeParams& params, const u16* windows, i64 index, int substream, u8* shared, int lane) {
    typedef Shape<C> S;
    typedef GroupShape<C> G;
    const DecodeParams& of = params.rows;
    const i64 window = index / of.at.tiles;
    const u8* page = of.pool.page(window);
    const u8* tile = page_tile(page, of.at, (int)(index - window * of.at.tiles));
    const u8* words = tile_words<C>(tile, of.at, substream);
    warp_barrier();
    if (G::staged) {
        copy_vectors(shared, words, S::stream_bytes, lane, LANES);
        warp_barrier();
        words = shared;
    }
    u8* levels = shared + G::words_bytes;

    const int exponent = page_exponent(page, of.at);
    const float scale = half_to_float(((const u16*)(tile + of.at.affine_at))[lane]);
    PrefixReader<C> reader((const u32*)words + lane);
    u32 state = 0;
    HeadRows<Element> rows;
    rows.token_stride = of.token_stride;
    rows.first = index * LANES < of.start ? (int)(of.start - index * LANES) : 0;
    rows.last = of.stop - index * LANES < LANES ? (int)(of.stop - index * LANES) : LANES;
    bool finite = is_finite(scale);
    for (int h = 0; h < S::heads; ++h) {
        const int coded = substream * S::heads + h, head = params.heads[coded];
        if (C::mean) finite = finite && half_is_finite(*(const u16*)(page + of.at.scale_at + 2 * head));
        rows.out = (typename Element::Stored*)of.out + (index * LANES - of.start) * of.token_stride +
                   head * of.head_stride;
        warp_barrier();
        read_grouped_head<C>(params, windows, reader, state, coded, levels + lane * G::levels_pitch);
        warp_barrier();
        store_levels<C, Element>(params, page, head, exponent, scale, levels, rows, lane);
    }
    if (lane >= rows.first && lane < rows.last) {
        u8 status = reader.status(STATUS_OVERRUN, STATUS_STATE);
        if (!finite) status = STATUS_AFFINE;
        if (exponent < LEAST_EXPONENT || exponent > MOST_EXPONENT) status = STATUS_EXPONENT;
        of.status[(index * LANES + lane - of.start) * C::substreams + substream] = status;
    }
}

// A block's share of all tiles that hold a token from `start` to `stop`.
template <class C, class Element>
DQ_DEVICE void decode_grouped_block(
    const GroupDecodeParams& params, u8* shared, int block, int blocks, int thread, int threads) {
    const u16* windows = params.windows;
    if constexpr (C::shared_windows) {
        copy_vectors(shared, windows, params.window_bytes, thread, threads);
        windows = (const u16*)shared;
        shared += params.window_bytes;
        block_barrier();
    }
    const int warp = thread / LANES, warps = threads / LANES;
    u8* own = shared + warp * GroupShape<C>::warp_bytes;
    const i64 first = params.rows.start / LANES;
    const i64 units = ((params.rows.stop + LANES - 1) / LANES - first) * C::substreams;
    for (i64 unit = (i64)block * warps + warp; unit < units; unit += (i64)blocks * warps) {
        const i64 tile = unit / C::substreams;
        decode_grouped_unit<C, Element>(
            params, windows, first + tile, (int)(unit - tile * C::substreams), own, thread % LANES);
    }
}

}  // namespace dquant
