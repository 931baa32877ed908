// Where the bytes of a page stand (specification, clause 5).
#pragma once

#include "dquant/plan.cuh"

namespace dquant {

constexpr int LEAST_EXPONENT = -157;
constexpr int MOST_EXPONENT = 119;

// Offsets in bytes of one kind's fields: the first three within a page, the last two within a tile.  Shared with NumPy.
struct KindLayout {
    u32 exponent_at;
    u32 scale_at;
    u32 mean_at;
    u32 words_at;
    u32 affine_at;
    u32 head_bytes;
    u32 tile_bytes;
    u32 tiles;
};
static_assert(sizeof(KindLayout) == 32, "shared with NumPy");

// A pool of pages `[pages, page_bytes]` that are `stride` bytes apart; `numbers` (int32, or null for 0, 1, 2, ...) says
// which page holds window 0, 1, 2, ... of a sequence.  Pages begin at multiples of 16 bytes.
struct PagePool {
    u8* pages;
    const i32* numbers;
    i64 stride;

    DQ_DEVICE u8* numbered(i64 number) const { return pages + number * stride; }
    DQ_DEVICE u8* page(i64 window) const { return numbered(numbers ? numbers[window] : window); }
};
static_assert(sizeof(PagePool) == 24, "shared with NumPy");

DQ_DEVICE int page_exponent(const u8* page, const KindLayout& at) { return *(const i16*)(page + at.exponent_at); }

// `Bytes` is u8 or const u8.
template <class Bytes> DQ_DEVICE Bytes* page_tile(Bytes* page, const KindLayout& at, int tile) {
    return page + at.head_bytes + (i64)tile * at.tile_bytes;
}

template <class C, class Bytes> DQ_DEVICE Bytes* tile_words(Bytes* tile, const KindLayout& at, int substream) {
    return tile + at.words_at + substream * Shape<C>::stream_bytes;
}

// Offset and scale of a token; of a mid-tread grid the offset follows from the scale, exactly.
struct Affine {
    float offset, scale;
};

template <class C> DQ_DEVICE Affine tile_affine(const u8* tile, const KindLayout& at, int token) {
    const u16* numbers = (const u16*)(tile + at.affine_at);
    if (C::mid_tread) {
        const float scale = half_to_float(numbers[token]);
        return {-0.5f * (C::levels - 1) * scale, scale};
    }
    return {half_to_float(numbers[2 * token]), half_to_float(numbers[2 * token + 1])};
}

}  // namespace dquant
