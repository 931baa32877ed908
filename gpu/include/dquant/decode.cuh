// Decoding: pages to rows.  A warp takes one sub-stream of one tile, a lane one token; a head at a time goes from code
// words through the affine step, the mean and the rotation to its row (specification, clauses 6.1 to 6.5).
#pragma once

#include "dquant/numbers.cuh"
#include "dquant/pages.cuh"
#include "dquant/prefix.cuh"
#include "dquant/rans.cuh"
#include "dquant/rotation.cuh"

namespace dquant {

// Status of a stream; the first two as in dquantcodec/status.py.
constexpr u8 STATUS_OVERRUN = 1;
constexpr u8 STATUS_STATE = 2;
constexpr u8 STATUS_EXPONENT = 4;
constexpr u8 STATUS_AFFINE = 5;

// Shared with NumPy.
struct DecodeParams {
    PagePool pool;
    LetterTables tables;
    const float* factors;  // [H, D]: 1 / sqrt(order) of the block, times the sign
    void* out;             // rows; token and head stride in elements, channels next to each other
    i64 token_stride;
    i64 head_stride;
    u8* status;  // [stop - start, S]
    i64 start;   // tokens of the sequence
    i64 stop;
    KindLayout at;
    i32 vectors;  // every head of `out` begins at a multiple of 16 bytes
    i32 reserved;
};
static_assert(sizeof(DecodeParams) == 136, "shared with NumPy");

template <bool R, class C> struct ReaderOf {
    typedef PrefixReader<C> Reader;
    typedef u32 Word;
};
template <class C> struct ReaderOf<true, C> {
    typedef RansReader<C> Reader;
    typedef u16 Word;
};
template <class C> using Reader = typename ReaderOf<C::rans, C>::Reader;
template <class C> using Word = typename ReaderOf<C::rans, C>::Word;

template <bool R, int D> struct ColumnOf {
    typedef RegisterColumn<D> Column;
};
template <int D> struct ColumnOf<false, D> {
    typedef SharedColumn Column;
};

// What a block keeps in shared memory: the letter tables, then for every warp the words of its sub-stream and what its
// form of the rotation needs.
//
// by lanes (powers of two from 64 on): levels [32 tokens][D] as bytes, so that eight lanes can take a token each time
// by columns (others): a head of means, a head of factors, rows on their way out, and the columns of wide heads
template <class C> struct DecodeShape {
    static constexpr bool by_lanes = C::head_dim >= 64 && (C::head_dim & (C::head_dim - 1)) == 0;
    static constexpr bool in_registers = C::head_dim <= 128;
    // The columns of wide heads leave no room for anything else on small devices.
    static constexpr bool wide = !by_lanes && C::head_dim > 256;
    static constexpr bool staged = !wide && Shape<C>::stream_bytes <= 24 * 1024;
    static constexpr bool tables_shared = !wide && table_bytes<C>() <= 48 * 1024;
    static constexpr int tables_bytes = tables_shared ? table_bytes<C>() : 0;
    static constexpr int words_bytes = staged ? Shape<C>::stream_bytes : 0;
    // Two words more than a head, so that lanes that write to different tokens meet in a bank two at a time at most.
    static constexpr int levels_pitch = C::head_dim + 8;
    static constexpr int row_bytes = (4 * C::head_dim + 15) / 16 * 16;
    static constexpr int turned_bytes = LANES * (128 + 16);
    static constexpr int columns_bytes = in_registers ? 0 : 4 * LANES * C::head_dim;
    static constexpr int head_bytes =
        by_lanes ? LANES * levels_pitch : 2 * row_bytes + turned_bytes + columns_bytes;
    static constexpr int warp_bytes = words_bytes + head_bytes;
    typedef typename ColumnOf<in_registers, C::head_dim>::Column Column;
};

DQ_DEVICE void copy_vectors(void* to, const void* from, int bytes, int first, int step) {
#pragma unroll 4
    for (int i = first; i < bytes / 16; i += step) ((Vector16*)to)[i] = ((const Vector16*)from)[i];
}

// The tables' copy in shared memory, if they fit; a whole block takes part.
template <class C>
DQ_DEVICE LetterTables share_tables(const LetterTables& tables, u8* shared, int thread, int threads) {
    if (!DecodeShape<C>::tables_shared) return tables;
    u32* entries = (u32*)shared;
    u32* advance = entries + (1 << C::precision);
    copy_vectors(entries, tables.entries, 4 << C::precision, thread, threads);
    if (C::rans) copy_vectors(advance, tables.advance, 4 << C::precision, thread, threads);
    block_barrier();
    return {entries, advance};
}

// A head of letters as values on the grid: `offset + scale * level` in channel order.
template <class C, class Column>
DQ_DEVICE void read_head(Reader<C>& reader, const LetterTables& tables, const Affine& affine, Column& y) {
    constexpr int letters = Shape<C>::per_head;
    constexpr int step = !C::rans && 2 * C::precision < 32 ? 2 : 1;
    constexpr int whole = Column::unrolled ? letters : 1;
#pragma unroll whole
    for (int i = 0; i < letters; i += step) {
        u32 entries[2];
        if constexpr (step == 2) {
            if (i + 1 < letters)
                reader.two_letters(tables, entries[0], entries[1]);
            else
                entries[0] = reader.letter(tables);
        } else {
            entries[0] = reader.letter(tables);
        }
#pragma unroll
        for (int l = 0; l < step; ++l) {
#pragma unroll
            for (int k = 0; k < C::letter; ++k) {
                const int channel = (i + l) * C::letter + k;
                if (channel < C::head_dim)
                    y[channel] = add_exact_product(affine.scale, (float)symbol<C>(entries[l], k), affine.offset);
            }
        }
    }
}

// The last steps of a head: factors, and the page's exponent, which is almost always 0.
template <int D, class Column> DQ_DEVICE void scale_head(Column& y, const float* factors, int exponent) {
    constexpr int whole = Column::unrolled ? D : 1;
#pragma unroll whole
    for (int d = 0; d < D; ++d) y[d] *= factors[d];
    if (exponent) {
#pragma unroll whole
        for (int d = 0; d < D; ++d) y[d] = scale_float(y[d], exponent);
    }
}

// Eight values as they are stored, in vectors of 16 bytes.
template <class Element> DQ_DEVICE void pack_values(const float* y, Vector16* packed) {
    typedef typename Element::Stored Stored;
    u32* words = &packed->x;
#pragma unroll
    for (int i = 0; i < 2 * (int)sizeof(Stored); ++i) {
        if constexpr (sizeof(Stored) == 4)
            words[i] = float_bits(Element::store(y[i]));
        else
            words[i] = Element::store_two(y[2 * i], y[2 * i + 1]);
    }
}

// Where the rows of a head go: `out` for the tile's first token, of which tokens `first` to `last` are wanted.
template <class Element> struct HeadRows {
    typename Element::Stored* out;
    i64 token_stride;
    int first, last;
};

// The warp's columns as rows.  Lanes hold tokens and rows should be written along channels, so 128 bytes of every token
// at a time go through `turned` in shared memory: [32] rows, 16 bytes apart more, so that no two lanes meet in a bank.
template <class Element, int D, class Column>
DQ_DEVICE void store_head(Column& y, const HeadRows<Element>& rows, u8* turned, int lane) {
    typedef typename Element::Stored Stored;
    constexpr int per = 16 / sizeof(Stored), most = 8, pitch = 16 * (most + 1);
    constexpr int vectors = D / per;
    constexpr int whole = Column::unrolled ? vectors : 1;
#pragma unroll whole
    for (int begin = 0; begin < vectors; begin += most) {
        const int count = begin + most <= vectors ? most : vectors - begin;
#pragma unroll
        for (int v = 0; v < most; ++v) {
            if (v < count) {
                Vector16 packed;
                u32* words = &packed.x;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int d = (begin + v) * per + i * per / 4;
                    if constexpr (sizeof(Stored) == 4)
                        words[i] = float_bits(Element::store(y[d]));
                    else
                        words[i] = (u32)Element::store(y[d]) |
                                   (u32)Element::store(y[d + 1]) << 16;
                }
                *(Vector16*)(turned + lane * pitch + 16 * v) = packed;
            }
        }
        warp_barrier();
#pragma unroll
        for (int v = 0; v < most; ++v) {
            if (v < count) {
                const int item = v * LANES + lane, token = item / count, vector = item % count;
                if (token >= rows.first && token < rows.last)
                    *(Vector16*)(rows.out + token * rows.token_stride + (begin + vector) * per) =
                        *(const Vector16*)(turned + token * pitch + 16 * vector);
            }
        }
        warp_barrier();
    }
}

