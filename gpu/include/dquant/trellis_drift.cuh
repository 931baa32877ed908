// Drift of dependent streams (dquantcodec/trellis_drift.py): the cheapest path through the trellis, at the rung whose
// letters fit.  The same FP32 operations in the same order as on the CPU, so the same paths.
//
// The costs of 32 values at a time are found by all lanes, a value each; then a lane for every state of every
// sub-stream takes the 32 steps, because sums depend on their order; lanes then follow parts of the path back side by
// side.
#pragma once

#include "dquant/trellis.cuh"

namespace dquant {

constexpr float NEVER = 1e30f;
constexpr int NEAR_BITS = 6;
constexpr int PATH_SAVES = 6;

// A value of a path: its index, eight bits with a sign, and the state before it from bit 8 on.
DQ_DEVICE i32 path_index(u32 value) { return (i8)(value & 0xFF); }
DQ_DEVICE u32 path_state(u32 value) { return value >> 8 & 0xFF; }

struct IndexCost {
    float cost;
    u32 index;
};

// The better of `index`, whose level is `level`, and the one two steps further.
DQ_DEVICE IndexCost best_pair(float magnitude, float level, u32 index, const float* costs) {
    const float near = magnitude - level, far = near - 2.0f;
    const float one = near * near + costs[index], other = far * far + costs[index + 2];
    return other < one ? IndexCost{other, index + 2} : IndexCost{one, index};
}

// The best even and the best odd index of a quantiser whose levels are `half` less than their indices, but for zero.
DQ_DEVICE void best_of_parities(
    float magnitude, float half, const float* costs, u32 most, IndexCost& best_even, IndexCost& best_odd) {
    const float shifted = magnitude + half;
    const u32 below = (u32)shifted, down = below < most ? below : most;
    const u32 even = down & ~1u, odd = ((down > 1 ? down : 1) - 1) | 1;
    best_odd = best_pair(shifted, (float)odd, odd, costs);
    const float away = shifted - 1.0f, least = away * away + costs[1];
    if (least < best_odd.cost) best_odd = {least, 1};
    if (even > 0) {
        best_even = best_pair(shifted, (float)even, even, costs);
    } else {
        const float far = shifted - 2.0f;
        best_even = {far * far + costs[2], 2};
    }
    const float zero = magnitude * magnitude + costs[0];
    if (zero <= best_even.cost) best_even = {zero, 0};
}

// What lies in a warp's memory.
template <class C> struct TrellisRows {
    static constexpr int substreams = C::substreams, states = C::states;
    static constexpr bool scratch = C::scratch;
    static_assert(substreams * states <= LANES, "a lane for every state of every sub-stream");

    const TrellisTables& tables;
    const SharedTrellis<scratch>& shared;
    u32* positions;  // [substreams][pitch]
    u32* indices;    // likewise: best indices of both parities of both quantisers, then the path
    u16* kept;       // [2][substreams][pitch]: the coarse path, the fine one
    float* steps;    // [32][substreams][4]
    u32* ways;       // [pitch]: a bit for every state of every sub-stream
    u32* words;
    int lane;

    DQ_DEVICE TrellisRows(const TrellisTables& tables_, const SharedTrellis<scratch>& shared_, u8* own, int lane_)
        : tables(tables_), shared(shared_), lane(lane_) {
        const TrellisWarpRoom room(tables, substreams);
        positions = (u32*)own;
        indices = (u32*)(own + room.rows);
        kept = (u16*)(own + 2 * room.rows);
        steps = (float*)(own + 2 * room.rows + 2 * room.kept);
        ways = (u32*)(own + 2 * room.rows + 2 * room.kept + room.steps);
        words = (u32*)(own + 2 * room.rows + 2 * room.kept + room.steps + room.ways);
    }

    DQ_DEVICE u16* path(int which, int substream) const {
        return kept + (which * substreams + substream) * tables.pitch;
    }
};

// Costs and indices of the lane's value among 32 of a sub-stream.  Returns whether it moves the state.
template <class C>
DQ_DEVICE bool value_costs(const TrellisRows<C>& rows, const float* costs, int substream, int value) {
    const TrellisTables& tables = rows.tables;
    if (value >= tables.values) return false;
    const int at = substream * tables.pitch + value;
    const Vector16 kind = rows.shared.classes[rows.shared.kinds[at]];
    const u32 most = kind.y & 0xFF;
    const bool dependent = kind.y >> 8;
    const i32 u = (i32)rows.positions[at];
    const float magnitude = (float)(u < 0 ? -u : u) * (1.0f / 65536.0f);
    IndexCost even, odd;
    best_of_parities(magnitude, 0.0f, costs + kind.x, most, even, odd);
    if (!dependent) {
        // No state moves, so the better one is taken at once.
        rows.indices[at] = (odd.cost < even.cost ? odd.index : even.index) << 16;
        return false;
    }
    IndexCost second_even, second_odd;
    best_of_parities(magnitude, 0.5f, costs + kind.x + most + 3, most, second_even, second_odd);
    // Indices of dependent classes are below 64.
    rows.indices[at] = even.index | odd.index << 8 | second_even.index << 16 | second_odd.index << 24 | 0x80000000;
    float* steps = rows.steps + 4 * ((value % LANES) * C::substreams + substream);
    steps[0] = even.cost;
    steps[1] = odd.cost;
    steps[2] = second_even.cost;
    steps[3] = second_odd.cost;
    return true;
}

// The best path of every active sub-stream at its rung, to `indices`.
template <class C>
DQ_DEVICE void best_paths(const TrellisRows<C>& rows, u32 active, const int (&rungs)[C::substreams]) {
    constexpr int S = C::substreams, states = C::states;
    constexpr Trellis<states> trellis{};
    const TrellisTables& tables = rows.tables;
    const int lane = rows.lane, state = lane % states, mine = lane / states < S ? lane / states : 0;
    const int lane_of = mine * states;
    const int before[2] = {lane_of + (int)trellis.came_from(state, 0), lane_of + (int)trellis.came_from(state, 1)};
    const int branch[2] = {(int)trellis.came_by(state, 0), (int)trellis.came_by(state, 1)};
    float cost = state == 0 ? 0.0f : NEVER;
    for (int first = 0; first < tables.values; first += LANES) {
        u32 moving = 0;
#pragma unroll
        for (int j = 0; j < S; ++j) {
            if (!(active >> j & 1)) continue;
            const int rung = rungs[j];
            bool moves;
            // Written twice, so that the compiler knows where each one looks.
            if (!C::scratch && (u32)(rung - tables.window_first) < (u32)tables.window_rungs)
                moves = value_costs<C>(
                    rows, rows.shared.window + (rung - tables.window_first) * tables.entries, j, first + lane);
            else
                moves = value_costs<C>(rows, tables.costs + (i64)rung * tables.entries, j, first + lane);
            const u32 all = ballot(moves);
            if (j == mine) moving = all;
        }
        warp_barrier();
        const float* steps = rows.steps + 4 * mine;
        u32* ways = rows.ways + first;
#pragma unroll 8
        for (int i = 0; i < LANES; ++i) {
            const float one = from_lane(cost, before[0]) + steps[4 * S * i + branch[0]];
            const float other = from_lane(cost, before[1]) + steps[4 * S * i + branch[1]];
            const bool way = other < one;
            if (moving >> i & 1) cost = way ? other : one;
            const u32 all = ballot(way);
            if (lane == i) ways[i] = all;
        }
        warp_barrier();
    }
    // Back: a lane follows a part of the path from every state it may end in; then all know where theirs does.
    const int part = (tables.values + LANES - 1) / LANES | 1;
    const int begin = lane * part < tables.values ? lane * part : tables.values;
    const int end = begin + part < tables.values ? begin + part : tables.values;
#pragma unroll
    for (int j = 0; j < S; ++j) {
        float least = from_lane(cost, j * states);
        u32 last = 0;
#pragma unroll
        for (int s = 1; s < states; ++s) {
            const float other = from_lane(cost, j * states + s);
            if (other < least) {
                least = other;
                last = s;
            }
        }
        if (!(active >> j & 1)) continue;
        u32* indices = rows.indices + j * tables.pitch;
        u32 from[states];
#pragma unroll
        for (int s = 0; s < states; ++s) from[s] = s;
        for (int i = end - 1; i >= begin; --i) {
            if (!(indices[i] >> 31)) continue;
            const u32 ways = rows.ways[i] >> (j * states);
#pragma unroll
            for (int s = 0; s < states; ++s)
                from[s] = trellis.came_from(from[s], ways >> from[s] & 1);
        }
        u32 map = 0;
#pragma unroll
        for (int s = 0; s < states; ++s) map |= from[s] << (4 * s);
        u32 at = last, mine_at = 0;
        for (int other = LANES - 1; other >= 0; --other) {
            if (lane == other) mine_at = at;
            at = from_lane(map, other) >> (4 * at) & 15;
        }
        u32 z = mine_at;
        for (int i = end - 1; i >= begin; --i) {
            const u32 word = indices[i];
            u32 index;
            if (word >> 31) {
                const u32 way = rows.ways[i] >> (j * states + z) & 1;
                index = word >> (8 * trellis.came_by(z, way)) & 0x7F;
                z = trellis.came_from(z, way);
            } else {
                index = word >> 16;
            }
            const bool negative = (i32)rows.positions[j * tables.pitch + i] < 0;
            indices[i] = ((negative ? 0u - index : index) & 0xFF) | z << 8;
        }
    }
    warp_barrier();
}

// A lane's letter of a sub-stream: `place` is its first value.
struct PathLetter {
    Vector16 group;  // code of the letter of zeros; first value, letters << 16, fields << 20; letters of a state,
                     // stride of field 1 << 16; strides of fields 2 and 3 << 16
    int place, fields;
};

// Groups in coded order, four at a time, eight lanes each.
template <class C> DQ_DEVICE PathLetter path_letter(const TrellisRows<C>& rows, int substream, int round) {
    const int number = round * ROUND_GROUPS + rows.lane / GROUP_LETTERS, within = rows.lane % GROUP_LETTERS;
    if (number >= rows.tables.groups_each) return {{0, 0, 0, 0}, 0, 0};
    const Vector16 group = rows.shared.groups[substream * rows.tables.groups_each + number];
    const int letters = (int)(group.y >> 16 & 15), fields = (int)(group.y >> 20);
    return {group, (int)(group.y & 0xFFFF) + within * fields, within < letters ? fields : 0};
}

// Where a letter's code stands on a path; of no letter, the empty code.
template <class C, class Value>
DQ_DEVICE u32 path_code(const TrellisRows<C>& rows, const PathLetter& letter, const Value* path) {
    if (letter.fields == 0) return (u32)rows.tables.code_count - 1;
    const Vector16& group = letter.group;
    const u32 first = path[letter.place];
    u32 at = group.x + path_state(first) * (group.z & 0xFFFF) + (u32)path_index(first);
    if (letter.fields > 1) at += (group.z >> 16) * (u32)path_index(path[letter.place + 1]);
    if (letter.fields > 2) at += (group.w & 0xFFFF) * (u32)path_index(path[letter.place + 2]);
    if (letter.fields > 3) at += (group.w >> 16) * (u32)path_index(path[letter.place + 3]);
    return at;
}

template <class C> DQ_DEVICE int letter_rounds(const TrellisRows<C>& rows) {
    return (rows.tables.groups_each + ROUND_GROUPS - 1) / ROUND_GROUPS;
}

// What the letters of a path cost.
template <class C, class Value> DQ_DEVICE i32 path_bits(const TrellisRows<C>& rows, int substream, const Value* path) {
    i32 bits = 0;
    for (int round = 0; round < letter_rounds(rows); ++round)
        bits += bits_at(rows.shared.codes, path_code(rows, path_letter(rows, substream, round), path));
    return warp_sum(bits);
}

// The search of a sub-stream: rung `fits` fits, rung `below` does not; their paths are kept, and by so much.
struct PathSearch {
    i32 below, fits, excess, room, rung, trials;
    bool known, done;

