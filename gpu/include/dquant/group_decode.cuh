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
    i32 channel_rows;
    i32 reserved;
};
static_assert(sizeof(GroupDecodeParams) == 200, "shared with NumPy");

// x: first entry of the table; y: precision, letters, fields, one byte each; z: lowest bits of the fields, a byte each;
// w: first row of the group in `channels`.
struct Group {
    u32 begin, mask, precision, shifts;  // the first two in bytes of entries
    int letters, fields, first;

    DQ_DEVICE explicit Group(const Vector16& record)
        : begin(2 * record.x), mask((2u << (record.y & 255)) - 2), precision(record.y & 255), shifts(record.z),
          letters((int)(record.y >> 8 & 255)), fields((int)(record.y >> 16 & 255)), first((int)record.w) {}
};

// What all warps of a block look up, in shared memory if there is room.
struct GroupLookups {
    const u8* windows;
    const Vector16* groups;
    const Vector16* channels;
};

template <class C> struct GroupShape {
    // A lane takes eight channels of a token at a time.
    static constexpr int token_lanes = C::head_dim <= 64 ? 8 : C::head_dim <= 128 ? 16 : 32;
    static constexpr int run = 8 * token_lanes, runs = (C::head_dim + run - 1) / run;
    // An odd number of words, so that lanes that write to different tokens never meet in a bank.
    static constexpr int levels_pitch = run * runs + 4;
    static constexpr bool staged = Shape<C>::stream_bytes <= 24 * 1024;
    static constexpr int words_bytes = staged ? Shape<C>::stream_bytes : 0;
    static constexpr int warp_bytes = words_bytes + LANES * levels_pitch;
    static constexpr int state_bits = bit_length(C::states - 1);
};

// As PrefixReader, but bit `at` is the one before the next: a window, masked, is then an entry's place in bytes.
template <class C> struct GroupReader {
    static constexpr i32 last = (C::words - 1) * LANES;

    const u32* rows;
    i32 row;  // of the word behind `high`; beyond the container the last one again and again
    u32 low, high, at;

    DQ_DEVICE explicit GroupReader(const u32* first) : rows(first), row(2 * LANES < last ? 2 * LANES : last), at(0) {
        low = rows[0];
        high = rows[LANES];
    }
    DQ_DEVICE u32 peek() const { return funnel(low, high, at); }
    // Fewer than 32 bits.
    DQ_DEVICE void pass(u32 lengths) {
        const u32 then = at + lengths;
        if ((then ^ at) & 32) {
            low = high;
            high = rows[row];
            row = row + LANES < last ? row + LANES : last;
        }
        at = then;
    }
    DQ_DEVICE u8 status() const { return at >= 32u * C::words ? STATUS_OVERRUN : 0; }
};

// The entries of a group's letters; WHOLE: of all eight.
template <class C, bool WHOLE>
DQ_DEVICE void read_letters(
    GroupReader<C>& reader, const u8* windows, const Group& group, u32& state, u32 (&entries)[8]) {
    constexpr int down = 16 - GroupShape<C>::state_bits;
    const auto entry = [&](u32 bits) {
        u32 at = group.begin + (bits & group.mask);
        if (C::states > 1) at += state << (group.precision + 1);
        const u32 found = *(const u16*)(windows + at);
        if (C::states > 1) state = found >> down;
        return found;
    };
#pragma unroll
    for (int i = 0; i < GROUP_LETTERS_AT_ONCE; i += 2) {
        if (!WHOLE && i >= group.letters) break;
        const u32 bits = reader.peek();
        entries[i] = entry(bits);
        u32 length = entries[i] & LENGTH_MASK;
        if (WHOLE || i + 1 < group.letters) {
            entries[i + 1] = entry(bits >> length);
            length += entries[i + 1] & LENGTH_MASK;
        }
        reader.pass(length);
    }
}

// A group's levels to the places of their channels; FIELDS of them, at most if not WHOLE.
template <class C, int FIELDS, bool WHOLE>
DQ_DEVICE void read_group_levels(
    const GroupLookups& lookups, const Group& group, GroupReader<C>& reader, u32& state, u8* levels) {
    u32 entries[GROUP_LETTERS_AT_ONCE];
    read_letters<C, WHOLE>(reader, lookups.windows, group, state, entries);
#pragma unroll
    for (int f = 0; f < FIELDS; ++f) {
        if (!WHOLE && f >= group.fields) break;
        const u32 shift = group.shifts >> (8 * f) & 15, width = group.shifts >> (8 * f + 4) & 15;
        const u32 mask = (1u << width) - 1;
        const Vector16 places[2] = {
            lookups.channels[2 * (group.first + f)], lookups.channels[2 * (group.first + f) + 1]};
#pragma unroll
        for (int i = 0; i < GROUP_LETTERS_AT_ONCE; ++i) {
            if (!WHOLE && i >= group.letters) break;
            const Vector16& four = places[i / 4];
            const u32 place = i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
            levels[place] = (u8)(entries[i] >> shift & mask);
        }
    }
}