// Likewise for rows that do not begin at multiples of 16 bytes, or whose length is none.
template <class Element, int D, class Column>
DQ_DEVICE void store_values(Column& y, const HeadRows<Element>& rows, int lane) {
    constexpr int whole = Column::unrolled ? D : 1;
    if (lane >= rows.first && lane < rows.last) {
#pragma unroll whole
        for (int d = 0; d < D; ++d) rows.out[lane * rows.token_stride + d] = Element::store(y[d]);
    }
}

// Levels of `count` letters from letter `first` of a head on, as bytes of the words they fill; `levels` is the token's
// row in shared memory.  Groups of letters fill whole words, so that every shift is known when compiling.
template <class C, int COUNT>
DQ_DEVICE void read_group(Reader<C>& reader, const LetterTables& tables, u32* levels, int first) {
    constexpr int k = C::letter, symbols = COUNT * k;
    u32 entries[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) {
        if constexpr (2 * C::precision < 32) {
            if (i + 1 < COUNT) {
                reader.two_letters(tables, entries[i], entries[i + 1]);
                continue;
            }
        }
        entries[i] = reader.letter(tables);
        if (i + 1 < COUNT) entries[i + 1] = reader.letter(tables);
    }
#pragma unroll
    for (int word = 0; word < (symbols + 3) / 4; ++word) {
        u32 bytes = 0;
        if constexpr (k == 2 || k == 3) {
            // A word's symbols come from two letters at most.
            const int a = 4 * word / k, b = (4 * word + 3) / k;
            u32 selector = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = 4 * word + i;
                selector |= ((at / k == a ? 0 : 4) + 1 + at % k) << (4 * i);
            }
            bytes = permute_bytes(entries[a], entries[b < COUNT ? b : a], selector);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = 4 * word + i;
                if (at < symbols) bytes |= symbol<C>(entries[at / k], at % k) << (8 * i);
            }
        }
        if (first * k / 4 + word < C::head_dim / 4) levels[first * k / 4 + word] = bytes;
    }
}

