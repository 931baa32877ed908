// Drift of grouped streams (dquantcodec/group_drift.py): the same search as on the CPU, so it ends at the same letters.
#pragma once

#include "dquant/groups.cuh"

namespace dquant {

constexpr int RUNG_SAVES = 6;

// A sub-stream in search of its rungs.
template <bool SCRATCH> struct GroupRow {
    const GroupTables& tables;
    const SharedGroups<SCRATCH>& shared;
    const u32* positions;  // of the sub-stream
    const Vector16* letters;
    const Vector16* fields;
    int lane;

    DQ_DEVICE GroupRow(
        const GroupTables& tables_, const SharedGroups<SCRATCH>& shared_, const u32* positions_, int substream,
        int lane_)
        : tables(tables_), shared(shared_), positions(positions_ + substream * tables.slots * LANES), lane(lane_) {
        const int first = substream * tables.all_rounds() * ROUND_GROUPS + lane / GROUP_LETTERS;
        letters = shared.letters + first;
        fields = shared.fields + first;
    }

    DQ_DEVICE bool in_window(int rung) const {
        return !SCRATCH && (u32)(rung - tables.window_first) < (u32)tables.window_rungs;
    }
    DQ_DEVICE const u32* in_shared(int rung) const {
        return shared.window + (rung - tables.window_first) * tables.entries;
    }
    DQ_DEVICE const u32* in_global(int rung) const { return tables.ladder + (i64)rung * tables.entries; }
};

// Adds up the bits of a lane's letters at one rung.
template <bool SCRATCH> struct RungBits {
    const GroupRow<SCRATCH>& row;
    const u32* entries;
    i32 bits;

    template <int FIELDS> DQ_DEVICE void round(int round, const u32* places) {
        const Vector16 letter = row.letters[round * ROUND_GROUPS];
        bits += bits_at(row.shared.codes, letter_at<FIELDS>(row.tables, letter, entries, places, row.lane));
    }
};

// What the letters of a sub-stream cost at a rung.
template <bool SCRATCH> DQ_DEVICE i32 rung_bits(const GroupRow<SCRATCH>& row, int rung) {
    i32 bits;
    // Written twice, so that the compiler knows where each one looks.
    if (row.in_window(rung)) {
        RungBits<SCRATCH> sum = {row, row.in_shared(rung), 0};
        visit_rounds(row.tables, row.positions + row.lane, sum);
        bits = sum.bits;
    } else {
        RungBits<SCRATCH> sum = {row, row.in_global(rung), 0};
        visit_rounds(row.tables, row.positions + row.lane, sum);
        bits = sum.bits;
    }
    return warp_sum(bits);
}

// The rung that fits, the one below that does not, or -1, and what the former leaves.
struct FoundRungs {
    i32 fits, below, room;
};

template <bool SCRATCH> DQ_DEVICE FoundRungs search_rungs(const GroupRow<SCRATCH>& row, i32 budget) {
    // Invariant: rung `fits` fits, rung `below` does not.
    FoundRungs found = {row.tables.rungs - 1, -1, 0};
    bool known = false;
    int rung = row.tables.start, trials = 0;
    while (found.below + 1 < found.fits || !known) {
        const i32 surplus = rung_bits(row, rung) - budget;
        if (surplus <= 0) {
            found.fits = rung;
            known = true;
            found.room = -surplus;
        } else {
            found.below = rung;
        }
        // A guess by what a rung usually saves; after a few, halving.  A stream has less than 2**20 bits.
        trials += 1;
        const i32 step = (i32)(((u32)(surplus < 0 ? -surplus : surplus) << RUNG_SAVES) / (u32)budget);
        if (trials > 4) {
            rung = (found.below + found.fits) / 2;
        } else if (surplus > 0) {
            const i32 guess = found.below + 1 + step;
            rung = guess < found.fits - 1 ? guess : found.fits - 1;
        } else {
            const i32 guess = found.fits - 1 - step;
            rung = guess > found.below + 1 ? guess : found.below + 1;
        }
        if (found.below + 1 >= found.fits) rung = found.fits;
    }
    return found;
}

// Writes what every group costs at two rungs, by rank: the coarse one's bits, and the fine one's << 16.
template <bool SCRATCH> struct CompareRungs {
    const GroupRow<SCRATCH>& row;
    const u32 *fine, *coarse;
    u32* bits;

    template <int FIELDS> DQ_DEVICE void round(int round, const u32* places) {
        const Vector16 letter = row.letters[round * ROUND_GROUPS];
        const u32* codes = row.shared.codes;
        u32 both = (u32)bits_at(codes, letter_at<FIELDS>(row.tables, letter, fine, places, row.lane)) << 16;
        both += (u32)bits_at(codes, letter_at<FIELDS>(row.tables, letter, coarse, places, row.lane));
#pragma unroll
        for (int mask = 1; mask < GROUP_LETTERS; mask *= 2) both += from_lane_xor(both, mask);
        const u32 group = row.shared.groups[round * ROUND_GROUPS + row.lane / GROUP_LETTERS];
        if (row.lane % GROUP_LETTERS == 0 && group != 0xFFFFFFFF) bits[group & 0xFFFF] = both;
    }
};

// A group's word: the bit of its container at which it begins, and above whether it takes the finer rung.
constexpr u32 FINER = 0x80000000;

// Groups take the finer rung in the order of their ranks as long as they fit; `starts` receives their words by number.
DQ_DEVICE void fill_groups(const GroupTables& tables, const u32* bits, u32* starts, i32 room, int lane) {
    const int groups = tables.groups_each;
    warp_barrier();
    for (int first = 0; first < groups; first += LANES) {
        const int rank = first + lane, count = groups - first < LANES ? groups - first : LANES;
        const u32 both = rank < groups ? bits[rank] : 0;
        const i32 dearer = (i32)(both >> 16) - (i32)(both & 0xFFFF);
        u32 finer = 0;
#pragma unroll 4
        for (int i = 0; i < count; ++i) {
            const i32 needed = from_lane(dearer, i);
            if (needed <= room) {
                room -= needed;
                finer |= 1u << i;
            }
        }
        const bool own = finer >> lane & 1;
        if (rank < groups) starts[tables.numbers_of_ranks[rank]] = own ? both >> 16 | FINER : both & 0xFFFF;
    }
    warp_barrier();
    u32 before = 1;
    for (int first = 0; first < groups; first += LANES) {
        const int number = first + lane;
        const u32 word = number < groups ? starts[number] : 0, own = word & ~FINER;
        u32 end = own;
#pragma unroll
        for (int distance = 1; distance < LANES; distance *= 2) {
            const u32 lower = from_lane_below(end, distance);
            if (lane >= distance) end += lower;
        }
        if (number < groups) starts[number] = (before + end - own) | (word & FINER);
        before += from_lane(end, LANES - 1);
    }
    warp_barrier();
}

}  // namespace dquant
