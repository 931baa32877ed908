// Encoding: rows to pages, in three steps that leave nothing in memory but the page itself.
//
//     encode_head    a block a page: the page's exponent (jobs.cuh)
//     encode_means   a block a page and head, for kinds with means: the windowed means
//     encode_tokens  prefix: a warp a token, from rotation to words
//     encode_tiles   rans: a block a tile: a warp takes one token after another from rotation to letters, then a warp
//                    for each sub-stream turns the tile's letters into words, a lane a token, because rANS is serial
//
// The same arithmetic in the same order as dquantcodec/encode.py, so the same bytes.
#pragma once

#include "dquant/jobs.cuh"
#include "dquant/prefix.cuh"
#include "dquant/rans.cuh"
#include "dquant/rotation.cuh"

namespace dquant {

// The means of a head that are taken away after rotation, or none.
struct HeadMeans {
    const i8* means;
    float scale;
};

// Whether a warp can hold a rotated head in registers: one block, a power of two.
template <int D> DQ_CONSTANT bool one_block() { return D >= LANES && block_order(D) == D && paley_order(D) == 1; }

// A head of a token, scaled, rotated and less its means, to `y` in shared memory.
template <class C, class Element>
DQ_DEVICE void rotate_head(
    const EncodeParams& params, i64 token, int head, int exponent, const HeadMeans& less, float* y, float* scratch,
    bool& finite, int lane) {
    constexpr int D = C::head_dim, per = (D + LANES - 1) / LANES;
    const typename Element::Stored* in = head_row<Element>(params, token, head);
    const float* factors = params.factors + head * D;
    float x[per], scales[per];
#pragma unroll
    for (int i = 0; i < per; ++i) {
        const int d = lane + LANES * i;
        x[i] = d < D ? finite_value<Element>(in[d], finite) : 0.0f;
        scales[i] = d < D ? factors[d] : 1.0f;
    }
    if (exponent) {
#pragma unroll
        for (int i = 0; i < per; ++i) x[i] = scale_float(x[i], -exponent);
    }
#pragma unroll
    for (int i = 0; i < per; ++i) {
        // The factor's sign goes to the value, its magnitude remains.
        x[i] = bits_float(float_bits(x[i]) ^ (float_bits(scales[i]) & 0x80000000));
        scales[i] = bits_float(float_bits(scales[i]) & 0x7FFFFFFF);
    }
    if constexpr (one_block<D>()) {
        lane_butterflies<per>(x, lane);
    } else {
#pragma unroll
        for (int i = 0; i < per; ++i)
            if (lane + LANES * i < D) y[lane + LANES * i] = x[i];
        warp_barrier();
        turn_row<D>(y, scratch, lane);
#pragma unroll
        for (int i = 0; i < per; ++i)
            if (lane + LANES * i < D) x[i] = y[lane + LANES * i];
    }
#pragma unroll
    for (int i = 0; i < per; ++i) {
        const int d = lane + LANES * i;
        if (d < D) {
            float value = x[i] * scales[i];
            if (C::mean && less.means) value -= less.scale * (float)less.means[d];
            y[d] = value;
        }
    }
    warp_barrier();
}

// A warp's floats for the Paley factor of a head.
constexpr int PALEY_SCRATCH = 64;

template <class C> DQ_CONSTANT int means_shared_bytes(int warps) {
    return 4 * (warps * (C::head_dim + PALEY_SCRATCH) + C::head_dim + 1);
}

// The windowed means of one head.
template <class C, class Element>
DQ_DEVICE void encode_means(const EncodeParams& params, u8* shared, int block, int thread, int threads) {
    constexpr int D = C::head_dim;
    const int window = block / C::heads, head = block - window * C::heads;
    const EncodeJob job(params, window);
    if (job.tokens == 0) return;
    const int lane = thread % LANES, warp = thread / LANES, warps = threads / LANES;
    float* rows = (float*)shared;
    float* scratch = rows + warps * D + warp * PALEY_SCRATCH;
    float* sums = rows + warps * (D + PALEY_SCRATCH);
    u32* largest = (u32*)(sums + D);
    const int exponent = page_exponent(job.page, params.at);
    if (thread == 0) *largest = 0;
    for (int d = thread; d < D; d += threads) sums[d] = 0.0f;
    bool finite = true;
    for (int first = 0; first < job.tokens; first += warps) {
        const int count = job.tokens - first < warps ? job.tokens - first : warps;
        if (warp < count)
            rotate_head<C, Element>(
                params, job.first + first + warp, head, exponent, {nullptr, 0.0f}, rows + warp * D, scratch,
                finite, lane);
        block_barrier();
        // Rows are added in their order; FP32 sums depend on it.
        for (int d = thread; d < D; d += threads)
            for (int row = 0; row < count; ++row) sums[d] += rows[row * D + d];
        block_barrier();
    }
    for (int d = thread; d < D; d += threads) {
        sums[d] /= (float)job.tokens;
        atomic_max(largest, float_bits(sums[d]) & 0x7FFFFFFF);
    }
    block_barrier();
    const u16 scale = round_up_half(bits_float(*largest) / 127.0f);
    const float step = half_to_float(scale);
    if (thread == 0) *(u16*)(job.page + params.at.scale_at + 2 * head) = scale;
    for (int d = thread; d < D; d += threads) {
        const float steps = step > 0.0f ? sums[d] / step : 0.0f;
        job.page[params.at.mean_at + head * D + d] = (u8)(i8)round_to_integer(steps);
    }
}

// What a warp keeps for a token: a stream, and its histogram, whose place a container's words take later.
template <class C> struct TokenShape {
    static constexpr int histogram = histogram_entries<C>() > PALEY_SCRATCH ? histogram_entries<C>() : PALEY_SCRATCH;
    static constexpr int extra = C::rans || histogram > C::words ? histogram : C::words;
    static constexpr int bytes = (4 * (Shape<C>::values + extra) + 15) / 16 * 16;
};

// And what a block keeps for a tile of rANS streams beside: letters of all its tokens, a pitch apart by which no two
// lanes share a bank, and budgets.
template <class C> struct TileShape {
    static constexpr int pitch = LANES + 1;
    static constexpr int letters_bytes = (2 * C::substreams * Shape<C>::letters * pitch + 15) / 16 * 16;
    static constexpr int control_bytes = 4 * LANES * C::substreams + 16;
};

template <class C> DQ_CONSTANT int encode_bytes(int warps) {
    return costs_bytes<C>() + (C::rans ? TileShape<C>::letters_bytes + TileShape<C>::control_bytes : 0) +
           warps * TokenShape<C>::bytes;
}

// Letters of a rANS stream on their way to a tile's buffer.
struct LetterBuffer {
    u16* letters;
    int pitch;

