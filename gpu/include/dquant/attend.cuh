// Decode attention straight from pages: what a kernel is given and what follows from it.
//
// Two launches.  `attend_pages` decodes pages and leaves partial results of each run of tokens that a block worked on;
// `attend_finish` merges them, adds the exact tokens, turns the output back and writes it.  Both are templates over a
// struct of constants:
//
//     struct C {
//         static constexpr int heads, head_dim, window, substreams;   // of the plan
//         static constexpr int group, positions;                      // query heads of a KV head, query tokens
//         static constexpr int warps, finish_threads;                 // of blocks of attend_pages, attend_finish
//         static constexpr int element, out_element;                  // of queries, output: 0 f32, 1 f16, 2 bf16
//         static constexpr bool grouped;                              // false; true: see attend_groups.cuh
//         typedef AttendParams Params;
//         static constexpr bool masked;                               // causal mask or sliding window in the pages
//         static constexpr bool soft_cap;
//         struct Key {
//             static constexpr int levels, letter, precision, words;
//             static constexpr int ring;  // rows of words in shared memory, a power of two; 0: whole streams
//             static constexpr bool rans, mean, mid_tread;
//         };
//         struct Value { the same };
//     };
//
// Nothing is allocated, nothing waits for the host, and grids depend on neither lengths nor block tables, so that
// launches can be captured once and replayed with other lengths.
#pragma once

#include "dquant/attend_params.cuh"
#include "dquant/plan.cuh"

