// What the attention kernels are given (see attend.cuh); any C++ compiler takes this header.
#pragma once

#include "dquant/types.cuh"

namespace dquant {

// Shared with NumPy.  Lengths count tokens.
struct AttendParams {
    const u8* pages;          // page pool, 16-byte aligned; so is page_stride
    i64 page_stride;          // bytes
    const i32* block_table;   // [B, table_stride]: page of every window; entries beyond the length are not read
    const i32* lengths;       // [B]: tokens in pages
    const u16* key_table;     // [2**p], see Letters
    const u16* value_table;
    const float* factors;     // [H, D]: sign / sqrt(order)
    const i8* matrix;         // [D, D]: the rotation without its factors, for head sizes that are no power of two
    const void* query;        // [B, positions, Q, D]
    const void* sink_keys;    // bf16 [B, sink_stride, H, D]: exact leading tokens
    const void* sink_values;
    const i32* sink_lengths;  // [B], or null: none
    const void* tail_keys;    // bf16 [B, tail_stride, H, D]: exact newest tokens
    const void* tail_values;
    const i32* tail_lengths;  // [B], or null: none
    const float* sink_logits; // [Q] natural logits that only add to the softmax's total, or null
    float* partial;           // workspace: [slots][AttendShape::partial_floats]
    float* state;             // workspace: [slots][heads of a sub-stream][rows][2]: largest logit, total
    void* out;                // [B, positions, Q, D]
    float* lse;               // [B, positions, Q]
    const float* before_out;  // [B, positions, Q, D]: the result over other tokens, which becomes part of this one
    const float* before_lse;  // [B, positions, Q]: its log-sum-exps, or null: none
    i64 sink_stride;
    i64 tail_stride;
    i32 table_stride;
    i32 batch;
    i32 blocks;               // of attend_pages
    i32 causal;
    i32 sliding_window;       // 0: none
    float scale;              // of logits
    float soft_cap;           // 0: none
    float lse_factor;         // 1 for base 2, ln 2 for natural
};
static_assert(sizeof(AttendParams) == 224, "shared with NumPy");

}  // namespace dquant