template <class C> DQ_DEVICE void read_levels(Reader<C>& reader, const LetterTables& tables, u32* levels) {
    constexpr int group = C::letter == 4 ? 1 : C::letter == 2 ? 2 : 4;
    constexpr int whole = Shape<C>::per_head / group * group, rest = Shape<C>::per_head - whole;
#pragma unroll 2
    for (int i = 0; i < whole; i += group) read_group<C, group>(reader, tables, levels, i);
    if constexpr (rest > 0) read_group<C, rest>(reader, tables, levels, whole);
}

// A head of 32 tokens by eight lanes a token.  Lane g of the eight holds eight channels of every 64: channel
// 64 * v + 8 * g + i is `y[8 * v + i]`, so butterflies up to 4 and from 64 on stay within a lane and rows leave in
// vectors.
template <class C, class Element>
DQ_DEVICE void turn_by_lanes(
    const DecodeParams& params, const u8* page, int head, int exponent, const Affine& affine, const u8* levels,
    const HeadRows<Element>& rows, int lane) {
    typedef typename Element::Stored Stored;
    constexpr int D = C::head_dim, own = D / 8, pitch = DecodeShape<C>::levels_pitch;
    const int g = lane % 8;
    // What a channel needs stays in registers, but for the widest heads.
    constexpr bool kept = own <= 32;
    float mean_scale = 0.0f;
    if (C::mean) mean_scale = half_to_float(*(const u16*)(page + params.at.scale_at + 2 * head));
    const float* all_factors = params.factors + head * D + 8 * g;
    const i8* all_means = (const i8*)(page + params.at.mean_at + head * D) + 8 * g;
    float factors[kept ? own : 1], means[kept ? own : 1];
    if constexpr (kept) {
#pragma unroll
        for (int i = 0; i < own; ++i) {
            factors[i] = all_factors[i / 8 * 64 + i % 8];
            if (C::mean) means[i] = mean_scale * (float)all_means[i / 8 * 64 + i % 8];
        }
    }
    float signs[3];
#pragma unroll
    for (int k = 0; k < 3; ++k) signs[k] = lane >> k & 1 ? -1.0f : 1.0f;
#pragma unroll 1
    for (int first = 0; first < LANES; first += 4) {
        const int token = first + lane / 8;
        const float offset = from_lane(affine.offset, token), scale = from_lane(affine.scale, token);
        float y[own];
#pragma unroll
        for (int v = 0; v < own / 8; ++v) {
            const u32* words = (const u32*)(levels + token * pitch + 64 * v + 8 * g);
            const u32 low = words[0], high = words[1];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const u32 level = (i < 4 ? low : high) >> (8 * (i % 4)) & 255;
                y[8 * v + i] = add_exact_product(scale, (float)level, offset);
            }
        }
        if (C::mean) {
#pragma unroll
            for (int i = 0; i < own; ++i)
                y[i] += kept ? means[kept ? i : 0] : mean_scale * (float)all_means[i / 8 * 64 + i % 8];
        }
#pragma unroll
        for (int h = 1; h < own; h *= 2) {
            if (h == 8) {
#pragma unroll
                for (int k = 0; k < 3; ++k) {
#pragma unroll
                    for (int i = 0; i < own; ++i) y[i] = add_signed(from_lane_xor(y[i], 1 << k), signs[k], y[i]);
                }
            }
#pragma unroll
            for (int pair = 0; pair < own / 2; ++pair) {
                const int i = pair / h * 2 * h + pair % h;
                const float a = y[i], b = y[i + h];
                y[i] = a + b;
                y[i + h] = a - b;
            }
        }
        if constexpr (own == 8) {
#pragma unroll
            for (int k = 0; k < 3; ++k) {
#pragma unroll
                for (int i = 0; i < own; ++i) y[i] = add_signed(from_lane_xor(y[i], 1 << k), signs[k], y[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < own; ++i) y[i] *= kept ? factors[kept ? i : 0] : all_factors[i / 8 * 64 + i % 8];
        if (exponent) {
#pragma unroll
            for (int i = 0; i < own; ++i) y[i] = scale_float(y[i], exponent);
        }
        if (token >= rows.first && token < rows.last) {
            Stored* out = rows.out + token * rows.token_stride + 8 * g;
#pragma unroll
            for (int v = 0; v < own / 8; ++v) {
                if (params.vectors) {
                    Vector16 packed[sizeof(Stored) / 2];
                    pack_values<Element>(y + 8 * v, packed);
#pragma unroll
                    for (int i = 0; i < (int)sizeof(Stored) / 2; ++i) ((Vector16*)(out + 64 * v))[i] = packed[i];
                } else {
#pragma unroll
                    for (int i = 0; i < 8; ++i) out[64 * v + i] = Element::store(y[8 * v + i]);
                }
            }
        }
    }
}

// A head of 32 tokens by a lane a token.
template <class C, class Element>
DQ_DEVICE void turn_by_columns(
    const DecodeParams& params, const u8* page, int head, int exponent, const Affine& affine, Reader<C>& reader,
    const LetterTables& tables, u8* shared, const HeadRows<Element>& rows, int lane) {
    typedef DecodeShape<C> D;
    float* means = (float*)shared;
    float* factors = (float*)(shared + D::row_bytes);
    u8* turned = shared + 2 * D::row_bytes;
    typename D::Column column;
    if constexpr (!D::in_registers) column.values = (float*)(turned + D::turned_bytes) + lane;
    float mean_scale = 0.0f;
    if (C::mean) mean_scale = half_to_float(*(const u16*)(page + params.at.scale_at + 2 * head));
    for (int d = lane; d < C::head_dim; d += LANES) {
        const int value = head * C::head_dim + d;
        factors[d] = params.factors[value];
        if (C::mean) means[d] = mean_scale * (float)(i8)page[params.at.mean_at + value];
    }
    warp_barrier();
    read_head<C>(reader, tables, affine, column);
    if (C::mean) {
        constexpr int whole = D::Column::unrolled ? C::head_dim : 1;
#pragma unroll whole
        for (int d = 0; d < C::head_dim; ++d) column[d] += means[d];
    }
    turn_column<C::head_dim, true>(column);
    scale_head<C::head_dim>(column, factors, exponent);
    if (C::head_dim * sizeof(typename Element::Stored) % 16 == 0 && params.vectors)
        store_head<Element, C::head_dim>(column, rows, turned, lane);
    else
        store_values<Element, C::head_dim>(column, rows, lane);
}

// One sub-stream of tile `index` (of the sequence) by one warp; `shared` is the warp's own.
template <class C, class Element>
DQ_DEVICE void decode_unit(
    const DecodeParams& params, const LetterTables& tables, i64 index, int substream, u8* shared, int lane) {
    typedef Shape<C> S;
    typedef DecodeShape<C> D;
    const KindLayout& at = params.at;
    const i64 window = index / at.tiles;
    const u8* page = params.pool.page(window);
    const u8* tile = page_tile(page, at, (int)(index - window * at.tiles));
    const u8* words = tile_words<C>(tile, at, substream);
    if (D::staged) {
        warp_barrier();
        copy_vectors(shared, words, S::stream_bytes, lane, LANES);
        warp_barrier();
        words = shared;
    }
    u8* own = shared + D::words_bytes;

    const int exponent = page_exponent(page, at);
    const Affine affine = tile_affine<C>(tile, at, lane);
    Reader<C> reader((const Word<C>*)words + lane);
    HeadRows<Element> rows;
    rows.token_stride = params.token_stride;
    rows.first = index * LANES < params.start ? (int)(params.start - index * LANES) : 0;
    rows.last = params.stop - index * LANES < LANES ? (int)(params.stop - index * LANES) : LANES;
    bool finite = is_finite(affine.offset) && is_finite(affine.scale);
    for (int h = 0; h < S::heads; ++h) {
        const int head = substream * S::heads + h;
        if (C::mean) finite = finite && half_is_finite(*(const u16*)(page + at.scale_at + 2 * head));
        rows.out = (typename Element::Stored*)params.out + (index * LANES - params.start) * params.token_stride +
                   head * params.head_stride;
        warp_barrier();
        if constexpr (D::by_lanes) {
            read_levels<C>(reader, tables, (u32*)(own + lane * D::levels_pitch));
            warp_barrier();
            turn_by_lanes<C, Element>(params, page, head, exponent, affine, own, rows, lane);
        } else {
            turn_by_columns<C, Element>(params, page, head, exponent, affine, reader, tables, own, rows, lane);
        }
    }
    if (lane >= rows.first && lane < rows.last) {
        u8 status = reader.status(STATUS_OVERRUN, STATUS_STATE);
        if (!finite) status = STATUS_AFFINE;
        if (exponent < LEAST_EXPONENT || exponent > MOST_EXPONENT) status = STATUS_EXPONENT;
        params.status[(index * LANES + lane - params.start) * C::substreams + substream] = status;
    }
}

// A block's share of all tiles that hold a token from `start` to `stop`.
template <class C, class Element>
DQ_DEVICE void decode_block(const DecodeParams& params, u8* shared, int block, int blocks, int thread, int threads) {
    const LetterTables tables = share_tables<C>(params.tables, shared, thread, threads);
    const int warp = thread / LANES, warps = threads / LANES;
    u8* own = shared + DecodeShape<C>::tables_bytes + warp * DecodeShape<C>::warp_bytes;
    const i64 first = params.start / LANES;
    const i64 units = ((params.stop + LANES - 1) / LANES - first) * C::substreams;
    for (i64 unit = (i64)block * warps + warp; unit < units; unit += (i64)blocks * warps) {
        const i64 tile = unit / C::substreams;
        decode_unit<C, Element>(params, tables, first + tile, (int)(unit - tile * C::substreams), own, thread % LANES);
    }
}

}  // namespace dquant
