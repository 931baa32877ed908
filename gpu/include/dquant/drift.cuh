// Drift (dquantcodec/drift.py): a warp searches the ladder of rungs for the one whose letters fit the container.
//
// The same search as on the CPU, in integers, so it ends at the same rung.
#pragma once

#include "dquant/grid.cuh"
#include "dquant/letters.cuh"

namespace dquant {

constexpr int SLACK_BITS = 9;
constexpr i32 LEAST_SLACK = 2 * 1024;
constexpr int BIN_BITS = 11;
constexpr int ROOM_BITS = 5;
constexpr int PLACE_BITS = 12;

// The ladder and the letters' costs; shared with NumPy.
struct DriftTables {
    const i32* thresholds;  // [rungs][columns], rising within a rung; columns are a multiple of 4
    const i32* edges;       // the same, within the range of the histogram
    const i32* steps;       // [levels - 1]
    const u16* costs;       // [letters], 1/1024 bit: at most 15 bits
    const i32* complete;    // [levels**last_letter]: a head's last letter by its real symbols
    const u16* last_costs;  // [levels**last_letter]: and what it costs
    i32 rungs;
    i32 columns;
    i32 cheapest;  // the letter of least cost
    i32 reserved;
};
static_assert(sizeof(DriftTables) == 64, "shared with NumPy");

// Entries of the histogram: 32 bins a step, and a zero behind the last.
template <class C> DQ_CONSTANT int histogram_entries() { return ((C::levels - 1) << (FRACTION - BIN_BITS)) + 2; }

// Letters of a plan, and the bytes their costs take in shared memory.
template <class C> DQ_CONSTANT int letter_count() {
    int count = 1;
    for (int k = 0; k < C::letter; ++k) count *= C::levels;
    return count;
}
template <class C> DQ_CONSTANT int costs_bytes() { return (2 * letter_count<C>() + 15) / 16 * 16; }

// The tables with the costs' copy in `memory`, where looking them up is cheaper; a whole block takes part.
template <class C>
DQ_DEVICE DriftTables share_costs(const DriftTables& tables, u8* memory, int thread, int threads) {
    u16* costs = (u16*)memory;
    for (int i = thread; i < letter_count<C>(); i += threads) costs[i] = tables.costs[i];
    block_barrier();
    DriftTables shared = tables;
    shared.costs = costs;
    return shared;
}

// Four numbers of a row that begins at a multiple of 16 bytes.
DQ_DEVICE void load_four(const i32* row, int first, i32 (&numbers)[4]) {
    const Vector16 loaded = *(const Vector16*)(row + first);
    numbers[0] = (i32)loaded.x;
    numbers[1] = (i32)loaded.y;
    numbers[2] = (i32)loaded.z;
    numbers[3] = (i32)loaded.w;
}

// The thresholds of a rung, of which a value passes as many as its level.
template <class C> struct Rung {
    float thresholds[C::levels - 1];

    DQ_DEVICE void load(const DriftTables& tables, int rung) {
        const i32* row = tables.thresholds + (i64)rung * tables.columns;
#pragma unroll
        for (int first = 0; first < C::levels - 1; first += 4) {
            i32 numbers[4];
            load_four(row, first, numbers);
#pragma unroll
            for (int k = 0; k < 4; ++k)
                if (first + k < C::levels - 1) thresholds[first + k] = (float)numbers[k];
        }
    }
    DQ_DEVICE float level(float position) const {
        float passed = 0.0f;
#pragma unroll
        for (int k = 0; k < C::levels - 1; ++k) passed += exceeds(position, thresholds[k]);
        return passed;
    }
};

// Which symbols a stream takes: those of one rung; a mixture of two, place by place; the cheapest letter throughout.
template <class C> struct OneRung {
    Rung<C> rung;
    DQ_DEVICE float level(float position, int, int) const { return rung.level(position); }
};
template <class C> struct TwoRungs {
    Rung<C> finer, coarser;
    u32 below;
    DQ_DEVICE float level(float position, int place, int) const {
        return (u32)place * 2654435769u >> (32 - PLACE_BITS) < below ? finer.level(position) : coarser.level(position);
    }
};
template <class C> struct Cheapest {
    int letter;
    DQ_DEVICE float level(float, int, int k) const {
        int rest = letter;
        for (int i = 0; i < k; ++i) rest /= C::levels;
        return (float)(rest % C::levels);
    }
};

// A letter by its symbols, of a head's last letter only the real ones.
struct Letter {
    int number;
    bool last;
};

// Letter i of a sub-stream's positions by `rule`; `visit` is told every symbol.
template <class C, class Rule, class Visit>
DQ_DEVICE Letter letter_of(const float* positions, const Rule& rule, int i, const Visit& visit) {
    constexpr int real = Shape<C>::last_letter;
    const int head = i / Shape<C>::per_head, within = i - head * Shape<C>::per_head;
    const int first = head * C::head_dim + within * C::letter;
    const bool last = real < C::letter && within == Shape<C>::per_head - 1;
    float number = 0.0f, weight = 1.0f;
#pragma unroll
    for (int k = 0; k < C::letter; ++k) {
        if (k < real || !last) {
            const float position = positions[first + k];
            const float level = rule.level(position, first + k, k);
            visit(position, level);
            // At most 4096, so exact.
            number += weight * level;
        }
        weight *= C::levels;
    }
    return {(int)number, last};
}

struct Ignore {
    DQ_DEVICE void operator()(float, float) const {}
};
struct AddMoments {
    Moments& sums;
    DQ_DEVICE void operator()(float position, float level) const { sums.add(position, level); }
};

// What the letters of a sub-stream cost, in 1/1024 bit: below 2**30.
template <class C, class Rule>
DQ_DEVICE i32 row_cost(const DriftTables& tables, const float* positions, const Rule& rule, int lane) {
    i32 total = 0;
#pragma unroll 2
    for (int i = lane; i < Shape<C>::letters; i += LANES) {
        const Letter letter = letter_of<C>(positions, rule, i, Ignore());
        total += (letter.last ? tables.last_costs : tables.costs)[letter.number];
    }
    return warp_sum(total);
}

// above[b] = how many positions lie in bin b or higher, those beyond the levels in the outer bins.
template <class C> DQ_DEVICE void count_above(const float* positions, i32* above, int lane) {
    constexpr int entries = histogram_entries<C>(), last = entries - 2;
    warp_barrier();
    for (int b = lane; b < entries; b += LANES) above[b] = 0;
    warp_barrier();
    for (int i = lane; i < Shape<C>::symbols; i += LANES) {
        const int bin = (i32)positions[i] >> BIN_BITS;
        atomic_add(&above[bin < 0 ? 0 : bin > last ? last : bin], 1);
    }
    warp_barrier();
    // Every lane sums neighbouring bins, the first lane the highest; an odd number of them, so that no lanes share a
    // bank.
    constexpr int own = (entries + LANES - 1) / LANES | 1;
    const int top = last - lane * own;
    i32 mine = 0;
    for (int i = 0; i < own; ++i) mine += top - i >= 0 ? above[top - i] : 0;
    i32 higher = mine;
    for (int distance = 1; distance < LANES; distance *= 2) {
        const i32 before = from_lane_below(higher, distance);
        if (lane >= distance) higher += before;
    }
    higher -= mine;
    for (int i = 0; i < own; ++i) {
        if (top - i >= 0) {
            higher += above[top - i];
            above[top - i] = higher;
        }
    }
    warp_barrier();
}

// The stream's rate at a rung in 2**-21 bit, up to a constant.
template <class C> DQ_DEVICE i64 predicted_cost(const DriftTables& tables, int rung, const i32* above) {
    const i32* row = tables.edges + (i64)rung * tables.columns;
    i64 total = 0;
#pragma unroll 2
    for (int first = 0; first < C::levels - 1; first += 4) {
        i32 edges[4];
        load_four(row, first, edges);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (first + k < C::levels - 1) {
                const int b = edges[k] >> BIN_BITS, within = edges[k] & ((1 << BIN_BITS) - 1);
                // At most 2**27: a stream has at most 2**16 values.
                const i32 count = (above[b] << BIN_BITS) - (above[b] - above[b + 1]) * within;
                total += (i64)tables.steps[first + k] * count;
            }
        }
    }
    return total;
}

