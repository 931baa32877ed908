// What encoders are told, which tokens and page a window of theirs is, and the exponent of a page.
#pragma once

#include "dquant/drift.cuh"
#include "dquant/pages.cuh"
#include "dquant/rows.cuh"

namespace dquant {

// What a stream's status says of its input: a value was not finite and was taken as zero.
constexpr u8 STATUS_NONFINITE = 6;

// Shared with NumPy.
struct EncodeParams {
    PagePool pool;
    const void* in;  // rows; token and head stride in elements, channels next to each other
    i64 token_stride;
    i64 head_stride;
    i64 tokens;
    const i32* ready;  // null, or for every tail the page it is now due for, or -1: see EncodeJob
    i64 numbers_stride;
    const float* factors;  // [H, D]: 1 / sqrt(order) of the block, times the sign
    DriftTables drift;
    const u32* codes;        // prefix: codes; rans: steps
    const u64* reciprocals;  // rans
    u8* status;              // [tokens], or null
    u8* scratch;             // for streams too long for shared memory: `scratch_bytes` for every block
    i64 scratch_bytes;
    i32 budget;  // of a sub-stream, in 1/1024 bit
    i32 windows;
    u32 clear_from;  // bytes of a page's head that this kind's launch sets to zero
    u32 clear_to;
    i32 vectors;  // whether eight channels always begin at a multiple of 16 bytes
    i32 reserved;
    KindLayout at;
};
static_assert(sizeof(EncodeParams) == 240, "shared with NumPy");

// One window of tokens and the page it goes to.  Without `ready`, window w holds the rows from w windows on, `tokens`
// of them in all.  With it, window w is the tail of sequence w, and goes to page `numbers[w][ready[w]]` if that is due.
struct EncodeJob {
    u8* page;
    i64 first;
    int tokens;

    DQ_DEVICE EncodeJob(const EncodeParams& params, i64 window) {
        const int size = (int)params.at.tiles * LANES;
        first = window * size;
        if (params.ready) {
            const i32 due = params.ready[window];
            tokens = due < 0 ? 0 : size;
            page = due < 0 ? nullptr : params.pool.numbered(params.pool.numbers[window * params.numbers_stride + due]);
        } else {
            tokens = params.tokens - first < size ? (int)(params.tokens - first) : size;
            page = params.pool.page(window);
        }
    }
};

// The power of two taken out of a page whose largest magnitude is `largest`.
DQ_DEVICE int exponent_for(float largest) {
    if (largest == 0.0f || (largest >= 0.0625f && largest < 512.0f)) return 0;
    // An FP32 denormal is a normal FP64; frexp's exponent is one more than this one.
    return (int)(double_bits((double)largest) >> 52) - 1022 - 9;
}

constexpr u32 INFINITE = 0x7F800000;

// The largest of a thread's share of a page's magnitudes, as FP32 bits; those of infinity or more are zero if `clean`.
template <class C, class Element>
DQ_DEVICE u32 largest_magnitude(const EncodeParams& params, const EncodeJob& job, bool clean, int thread, int threads) {
    constexpr int units = (C::heads * C::head_dim + 7) / 8, together = 8;
    const int count = job.tokens * units;
    u32 largest = 0;
    if constexpr (C::head_dim % 8 == 0 && sizeof(typename Element::Stored) == 2) {
        if (params.vectors && !clean) {
            u32 halves = 0;
            for (int first = thread; first < count; first += together * threads) {
                // Several loads at once keep memory busy.
                Vector16 vectors[together];
#pragma unroll
                for (int k = 0; k < together; ++k) {
                    const int unit = first + k * threads < count ? first + k * threads : first, token = unit / units;
                    const int channel = 8 * (unit - token * units), head = channel / C::head_dim;
                    vectors[k] = *(const Vector16*)(head_row<Element>(params, job.first + token, head) +
                                                    (channel - head * C::head_dim));
                }
#pragma unroll
                for (int k = 0; k < together; ++k) {
                    halves = larger_halves(halves, vectors[k].x & 0x7FFF7FFF);
                    halves = larger_halves(halves, vectors[k].y & 0x7FFF7FFF);
                    halves = larger_halves(halves, vectors[k].z & 0x7FFF7FFF);
                    halves = larger_halves(halves, vectors[k].w & 0x7FFF7FFF);
                }
            }
            const u32 low = halves & 0xFFFF, high = halves >> 16;
            return float_bits(Element::load((u16)(low > high ? low : high)));
        }
    }
    for (int unit = thread; unit < count; unit += threads) {
        float x[8];
        load_eight<C, Element>(params, job.first + unit / units, 8 * (unit % units), x);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const u32 magnitude = float_bits(x[j]) & 0x7FFFFFFF;
            if (!(clean && magnitude >= INFINITE)) largest = magnitude > largest ? magnitude : largest;
        }
    }
    return largest;
}

// The exponent of a page, and zeros where its head holds nothing.
template <class C, class Element>
DQ_DEVICE void encode_head(const EncodeParams& params, u8* shared, int block, int thread, int threads) {
    const EncodeJob job(params, block);
    if (job.tokens == 0) return;
    u32* block_largest = (u32*)shared;
    u32 found = INFINITE;
    // Numbers that are not finite are seldom there, so they are left out only when they turn up.
    for (int clean = 0; clean < 2 && found >= INFINITE; ++clean) {
        u32 largest = largest_magnitude<C, Element>(params, job, clean, thread, threads);
        for (int mask = LANES / 2; mask > 0; mask /= 2) {
            const u32 other = from_lane_xor(largest, mask);
            largest = other > largest ? other : largest;
        }
        block_barrier();
        if (thread == 0) *block_largest = 0;
        block_barrier();
        if (thread % LANES == 0) atomic_max(block_largest, largest);
        block_barrier();
        found = *block_largest;
    }
    if (thread == 0) *(i16*)(job.page + params.at.exponent_at) = (i16)exponent_for(bits_float(found));
    for (u32 i = params.clear_from + thread; i < params.clear_to; i += threads) job.page[i] = 0;
}

}  // namespace dquant