    DQ_DEVICE void begin(int) {}
    DQ_DEVICE void put(int i, int letter, bool exists, int) {
        if (exists) letters[i * pitch] = (u16)letter;
    }
};

// A token's positions in place of its rotated values; its grid before drift.
template <class C, class Element>
DQ_DEVICE Grid place_token(
    const EncodeParams& params, const EncodeJob& job, int token, float* x, i32* scratch, bool& finite, int lane) {
    constexpr int D = C::head_dim;
    const int exponent = page_exponent(job.page, params.at);
    for (int head = 0; head < C::heads; ++head) {
        HeadMeans less = {nullptr, 0.0f};
        if (C::mean) {
            less.means = (const i8*)(job.page + params.at.mean_at + head * D);
            less.scale = half_to_float(*(const u16*)(job.page + params.at.scale_at + 2 * head));
        }
        rotate_head<C, Element>(
            params, job.first + token, head, exponent, less, x + head * D, (float*)scratch, finite, lane);
    }
    return lay_grid<C>(x, lane);
}

// A token's affine numbers, fitted to its final symbols, to the page, and its status.
template <class C>
DQ_DEVICE void finish_token(
    const EncodeParams& params, const EncodeJob& job, u8* tile, int token, const Grid& grid, const Moments& moments,
    bool finite, int lane) {
    const Moments sums = moments.over_warp();
    const Grid fitted = C::mid_tread ? regain<C>(sums, grid) : refit<C>(sums, grid);
    const u32 bad = ballot(!finite);
    if (lane == 0) {
        u16* affine = (u16*)(tile + params.at.affine_at);
        const int place = token % LANES;
        if (C::mid_tread) {
            affine[place] = fitted.scale;
        } else {
            affine[2 * place] = fitted.offset;
            affine[2 * place + 1] = fitted.scale;
        }
        if (params.status) params.status[job.first + token] = bad ? STATUS_NONFINITE : 0;
    }
    warp_barrier();
}

// Zeros for a token that does not exist: its affine numbers, and its words by `Word`.
template <class C> DQ_DEVICE void clear_affine(const EncodeParams& params, u8* tile, int place) {
    u16* affine = (u16*)(tile + params.at.affine_at);
    for (int i = 0; i < Shape<C>::affine; ++i) affine[Shape<C>::affine * place + i] = 0;
}

// Prefix: token `token` of window `window` by one warp; `memory` is the warp's own.
template <class C, class Element>
DQ_DEVICE void encode_token(
    const EncodeParams& params, const DriftTables& tables, i64 window, int token, u8* memory, int lane) {
    const EncodeJob job(params, window);
    if (params.ready && job.tokens == 0) return;
    float* x = (float*)memory;
    i32* above = (i32*)(x + Shape<C>::values);
    u8* tile = page_tile(job.page, params.at, token / LANES);
    const int place = token % LANES;
    if (token >= job.tokens) {
        u32* words = (u32*)(tile + params.at.words_at);
        for (int i = lane; i < C::substreams * C::words; i += LANES) words[i * LANES + place] = 0;
        if (lane == 0) clear_affine<C>(params, tile, place);
        return;
    }
    bool finite = true;
    const Grid grid = place_token<C, Element>(params, job, token, x, above, finite, lane);
    Moments sums = {0, 0, 0, 0, 0};
    for (int j = 0; j < C::substreams; ++j) {
        PrefixWriter<C> writer = {params.codes, (u32*)above, 0};
        drift<C>(tables, x + j * Shape<C>::symbols, params.budget, above, writer, sums, lane);
        writer.finish((u32*)tile_words<C>(tile, params.at, j) + place, lane);
    }
    finish_token<C>(params, job, tile, token, grid, sums, finite, lane);
}

// rANS: tile `index` of window `window` by one block.
template <class C, class Element>
DQ_DEVICE void encode_tile(
    const EncodeParams& params, const DriftTables& tables, i64 window, int index, u8* memory, int thread, int threads) {
    typedef TileShape<C> T;
    const EncodeJob job(params, window);
    if (params.ready && job.tokens == 0) return;
    const int lane = thread % LANES, warp = thread / LANES, warps = threads / LANES;
    u16* letters = (u16*)memory;
    i32* budgets = (i32*)(memory + T::letters_bytes);
    u32* again = (u32*)(budgets + LANES * C::substreams);
    i32* next = (i32*)(again + 1);
    float* x = (float*)(memory + T::letters_bytes + T::control_bytes + warp * TokenShape<C>::bytes);
    i32* above = (i32*)(x + Shape<C>::values);
    u8* tile = page_tile(job.page, params.at, index);
    const int first = index * LANES;
    const int left = job.tokens - first, count = left < 0 ? 0 : left < LANES ? left : LANES;

    for (int i = thread; i < LANES * C::substreams; i += threads) budgets[i] = params.budget;
    u16* words = (u16*)(tile + params.at.words_at);
    for (int i = thread; i < C::substreams * C::words * LANES; i += threads)
        if (i % LANES >= count) words[i] = 0;
    for (int place = count + thread; place < LANES; place += threads) clear_affine<C>(params, tile, place);
    if (thread == 0) *again = *next = 0;
    block_barrier();

    // By a ballot: of a mask shifted out of `count`, all bits were seen set on sm_90 (NVRTC 13.0) for a tile cut short.
    u32 pending = ballot(first + lane < job.tokens);
    while (pending) {
        // Some tokens need more trials than others, so warps take them as they get free.
        for (;;) {
            const int place = from_lane(lane == 0 ? atomic_add(next, 1) : 0, 0);
            if (place >= count) break;
            if (!(pending >> place & 1)) continue;
            bool finite = true;
            const Grid grid = place_token<C, Element>(params, job, first + place, x, above, finite, lane);
            Moments sums = {0, 0, 0, 0, 0};
            for (int j = 0; j < C::substreams; ++j) {
                LetterBuffer buffer = {letters + j * Shape<C>::letters * T::pitch + place, T::pitch};
                drift<C>(
                    tables, x + j * Shape<C>::symbols, budgets[j * LANES + place], above, buffer, sums, lane);
            }
            finish_token<C>(params, job, tile, first + place, grid, sums, finite, lane);
        }
        block_barrier();
        for (int j = warp; j < C::substreams; j += warps) {
            bool fits = true;
            if (pending >> lane & 1)
                fits = write_rans<C>(
                    params.codes, params.reciprocals, letters + j * Shape<C>::letters * T::pitch + lane, T::pitch,
                    (u16*)tile_words<C>(tile, params.at, j) + lane);
            // A stream may exceed its estimate by a fraction of a bit; one bit less of budget at a time ends at the
            // cheapest letters, which fit by construction of the plan.
            if (!fits) budgets[j * LANES + lane] -= 1024;
            const u32 failed = ballot(!fits);
            if (lane == 0 && failed) atomic_or(again, failed);
        }
        block_barrier();
        pending = *again;
        block_barrier();
        if (thread == 0) *again = *next = 0;
        block_barrier();
    }
}

// A block's share of all tokens or tiles.
template <class C, class Element>
DQ_DEVICE void encode_block(const EncodeParams& params, u8* memory, int block, int blocks, int thread, int threads) {
    const i64 size = (i64)params.at.tiles * LANES;
    const DriftTables tables = share_costs<C>(params.drift, memory, thread, threads);
    memory += costs_bytes<C>();
    if constexpr (C::rans) {
        for (i64 tile = block; tile < params.windows * (i64)params.at.tiles; tile += blocks) {
            const i64 window = tile / params.at.tiles;
            encode_tile<C, Element>(
                params, tables, window, (int)(tile - window * params.at.tiles), memory, thread, threads);
        }
    } else {
        const int warp = thread / LANES, warps = threads / LANES;
        for (i64 token = (i64)block * warps + warp; token < params.windows * size; token += (i64)blocks * warps) {
            const i64 window = token / size;
            encode_token<C, Element>(
                params, tables, window, (int)(token - window * size), memory + warp * TokenShape<C>::bytes,
                thread % LANES);
        }
    }
}

}  // namespace dquant
