// Appending: new tokens go to a sequence's exact tail; a full tail is due to be encoded into the sequence's next page.
// Everything a step needs is in device memory, so that a captured graph can be replayed as it is.
#pragma once

#include "dquant/platform.cuh"

namespace dquant {

// New rows of one kind, strides in elements, and the tails [sequences, window, H, D] they go to.
struct AppendRows {
    const void* in;
    i64 sequence_stride;
    i64 token_stride;
    i64 head_stride;
    void* tails;
};
static_assert(sizeof(AppendRows) == 40, "shared with NumPy");

// Shared with NumPy.
struct AppendParams {
    AppendRows keys;
    AppendRows values;
    i32* lengths;      // tokens of every sequence
    i32* ready;        // the page that is now due, counted within the sequence, or -1
    u8* full;          // 1 where a token found no room
    const u8* active;  // null, or 0 for sequences that get none
    i32 heads;
    i32 head_dim;
    i32 window;
    i32 pages;  // that a sequence may fill
    i32 tokens;  // of every sequence; they fill one page at most
    i32 element_bytes;
};
static_assert(sizeof(AppendParams) == 136, "shared with NumPy");

template <class Bits>
DQ_DEVICE void append_rows(
    const AppendParams& params, const AppendRows& rows, i64 sequence, int place, int thread, int threads) {
    const int row = params.heads * params.head_dim;
    const Bits* in = (const Bits*)rows.in + sequence * rows.sequence_stride;
    Bits* tail = (Bits*)rows.tails + (sequence * params.window + place) * row;
    for (int i = thread; i < params.tokens * row; i += threads) {
        const int token = i / row, value = i - token * row, head = value / params.head_dim;
        tail[i] = in[token * rows.token_stride + head * rows.head_stride + value - head * params.head_dim];
    }
}

// One sequence by one block.
DQ_DEVICE void append(const AppendParams& params, i64 sequence, int thread, int threads) {
    const int length = params.lengths[sequence], place = length % params.window;
    const int after = length + params.tokens;
    const bool active = !params.active || params.active[sequence];
    const bool room = place + params.tokens <= params.window && after / params.window <= params.pages;
    if (active && room) {
        if (params.element_bytes == 4) {
            append_rows<u32>(params, params.keys, sequence, place, thread, threads);
            append_rows<u32>(params, params.values, sequence, place, thread, threads);
        } else {
            append_rows<u16>(params, params.keys, sequence, place, thread, threads);
            append_rows<u16>(params, params.values, sequence, place, thread, threads);
        }
    }
    block_barrier();
    if (thread == 0) {
        const bool due = active && room && after % params.window == 0;
        params.ready[sequence] = due ? after / params.window - 1 : -1;
        if (active && room) params.lengths[sequence] = after;
        if (active && !room) params.full[sequence] = 1;
    }
}

}  // namespace dquant
