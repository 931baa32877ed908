// Grouped streams (specification, clause 6.6) as a warp codes them.
//
// Four groups of a sub-stream at a time are a *round*: lane `8 q + i` has letter i of the round's q-th group, and field
// f of all 32 letters is a row of 32 positions.  Rounds are ordered by how many fields their groups have at most, so
// that lanes never disagree.  Which groups those are, their classes and tables are data: all layers share one kernel.
#pragma once

#include "dquant/platform.cuh"

namespace dquant {

constexpr int MOST_FIELDS = 4;
constexpr int GROUP_LETTERS = 8;
constexpr int ROUND_GROUPS = LANES / GROUP_LETTERS;
// A position stands among those of its class's levels: bits 16 to 31 of a word say which level is near, see
// `nearest_level`.  A channel's word has the place of its position in the bits below PLACE and where its class's zero
// stands above.
constexpr int PLACE = 17;
constexpr u32 LEFT_OUT = (1u << PLACE) - 1;

// Everything an encoder looks up (dquantcodec/cuda/group_tables.py); shared with NumPy.
struct GroupTables {
    const u32* channels;      // [n up to a multiple of 256]: place | zero << PLACE, or LEFT_OUT
    const float* inverses;    // [n up to a multiple of 256]: one over the channel's reach, zero of those left out
    const u32* ladder;        // [rungs][entries]: see `nearest_level`
    const u32* codes;         // [code_count]: code | length << 16 of all tables, and an empty one at the end
    const u32* initial;       // [substreams][slots * 32]: positions of places without a channel
    const Vector16* letters;  // [substreams][rounds][4]: the letter of zeros | letters << 24, and strides of fields 1-3
    const Vector16* fields;   // [substreams][rounds][4]: zero << 16 | gain in 1/512, of every field
    const u32* groups;        // [rounds][4]: rank | number << 16, of a group of a sub-stream; all ones for none
    const u32* numbers_of_ranks;  // [groups]: the number of the group of a rank
    double step;
    i32 rungs;
    i32 entries;  // of a rung, a multiple of 4
    i32 start;    // rung
    i32 words;    // of a sub-stream's container
    i32 rounds[MOST_FIELDS];  // with groups of 4, 3, 2 and 1 fields at most
    i32 slots;                // rows of positions of a sub-stream
    i32 groups_each;          // groups of a sub-stream
    i32 code_count;
    i32 window_first;  // rungs that a block copies to shared memory
    i32 window_rungs;
    i32 reserved;

    DQ_DEVICE int all_rounds() const { return rounds[0] + rounds[1] + rounds[2] + rounds[3]; }
};
static_assert(sizeof(GroupTables) == 136, "shared with NumPy");

// What a block shares, and the bytes of each part.
struct GroupRoom {
    int codes, window, letters, fields, groups;

    DQ_DEVICE GroupRoom(const GroupTables& tables, int substreams) {
        const int rounds = tables.all_rounds();
        codes = (4 * tables.code_count + 15) / 16 * 16;
        window = 4 * tables.window_rungs * tables.entries;
        letters = fields = 16 * ROUND_GROUPS * rounds * substreams;
        groups = 4 * ROUND_GROUPS * rounds;
    }
    DQ_DEVICE int bytes() const { return codes + window + letters + fields + groups; }
};

// Bytes of a warp: positions, bits of groups at two rungs, where the groups begin, a container's words.
DQ_DEVICE i64 group_warp_bytes(const GroupTables& tables, int substreams) {
    return (4 * ((i64)substreams * tables.slots * LANES + 2 * tables.groups_each + tables.words) + 15) / 16 * 16;
}

DQ_DEVICE void copy_words(u8* to, const void* from, int bytes, int thread, int threads) {
    for (int i = thread; i < bytes / 4; i += threads) ((u32*)to)[i] = ((const u32*)from)[i];
}

// The tables as a warp sees them: copies in shared memory, or, with SCRATCH, the tables themselves.
template <bool SCRATCH> struct SharedGroups {
    const u32* codes;
    const u32* window;
    const Vector16* letters;
    const Vector16* fields;
    const u32* groups;

    // The whole block takes part; `memory` has `GroupRoom::bytes()`.
    DQ_DEVICE SharedGroups(const GroupTables& tables, int substreams, u8* memory, int thread, int threads) {
        if (SCRATCH) {
            codes = tables.codes;
            window = tables.ladder;
            letters = tables.letters;
            fields = tables.fields;
            groups = tables.groups;
            return;
        }
        const GroupRoom room(tables, substreams);
        codes = (const u32*)memory;
        copy_words(memory, tables.codes, 4 * tables.code_count, thread, threads);
        memory += room.codes;
        window = (const u32*)memory;
        copy_words(
            memory, tables.ladder + (i64)tables.window_first * tables.entries, room.window, thread, threads);
        memory += room.window;
        letters = (const Vector16*)memory;
        copy_words(memory, tables.letters, room.letters, thread, threads);
        memory += room.letters;
        fields = (const Vector16*)memory;
        copy_words(memory, tables.fields, room.fields, thread, threads);
        memory += room.fields;
        groups = (const u32*)memory;
        copy_words(memory, tables.groups, room.groups, thread, threads);
        block_barrier();
    }
};

// The level of a position at a rung, of which `entries` has a word for every whole step of every class: the level at
// the step's beginning << 16, plus as much as carries from where in the step the next level begins.
DQ_DEVICE i32 nearest_level(const u32* entries, u32 position) {
    return (i32)(entries[position >> 16] + (position & 0xFFFF)) >> 16;
}

// Where the code of a lane's letter of zeros stands; of a lane without a letter, the empty code.
DQ_DEVICE u32 zero_letter(const GroupTables& tables, const Vector16& letter, int lane) {
    return (u32)(lane % GROUP_LETTERS) < letter.x >> 24 ? letter.x & 0xFFFFFF : (u32)tables.code_count - 1;
}

DQ_DEVICE u32 stride_of(const Vector16& letter, int field) {
    return field == 1 ? letter.y : field == 2 ? letter.z : letter.w;
}

// Where the code of a lane's letter at a rung stands; `places` is the lane's first position of the round.
template <int FIELDS>
DQ_DEVICE u32 letter_at(
    const GroupTables& tables, const Vector16& letter, const u32* entries, const u32* places, int lane) {
    u32 at = zero_letter(tables, letter, lane) + nearest_level(entries, places[0]);
#pragma unroll
    for (int f = 1; f < FIELDS; ++f) at += stride_of(letter, f) * nearest_level(entries, places[f * LANES]);
    return at;
}

DQ_DEVICE i32 code_bits(u32 code) { return (i32)(code >> 16); }

// The length of a code alone is one byte.
DQ_DEVICE i32 bits_at(const u32* codes, u32 at) { return ((const u8*)(codes + at))[2]; }

// Rounds in order: `visit.template round<FIELDS>(round, places)` for each.
template <int FIELDS, class Visit>
DQ_DEVICE void visit_some(int count, int& round, const u32*& places, Visit& visit) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        visit.template round<FIELDS>(round, places);
        round += 1;
        places += FIELDS * LANES;
    }
}
template <class Visit> DQ_DEVICE void visit_rounds(const GroupTables& tables, const u32* places, Visit& visit) {
    int round = 0;
    visit_some<4>(tables.rounds[0], round, places, visit);
    visit_some<3>(tables.rounds[1], round, places, visit);
    visit_some<2>(tables.rounds[2], round, places, visit);
    visit_some<1>(tables.rounds[3], round, places, visit);
}

}  // namespace dquant
