// Dependent quantisation (specification, clause 6.7): its states, and what an encoder of such streams looks up.
//
// Positions stand in the order of the walk: letter by letter, field by field.
#pragma once

#include "dquant/groups.cuh"

namespace dquant {

// State `z` with an even or odd level index leads to `next(z, parity)`; the quantiser `turn(z)` is next.
template <int STATES> DQ_CONSTANT int trellis_next(int state, int parity) {
    constexpr int four[4][2] = {{0, 2}, {2, 0}, {1, 3}, {3, 1}};
    constexpr int eight[8][2] = {{0, 2}, {5, 7}, {1, 3}, {6, 4}, {2, 0}, {4, 6}, {3, 1}, {7, 5}};
    return STATES == 4 ? four[state % 4][parity] : eight[state][parity];
}
template <int STATES> DQ_CONSTANT int trellis_turn(int state) { return STATES == 4 ? state / 2 : state % 2; }

// The two ways into every state, from the lower state first: four bits each at place `2 * state + way`.
template <int STATES> struct Trellis {
    u64 before;  // the state a way comes from
    u64 branch;  // and by what: 2 * quantiser + parity

    DQ_CONSTANT Trellis() : before(0), branch(0) {
        for (int to = 0; to < STATES; ++to) {
            int way = 0;
            for (int state = 0; state < STATES; ++state) {
                for (int parity = 0; parity < 2; ++parity) {
                    if (trellis_next<STATES>(state, parity) != to) continue;
                    const int shift = 4 * (2 * to + way);
                    before |= (u64)state << shift;
                    branch |= (u64)(2 * trellis_turn<STATES>(state) + parity) << shift;
                    way += 1;
                }
            }
        }
    }

    static DQ_DEVICE u32 nibble(u64 table, u32 state, u32 way) {
        const u32 shift = 4 * (2 * state + way);
        return (STATES == 4 ? (u32)table >> shift : (u32)(table >> shift)) & 15;
    }
    DQ_DEVICE u32 came_from(u32 state, u32 way) const { return nibble(before, state, way); }
    DQ_DEVICE u32 came_by(u32 state, u32 way) const { return nibble(branch, state, way); }
};

// Shared with NumPy (dquantcodec/cuda/trellis_tables.py).
struct TrellisTables {
    const u32* channels;      // [n up to a multiple of 256]: place, or LEFT_OUT
    const float* inverses;    // as in GroupTables
    const float* costs;       // [rungs][entries]: `kappa * rate` of indices 0, 1, ... of both quantisers of every class
    const u32* codes;         // [code_count] as in GroupTables, table by table, state by state
    const Vector16* classes;  // [class_count]: first cost, most | dependent << 8, gain in 1/512, 0
    const Vector16* groups;   // [substreams][groups]: see `path_letter`
    const u8* kinds;          // [substreams][pitch]: the class of every value
    double step;
    i32 rungs;    // without the last one, the path of zeros
    i32 entries;  // of a rung, a multiple of 4
    i32 start;
    i32 words;
    i32 values;  // of a sub-stream
    i32 pitch;   // the same, up to a multiple of 32
    i32 groups_each;
    i32 code_count;
    i32 class_count;
    i32 window_first;  // rungs that a block copies to shared memory
    i32 window_rungs;
    i32 reserved;
};
static_assert(sizeof(TrellisTables) == 112, "shared with NumPy");

// What a block shares, and the bytes of each part.
struct TrellisRoom {
    int codes, window, classes, groups, kinds;

    DQ_DEVICE TrellisRoom(const TrellisTables& tables, int substreams) {
        codes = (4 * tables.code_count + 15) / 16 * 16;
        window = 4 * tables.window_rungs * tables.entries;
        classes = 16 * tables.class_count;
        groups = 16 * tables.groups_each * substreams;
        kinds = (tables.pitch * substreams + 15) / 16 * 16;
    }
    DQ_DEVICE int bytes() const { return codes + window + classes + groups + kinds; }
};

// What a warp has: positions, indices of a trial, two paths, costs of 32 values, the ways taken, words.
struct TrellisWarpRoom {
    i64 rows, kept, steps, ways, words;

    DQ_DEVICE TrellisWarpRoom(const TrellisTables& tables, int substreams) {
        rows = 4 * (i64)tables.pitch * substreams;
        kept = rows / 2;
        steps = 16 * LANES * substreams;
        ways = 4 * (i64)tables.pitch;
        words = (4 * (i64)tables.words + 15) / 16 * 16;
    }
    DQ_DEVICE i64 bytes() const { return 2 * rows + 2 * kept + steps + ways + words; }
};

template <bool SCRATCH> struct SharedTrellis {
    const u32* codes;
    const float* window;
    const Vector16* classes;
    const Vector16* groups;
    const u8* kinds;

    // The whole block takes part; `memory` has `TrellisRoom::bytes()`.
    DQ_DEVICE SharedTrellis(const TrellisTables& tables, int substreams, u8* memory, int thread, int threads) {
        if (SCRATCH) {
            codes = tables.codes;
            window = tables.costs;
            classes = tables.classes;
            groups = tables.groups;
            kinds = tables.kinds;
            return;
        }
        const TrellisRoom room(tables, substreams);
        codes = (const u32*)memory;
        copy_words(memory, tables.codes, 4 * tables.code_count, thread, threads);
        memory += room.codes;
        window = (const float*)memory;
        copy_words(memory, tables.costs + (i64)tables.window_first * tables.entries, room.window, thread, threads);
        memory += room.window;
        classes = (const Vector16*)memory;
        copy_words(memory, tables.classes, room.classes, thread, threads);
        memory += room.classes;
        groups = (const Vector16*)memory;
        copy_words(memory, tables.groups, room.groups, thread, threads);
        memory += room.groups;
        kinds = memory;
        copy_words(memory, tables.kinds, tables.pitch * substreams, thread, threads);
        block_barrier();
    }
};

}  // namespace dquant