// The first rung in [low, high) that a binary search finds to cost at most `target`, or high - 1.  Lanes try the rungs
// of its next five steps at once; lane 2**d + k is the k-th rung that step d may come to.
template <class C>
DQ_DEVICE int predicted_rung(const DriftTables& tables, const i32* above, i64 target, int low, int high, int lane) {
    high -= 1;
    while (low < high) {
        int first = low, last = high;
        for (int bit = bit_length(lane) - 2; bit >= 0; --bit) {
            const int middle = (first + last) / 2;
            if (first < last) {
                if (lane >> bit & 1)
                    first = middle + 1;
                else
                    last = middle;
            }
        }
        const bool enough =
            lane > 0 && first < last && predicted_cost<C>(tables, (first + last) / 2, above) <= target;
        const u32 answers = ballot(enough);
        for (int node = 1; node < LANES && low < high;) {
            const int middle = (low + high) / 2;
            const bool fits = answers >> node & 1;
            node = 2 * node + !fits;
            if (fits)
                high = middle;
            else
                low = middle + 1;
        }
    }
    return low;
}

// The letters of a sub-stream by `rule`, to `sink`, and their moments.  The histogram is not needed any more when
// `sink.begin` is called; all lanes call `sink.put` with every 32 letters.
template <class C, class Rule, class Sink>
DQ_DEVICE void emit_letters(
    const DriftTables& tables, const float* positions, const Rule& rule, Sink& sink, Moments& sums, int lane) {
    sink.begin(lane);
    for (int first = 0; first < Shape<C>::letters; first += LANES) {
        const int i = first + lane;
        int number = 0;
        if (i < Shape<C>::letters) {
            const Letter letter = letter_of<C>(positions, rule, i, AddMoments{sums});
            number = letter.last ? tables.complete[letter.number] : letter.number;
        }
        sink.put(i, number, i < Shape<C>::letters, lane);
    }
}