// A head of a token's levels to the places of their channels in its row.
template <class C>
DQ_DEVICE void read_grouped_head(
    const GroupLookups& lookups, int groups, GroupReader<C>& reader, u32& state, int coded_head, u8* levels) {
    const Vector16* records = lookups.groups + coded_head * groups;
    Vector16 next = records[0];
#pragma unroll 1
    for (int g = 0; g < groups; ++g) {
        const Group group(next);
        if (g + 1 < groups) next = records[g + 1];
        if (group.letters < GROUP_LETTERS_AT_ONCE)
            read_group_levels<C, MOST_GROUP_FIELDS, false>(lookups, group, reader, state, levels);
        else if (group.fields == 3)
            read_group_levels<C, 3, true>(lookups, group, reader, state, levels);
        else if (group.fields == 2)
            read_group_levels<C, 2, true>(lookups, group, reader, state, levels);
        else if (group.fields == 1)
            read_group_levels<C, 1, true>(lookups, group, reader, state, levels);
        else
            read_group_levels<C, 4, true>(lookups, group, reader, state, levels);
    }
}

// Eight bytes from anywhere, by whole words; up to three bytes behind them are read, too.
DQ_DEVICE void load_bytes(const u8* from, u32& low, u32& high) {
    const u32 skipped = (u32)((u64)from & 3);
    const u32* words = (const u32*)(from - skipped);
    const u32 middle = words[1];
    low = funnel(words[0], middle, 8 * skipped);
    high = skipped ? funnel(middle, words[2], 8 * skipped) : middle;
}

// What levels of eight channels become: multiplied and added to, and the channels' means.
template <class C> struct ChannelFactors {
    float multiplier[8], offset[8], mean[8];

    DQ_DEVICE ChannelFactors(const GroupDecodeParams& params, const u8* page, int head, int first) {
        constexpr int D = C::head_dim;
        const KindLayout& at = params.rows.at;
        const float scale = C::mean ? half_to_float(*(const u16*)(page + at.scale_at + 2 * head)) : 0.0f;
        // Lanes beyond the last channel take the first ones, and write none.
        const int d = head * D + (first < D ? first : 0);
        u32 low = 0, high = 0;
        if constexpr (D % 8 == 0) {
            if (C::mean) load_bytes(page + at.mean_at + d, low, high);
            const Vector16* multipliers = (const Vector16*)(params.multipliers + d);
            const Vector16* offsets = (const Vector16*)(params.offsets + d);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const Vector16 m = multipliers[i], o = offsets[i];
                const u32 of[4] = {m.x, m.y, m.z, m.w}, added[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    multiplier[4 * i + j] = bits_float(of[j]);
                    offset[4 * i + j] = bits_float(added[j]);
                    mean[4 * i + j] = C::mean ? scale * (float)(i8)((i ? high : low) >> (8 * j)) : 0.0f;
                }
            }
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int one = first + i < D ? d + i : d;
                multiplier[i] = params.multipliers[one];
                offset[i] = params.offsets[one];
                mean[i] = C::mean ? scale * (float)(i8)page[at.mean_at + one] : 0.0f;
            }
        }
    }
};

