// Which block works on what: every block takes an equal run of a list that follows from the lengths alone.
//
// The list holds, for every sequence and every group (a sub-stream, and rows of queries where there are many), its
// units of tokens in order.  A block's run falls into segments, one for each (sequence, group) it touches; each segment
// leaves one partial result, in slot `block + (sequence * groups + group)`: from one segment to the next the sum grows.
#pragma once

#include "dquant/attend.cuh"

namespace dquant {

template <class C> struct Schedule {
    typedef AttendShape<C> S;

    DQ_DEVICE static int exact(const i32* lengths, int sequence) { return lengths ? lengths[sequence] : 0; }

    // The first token in pages that any query of the sequence may see.
    DQ_DEVICE static int first_token(const AttendParams& p, int sequence) {
        if (!C::masked || p.sliding_window == 0) return 0;
        const int total = exact(p.sink_lengths, sequence) + p.lengths[sequence] + exact(p.tail_lengths, sequence);
        return most(0, total - C::positions + 1 - p.sliding_window - exact(p.sink_lengths, sequence));
    }
    DQ_DEVICE static int first_unit(const AttendParams& p, int sequence) { return first_token(p, sequence) / S::unit; }
    DQ_DEVICE static int units(const AttendParams& p, int sequence) {
        return most(0, (p.lengths[sequence] + S::unit - 1) / S::unit - first_unit(p, sequence));
    }

    // Units of all sequences; by a whole warp.
    DQ_DEVICE static int total_units(const AttendParams& p, int lane) {
        int sum = 0;
        for (int b = lane; b < p.batch; b += LANES) sum += units(p, b);
        return warp_sum(sum);
    }
    // `(a * b - less) / c` of positive numbers: in 32 bits where they suffice, which takes a tenth of the time.
    DQ_DEVICE static int share(int a, int b, int less, int c) {
        if (a < 1 << 20 && b < 1 << 12) return (int)(((u32)a * (u32)b - (u32)less) / (u32)c);
        return (int)(((i64)a * b - less) / c);
    }
    DQ_DEVICE static int run_begin(int block, int blocks, int items) { return share(items, block, 0, blocks); }
    // The block whose run holds `item`.
    DQ_DEVICE static int block_of(int item, int blocks, int items) { return share(item + 1, blocks, 1, items); }
};

// A place in the list.
template <class C> struct Cursor {
    typedef Schedule<C> List;
    int sequence, group, unit, units;

    // To item `item`; by a whole warp.
    DQ_DEVICE void seek(const AttendParams& p, int item, int lane) {
        constexpr int groups = AttendShape<C>::groups;
        int before = 0;
#pragma unroll 1
        for (int base = 0; base < p.batch; base += LANES) {
            const int b = base + lane;
            const int mine = b < p.batch ? List::units(p, b) : 0;
            int sum = mine;
#pragma unroll
            for (int d = 1; d < LANES; d *= 2) {
                const int other = from_lane_below(sum, d);
                if (lane >= d) sum += other;
            }
            const u32 beyond = ballot((before + sum) * groups > item);
            if (beyond) {
                const int found = lowest_bit(beyond);
                sequence = base + found;
                units = from_lane(mine, found);
                const int rest = item - (before + from_lane(sum, found) - units) * groups;
                group = rest / units;
                unit = rest - group * units;
                return;
            }
            before += from_lane(sum, LANES - 1);
        }
    }
    // To the next item, which exists; true if it belongs to another segment.
    DQ_DEVICE bool advance(const AttendParams& p) {
        if (++unit < units) return false;
        unit = 0;
        if (++group == AttendShape<C>::groups) {
            group = 0;
            do {
                ++sequence;
                units = List::units(p, sequence);
            } while (units == 0);
        }
        return true;
    }
};

}  // namespace dquant