// The letters of least squared error of a sub-stream whose cost is at most `budget`.  `above` holds the histogram.
template <class C, class Sink>
DQ_DEVICE void drift(
    const DriftTables& tables, const float* positions, i32 budget, i32* above, Sink& sink, Moments& sums, int lane) {
    const i32 part = budget >> SLACK_BITS, slack = part > LEAST_SLACK ? part : LEAST_SLACK;
    // Invariant: rung `fits` fits, rung `below` does not.  Rung `rungs` is the cheapest letter throughout.
    int below = -1, fits = tables.rungs, rung = 0, trials = 0;
    i32 cost_of_fits = 0;
    OneRung<C> one;
    while (below + 1 < fits) {
        one.rung.load(tables, rung);
        const i32 cost = row_cost<C>(tables, positions, one, lane), surplus = cost - budget;
        if (surplus <= 0) {
            fits = rung;
            cost_of_fits = cost;
            if (surplus >= -slack) break;
        } else {
            below = rung;
        }
        if (below + 1 < fits) {
            if (trials == 0) count_above<C>(positions, above, lane);
            trials += 1;
            if (trials < 8) {
                const i64 target = predicted_cost<C>(tables, rung, above) - ((i64)surplus << BIN_BITS);
                rung = predicted_rung<C>(tables, above, target, below + 1, fits, lane);
            } else {
                rung = (below + fits) / 2;
            }
        }
    }
    if (fits == tables.rungs) {
        const Cheapest<C> rule = {tables.cheapest};
        emit_letters<C>(tables, positions, rule, sink, sums, lane);
        return;
    }
    if (C::mid_tread && below >= 0 && budget - cost_of_fits > budget >> ROOM_BITS) {
        TwoRungs<C> two;
        two.finer.load(tables, below);
        two.coarser.load(tables, fits);
        // Invariant: the first `enough` of 4096 parts of the order fit, `beyond` do not.
        u32 enough = 0, beyond = 1 << PLACE_BITS;
        while (beyond - enough > 1) {
            two.below = (enough + beyond) / 2;
            if (row_cost<C>(tables, positions, two, lane) <= budget)
                enough = two.below;
            else
                beyond = two.below;
        }
        two.below = enough;
        emit_letters<C>(tables, positions, two, sink, sums, lane);
        return;
    }
    one.rung.load(tables, fits);
    emit_letters<C>(tables, positions, one, sink, sums, lane);
}

}  // namespace dquant