// Levels of one run of channels of 32 tokens to rows; SCALED: with the page's exponent, which is almost always 0.
template <class C, class Element, bool SCALED>
DQ_DEVICE void store_run(
    const ChannelFactors<C>& of, int first, int exponent, float scale, const u8* levels, bool vectors,
    const HeadRows<Element>& rows, int lane) {
    typedef typename Element::Stored Stored;
    typedef GroupShape<C> G;
    constexpr int D = C::head_dim, tokens = LANES / G::token_lanes, unrolled = SCALED ? 1 : 4;
    const bool whole = rows.first == 0 && rows.last == LANES;
    const u8* from = levels + lane / G::token_lanes * G::levels_pitch + first;
    Stored* out = rows.out + lane / G::token_lanes * rows.token_stride + first;
#pragma unroll unrolled
    for (int begin = 0; begin < LANES; begin += tokens) {
        const int token = begin + lane / G::token_lanes;
        const float token_scale = from_lane(scale, token);
        const u32* words = (const u32*)(from + begin * G::levels_pitch);
        const u32 low = words[0], high = words[1];
        float y[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            // A byte below the bits of 2**23: less work than a conversion.
            const u32 bits = permute_bytes(i < 4 ? low : high, 0x4B000000u, 0x7440 + i % 4);
            y[i] = add_exact_product(bits_float(bits) - 8388608.0f, of.multiplier[i], of.offset[i]) * token_scale;
            if (C::mean) y[i] += of.mean[i];
            if (SCALED) y[i] = scale_float(y[i], exponent);
        }
        if ((whole || (token >= rows.first && token < rows.last)) && (D % G::run == 0 || first < D)) {
            if (vectors) {
                Vector16 packed[sizeof(Stored) / 2];
                pack_values<Element>(y, packed);
#pragma unroll
                for (int i = 0; i < (int)sizeof(Stored) / 2; ++i) ((Vector16*)out)[i] = packed[i];
            } else {
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (first + i < D) out[i] = Element::store(y[i]);
            }
        }
        out += tokens * rows.token_stride;
    }
}

// Levels of a head of 32 tokens to rows, as many lanes a token as it takes.
template <class C, class Element>
DQ_DEVICE void store_levels(
    const GroupDecodeParams& params, const u8* page, int head, int exponent, float scale, const u8* levels,
    const HeadRows<Element>& rows, int lane) {
    typedef GroupShape<C> G;
    const bool vectors = C::head_dim % 8 == 0 && params.rows.vectors;
#pragma unroll 1
    for (int run = 0; run < G::runs; ++run) {
        const int first = run * G::run + lane % G::token_lanes * 8;
        const ChannelFactors<C> of(params, page, head, first);
        if (exponent)
            store_run<C, Element, true>(of, first, exponent, scale, levels, vectors, rows, lane);
        else
            store_run<C, Element, false>(of, first, exponent, scale, levels, vectors, rows, lane);
    }
}

// One sub-stream of tile `index` (of the sequence) by one warp; `shared` is the warp's own.
template <class C, class Element>
DQ_DEVICE void decode_grouped_unit(
    const GroupDecodeParams& params, const GroupLookups& lookups, i64 index, int substream, u8* shared, int lane) {
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
    GroupReader<C> reader((const u32*)words + lane);
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
        read_grouped_head<C>(lookups, params.groups_each, reader, state, coded, levels + lane * G::levels_pitch);
        warp_barrier();
        store_levels<C, Element>(params, page, head, exponent, scale, levels, rows, lane);
    }
    if (lane >= rows.first && lane < rows.last) {
        u8 status = reader.status();
        if (!finite) status = STATUS_AFFINE;
        if (exponent < LEAST_EXPONENT || exponent > MOST_EXPONENT) status = STATUS_EXPONENT;
        of.status[(index * LANES + lane - of.start) * C::substreams + substream] = status;
    }
}

// A block's share of all tiles that hold a token from `start` to `stop`.
template <class C, class Element>
DQ_DEVICE void decode_grouped_block(
    const GroupDecodeParams& params, u8* shared, int block, int blocks, int thread, int threads) {
    GroupLookups lookups = {(const u8*)params.windows, params.groups, (const Vector16*)params.channels};
    if constexpr (C::shared_lookups) {
        const int group_bytes = 16 * C::heads * params.groups_each, channel_bytes = 32 * params.channel_rows;
        copy_vectors(shared, lookups.windows, params.window_bytes, thread, threads);
        lookups.windows = shared;
        shared += params.window_bytes;
        copy_vectors(shared, lookups.groups, group_bytes, thread, threads);
        lookups.groups = (const Vector16*)shared;
        shared += group_bytes;
        copy_vectors(shared, lookups.channels, channel_bytes, thread, threads);
        lookups.channels = (const Vector16*)shared;
        shared += channel_bytes;
        block_barrier();
    }
    const int warp = thread / LANES, warps = threads / LANES;
    u8* own = shared + warp * GroupShape<C>::warp_bytes;
    const i64 first = params.rows.start / LANES;
    const i64 units = ((params.rows.stop + LANES - 1) / LANES - first) * C::substreams;
    for (i64 unit = (i64)block * warps + warp; unit < units; unit += (i64)blocks * warps) {
        const i64 tile = unit / C::substreams;
        decode_grouped_unit<C, Element>(
            params, lookups, first + tile, (int)(unit - tile * C::substreams), own, thread % LANES);
    }
}

}  // namespace dquant