    DQ_DEVICE void tried(i32 surplus, i32 budget) {
        if (surplus <= 0) {
            fits = rung;
            known = true;
            room = -surplus;
        } else {
            below = rung;
            excess = surplus;
        }
        trials += 1;
        if (known && below >= 0) {
            if ((i64)(excess + room) << NEAR_BITS < budget) {
                done = true;
                return;
            }
            // Between the two in proportion; after a few trials, halving.
            rung = (below + fits) / 2;
            if (trials <= 4) rung = below + (i32)((i64)(fits - below) * excess / (excess + room));
            rung = rung > below + 1 ? rung : below + 1;
            rung = rung < fits - 1 ? rung : fits - 1;
        } else {
            // A guess by what a rung usually saves, twice as bold each time.
            const i64 magnitude = surplus < 0 ? -surplus : surplus;
            const i64 step = 1 + (magnitude << (PATH_SAVES + trials - 1)) / budget;
            if (surplus > 0)
                rung = below + step < fits - 1 ? (i32)(below + step) : fits - 1;
            else
                rung = fits - step > 0 ? (i32)(fits - step) : 0;
        }
        if (below + 1 >= fits) rung = fits;
        done = below + 1 >= fits && known;
    }
};

// The rungs of all sub-streams, their paths in `kept`.
template <class C> DQ_DEVICE void search_paths(const TrellisRows<C>& rows, PathSearch (&searches)[C::substreams]) {
    const TrellisTables& tables = rows.tables;
    const i32 budget = 32 * tables.words - 1;
#pragma unroll
    for (int j = 0; j < C::substreams; ++j) searches[j] = {-1, tables.rungs, 0, 0, tables.start, 0, false, false};
    for (;;) {
        u32 active = 0, zeros = 0;
        int rungs[C::substreams];
#pragma unroll
        for (int j = 0; j < C::substreams; ++j) {
            rungs[j] = searches[j].rung;
            if (searches[j].done) continue;
            if (searches[j].rung == tables.rungs)
                zeros |= 1u << j;
            else
                active |= 1u << j;
        }
        if ((active | zeros) == 0) return;
        if (active) best_paths(rows, active, rungs);
#pragma unroll
        for (int j = 0; j < C::substreams; ++j) {
            if (!((active | zeros) >> j & 1)) continue;
            u32* path = rows.indices + j * tables.pitch;
            if (zeros >> j & 1) {
                for (int i = rows.lane; i < tables.values; i += LANES) path[i] = 0;
                warp_barrier();
            }
            const i32 surplus = path_bits(rows, j, path) - budget;
            u16* kept = rows.path(surplus > 0, j);
            for (int i = rows.lane; i < tables.values; i += LANES) kept[i] = (u16)path[i];
            searches[j].tried(surplus, budget);
        }
        warp_barrier();
    }
}

// Which letters are taken from the fine path, a bit for every lane of a round, to `ways`, which is free after a search:
// parts between letters that both paths begin in one state, last first, as `room` allows.
template <class C>
DQ_DEVICE void take_fine(const TrellisRows<C>& rows, int substream, const u16* fine, const u16* coarse, i32 room) {
    // What the letters of later rounds before `end`, counted in lanes of rounds, cost more.
    i32 after = 0;
    int end = letter_rounds(rows) * LANES;
    for (int round = letter_rounds(rows) - 1; round >= 0; --round) {
        const PathLetter letter = path_letter(rows, substream, round);
        const u32* codes = rows.shared.codes;
        const u32 fine_code = path_code(rows, letter, fine), coarse_code = path_code(rows, letter, coarse);
        const i32 dearer = bits_at(codes, fine_code) - bits_at(codes, coarse_code);
        i32 before = dearer;
#pragma unroll
        for (int distance = 1; distance < LANES; distance *= 2) {
            const i32 lower = from_lane_below(before, distance);
            if (rows.lane >= distance) before += lower;
        }
        i32 upto = from_lane(before, LANES - 1);
        before -= dearer;
        const bool same = letter.fields > 0 && path_state(fine[letter.place]) == path_state(coarse[letter.place]);
        // Where letters begin in one state and are equal, there is nothing to take.
        u32 parts = ballot(same && fine_code != coarse_code);
        if (rows.lane == 0) rows.ways[round] = 0;
        warp_barrier();
        while (parts) {
            const int first = last_bit(parts);
            const i32 lower = from_lane(before, first), cost = after + upto - lower;
            if (cost <= room) {
                room -= cost;
                for (int other = round + rows.lane; other * LANES < end; other += LANES) {
                    const u32 from = other == round ? ~0u << first : ~0u;
                    const int rest = end - other * LANES;
                    rows.ways[other] |= rest < LANES ? from & ((1u << rest) - 1) : from;
                }
                warp_barrier();
            }
            after = 0;
            upto = lower;
            end = round * LANES + first;
            parts &= ~(1u << first);
        }
        after += upto;
    }
}

}  // namespace dquant