namespace dquant {

constexpr float LOG2_E = 1.4426950408889634f;
// Stands for minus infinity where the difference of two of them must be zero.
constexpr float NO_LOGIT = -1e30f;

DQ_CONSTANT int least(int a, int b) { return a < b ? a : b; }
DQ_CONSTANT int most(int a, int b) { return a > b ? a : b; }
DQ_CONSTANT int align_up(int x, int to) { return (x + to - 1) / to * to; }

// Letters of one kind as the tensor cores take them.
//
// Letters go through shared memory as 16 bits each.  A field of a few bits within the low ten bits of an FP16 number is
// a subnormal integer, which matrix products take exactly, so a level needs one mask, and one shift per two letters.
// A table entry holds the fields from bit `first_field` on.
template <class Kind, int D> struct Letters {
    static constexpr int letter = Kind::letter;
    static constexpr int field_bits = bit_length(Kind::levels - 1);
    static constexpr bool rans = Kind::rans, rotated = true;
    // Prefix entries hold the code's length from bit 0 on.  Where ten bits suffice for the fields, bits 4 and 5 stay
    // clear: shift amounts and positions then need no mask.  rANS entries hold fields below bit 12, above them what the
    // state needs.
    static constexpr bool crowded = field_bits * letter > 10;
    static constexpr int first_field = rans ? 12 - field_bits * letter : crowded ? 4 : 6;
    static constexpr int per_head = (D + letter - 1) / letter;
    static constexpr int chunk_letters = 16;
    static constexpr int chunks = (per_head + 15) / 16;
    static constexpr int tiles = chunks * letter;  // 16 letters of one field: one operand of a matrix product
    static constexpr int word_bytes = rans ? 2 : 4;
    static constexpr int row_bytes = LANES * word_bytes;  // one word of every token of a tile
    // Rows that a chunk of letters can reach at most, from the start of a stream; and those of a whole stream of bits.
    static constexpr int chunk_rows = rans ? 16 + 4 : 16 * Kind::precision / 32 + 4;
    DQ_CONSTANT static int most_rows(int heads) {
        return rans ? heads * per_head + 4 : heads * per_head * Kind::precision / 32 + 4;
    }
    static constexpr int stream_bytes = Kind::words * row_bytes;
    static constexpr int ring_bytes = Kind::ring * row_bytes;
    static constexpr int code_bits = Kind::precision;  // of a letter at most (prefix)
    static constexpr int table_bytes = (rans ? 4 : 2) << Kind::precision;
    static constexpr float middle = 0.5f * (Kind::levels - 1);

    DQ_CONSTANT static int letters_of(int chunk) {
        return chunk < chunks ? least(16, per_head - 16 * chunk) : 0;
    }
    // Where letter `i` of a chunk goes, as `store_letters` puts eight.
    DQ_CONSTANT static u32 letter_at(u32 stage, int i) { return (stage ^ (i / 8 * 16)) + i % 8 * 2; }
    DQ_CONSTANT static int place(int field) { return first_field + field * field_bits; }
    DQ_CONSTANT static int shift(int field) { return place(field) + field_bits <= 10 ? 0 : 6; }
    DQ_CONSTANT static u32 mask(int field) {
        return (((1u << field_bits) - 1) << (place(field) - shift(field))) * 0x10001u;
    }
    DQ_CONSTANT static float weight(int field) { return (float)(1 << (place(field) - shift(field))); }

    static_assert(field_bits * letter <= (rans ? 10 : 12), "entries have room for all fields");
    static_assert(2 * Kind::precision < 32, "two codes fit in a word");
};

// Built to be checked for races: NVIDIA's checker knows neither the copy engine nor one lane's arrival for its warp,
// and takes words that are read ahead, behind the last stream, for its neighbour's.
#ifndef DQ_CHECKED
#define DQ_CHECKED 0
#endif
constexpr int CHECKED_PAD = DQ_CHECKED ? 1024 : 0;
// Where dynamic shared memory begins from Hopper on, counted in when rings are placed.
constexpr int RING_START = 1024;

template <class Kind, int D> struct GroupLetters;

template <bool GROUPED, class Kind, int D> struct LettersOf {
    typedef Letters<Kind, D> Type;
};
template <class Kind, int D> struct LettersOf<true, Kind, D> {
    typedef GroupLetters<Kind, D> Type;
};

template <class C> struct AttendShape {
    typedef typename LettersOf<C::grouped, typename C::Key, C::head_dim>::Type Keys;
    typedef typename LettersOf<C::grouped, typename C::Value, C::head_dim>::Type Values;

    static constexpr int dim = C::head_dim;
    static constexpr int heads = C::heads / C::substreams;  // that a block takes together
    static constexpr int all_rows = C::group * C::positions;
    // Query rows of a KV head that a block takes together; the columns of a matrix product come in eights.
    static constexpr int rows = all_rows <= 4 ? 4 : all_rows <= 8 ? 8 : 16;
    static constexpr int passes = (all_rows + rows - 1) / rows;
    static constexpr int row_tiles = (rows + 7) / 8;
    static constexpr int groups = passes * C::substreams;
    static constexpr int threads = C::warps * LANES;
    static constexpr int unit = C::warps * LANES;  // tokens that a block takes together, a tile for each warp
    static constexpr int page_tiles = C::window / LANES;

    // The page (specification, clause 5.1).
    static constexpr int mean_bytes = 2 * C::heads + C::heads * dim;
    static constexpr int key_scale_at = 4;
    static constexpr int key_mean_at = key_scale_at + 2 * C::heads;
    static constexpr int head_bytes =
        align_up(4 + (C::Key::mean ? mean_bytes : 0) + (C::Value::mean ? mean_bytes : 0), 64);
    static constexpr int key_affine = C::Key::mid_tread ? 2 : 4;
    static constexpr int value_affine = C::Value::mid_tread ? 2 : 4;
    static constexpr int key_affine_at = C::substreams * Keys::stream_bytes;
    static constexpr int value_words_at = key_affine_at + LANES * key_affine;
    static constexpr int value_affine_at = value_words_at + C::substreams * Values::stream_bytes;
    static constexpr int tile_bytes = value_affine_at + LANES * value_affine;
    static constexpr int page_bytes = head_bytes + page_tiles * tile_bytes;

    // Pages that a unit touches at most: its tiles share means by them.
    static constexpr int mean_groups = C::warps % page_tiles == 0   ? C::warps / page_tiles
                                       : page_tiles % C::warps == 0 ? 1
                                                                    : (C::warps + page_tiles - 2) / page_tiles + 1;

    // A warp's output of one head as FP16 pairs of query rows: [value tile][letter % 8][row / 2][letter / 8].
    static constexpr int slot_bytes = Values::tiles * 8 * (rows / 2) * 8;
    static constexpr int pieces = slot_bytes / 16;  // each: two letters of four query rows
    // Rotated queries in the order of channels are kept for as long as their segment lasts where page means are
    // multiplied with them, if there is room beside the tables of rANS; others stand where letters will, until they are
    // laid out.
    static constexpr bool rows_kept = Keys::rotated && C::Key::mean && !Keys::rans;
    static constexpr int row_bytes = heads * rows * dim * 2;
    // Whether work for the next unit can begin while the last head of this one is decoded.
    static constexpr bool early = heads >= 2;
    static constexpr int summing_warps = least((pieces + LANES - 1) / LANES, C::warps);
    static constexpr int partial_floats = heads * pieces * 8;
    static constexpr int state_floats = heads * rows * 2;

    // Shared memory, in bytes from its start.
    static constexpr int query_bytes = heads * Keys::tiles * least(rows, 8) * 4 * 8 * row_tiles;
    static constexpr int key_table_at = 0;
    static constexpr int value_table_at = key_table_at + Keys::table_bytes;
    static constexpr int slot_at = value_table_at + Values::table_bytes;
    static constexpr int query_at = slot_at + C::warps * slot_bytes;
    static constexpr int kept_at = query_at + query_bytes;
    static constexpr int factor_at = kept_at + (rows_kept ? row_bytes : 0);
    static constexpr int weight_at = factor_at + heads * rows * 8;
    static constexpr int summary_at = weight_at + summing_warps * (C::warps + 1) * rows * 4;
    static constexpr int summary_floats = 2 * rows + 4;  // of a warp: largest logits, totals, unit of its values
    static constexpr int state_at = summary_at + C::warps * summary_floats * 4;
    static constexpr int mean_at = state_at + 2 * state_floats * 4;
    static constexpr int barrier_at = align_up(mean_at + 2 * mean_groups * heads * rows * 4, 16);
    // Of whole streams, or of rings, which begin at multiples of their size; the larger ones first.
    static constexpr bool ringed = Keys::ring_bytes > 0;
    static constexpr int key_stream_bytes = ringed ? Keys::ring_bytes : Keys::stream_bytes;
    static constexpr int value_stream_bytes = ringed ? Values::ring_bytes : Values::stream_bytes;
    static constexpr int ring_at = align_up(barrier_at + (2 + 4 * C::warps) * 8, 16);  // states of rings
    static constexpr int stream_alignment = ringed ? most(key_stream_bytes, value_stream_bytes) : 128;
    static constexpr int streams_at =
        align_up(RING_START + ring_at + (ringed ? C::warps * 64 : 0), stream_alignment) - RING_START;
    static constexpr int warp_stream_bytes = key_stream_bytes + value_stream_bytes;
    // Two of a chunk's letters of every token.  They stand behind the streams: a stream of arbitrary bits may run on
    // for more words than its container has, and reads them here.
    static constexpr int stage_at = align_up(streams_at + C::warps * warp_stream_bytes, 128) + CHECKED_PAD;
    static constexpr int stage_bytes = 4 * LANES * Keys::chunk_letters;
    static constexpr int row_at = rows_kept ? kept_at : stage_at;
    static constexpr int longest =
        ringed ? 0 : most(Keys::most_rows(heads) * Keys::row_bytes, Values::most_rows(heads) * Values::row_bytes);
    static constexpr int shared_bytes =
        stage_at + most(most(C::warps * stage_bytes, longest), rows_kept ? 0 : row_bytes);

    static_assert(C::heads % C::substreams == 0, "sub-streams hold whole heads");
    static_assert(dim % 32 == 0 && dim <= 256, "head sizes are multiples of 32 up to 256");
    static_assert(!C::Value::mean, "value means are not supported");
    static_assert((Keys::ring_bytes > 0) == (Values::ring_bytes > 0), "rings for both or for neither");
    static_assert(C::window % LANES == 0, "windows are whole tiles");
    static_assert(query_at % 16 == 0 && kept_at % 16 == 0 && factor_at % 16 == 0 && weight_at % 16 == 0 &&
                      summary_at % 16 == 0 && state_at % 16 == 0 && mean_at % 16 == 0 && barrier_at % 8 == 0 &&
                      warp_stream_bytes % 16 == 0,
                  "vectors are aligned");
};

}  // namespace dquant
