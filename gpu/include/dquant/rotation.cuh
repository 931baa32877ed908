// The rotation (specification, clause 6.5): signs and orthonormal Hadamard blocks over a head.
//
// Two forms of one order of operations.  `turn_column` works on a head that one lane holds: decoders give every lane a
// token.  `turn_row` works on a head that a warp holds in shared memory: encoders give every warp a stream.
#pragma once

#include "dquant/platform.cuh"

namespace dquant {

// The odd factor r of an admissible block order 2**a * r, or 0.
DQ_CONSTANT int odd_factor(int order) {
    int odd = order;
    while (odd % 2 == 0) odd /= 2;
    if (odd == 1) return 1;
    const bool known = odd == 3 || odd == 5 || odd == 7 || odd == 9 || odd == 11 || odd == 15;
    return known && order % 4 == 0 ? odd : 0;
}

// The largest admissible order that fits in `rest` values.
DQ_CONSTANT int block_order(int rest) {
    while (odd_factor(rest) == 0) rest -= 1;
    return rest;
}

// Order of the Paley factor of a block: 4r, or 1 for a power of two.
DQ_CONSTANT int paley_order(int order) { return odd_factor(order) == 1 ? 1 : 4 * odd_factor(order); }

// Signs of Paley's matrix of order 4r: bit k of `rows[i]` is set where entry (i, k) is -1.
template <int R> struct Paley {
    u64 rows[4 * R];

    DQ_CONSTANT Paley() : rows() {
        const int q = R == 3 ? 11 : R == 5 ? 19 : R == 7 ? 13 : R == 9 ? 17 : R == 11 ? 43 : 59;
        const bool first = R != 7 && R != 9;  // Paley's construction I; else II
        bool square[64] = {};
        for (int i = 1; i < q; ++i) square[i * i % q] = true;
        for (int i = 0; i < 4 * R; ++i) {
            for (int k = 0; k < 4 * R; ++k) {
                const int row = first ? i : i / 2, column = first ? k : k / 2;
                int core = 0;
                if (row != column) {
                    const int difference = (column - row + q) % q;
                    core = row == 0 ? 1 : column == 0 ? (first ? -1 : 1) : square[difference] ? 1 : -1;
                }
                int entry = core;
                if (first) {
                    if (row == column) entry = 1;
                } else if (row == column) {
                    entry = i % 2 == 0 && k % 2 == 0 ? 1 : -1;
                } else if (i % 2 == 1 && k % 2 == 1) {
                    entry = -core;
                }
                if (entry < 0) rows[i] |= 1ull << k;
            }
        }
    }

    DQ_CONSTANT bool negative(int i, int k, bool transposed) const {
        return transposed ? rows[k] >> i & 1 : rows[i] >> k & 1;
    }
};

// A head that a lane holds in registers: every index must be known when compiling, so loops over it are unrolled.
template <int D> struct RegisterColumn {
    static constexpr bool unrolled = true;
    float values[D];
    DQ_DEVICE float& operator[](int i) { return values[i]; }
};

// A head that a lane holds in shared memory, in a bank of its own.
struct SharedColumn {
    static constexpr bool unrolled = false;
    float* values;
    DQ_DEVICE float& operator[](int i) const { return values[i * LANES]; }
};

// The butterflies of a block in place: ORDER values from START on, for h = 1, 2, 4, ... below SPAN.
template <int START, int ORDER, int SPAN, class Column> DQ_DEVICE void column_butterflies(Column& y) {
    constexpr int whole = Column::unrolled ? ORDER : 1;
#pragma unroll
    for (int h = 1; h < SPAN; h *= 2) {
#pragma unroll whole
        for (int pair = 0; pair < ORDER / 2; ++pair) {
            const int i = START + pair / h * 2 * h + pair % h;
            const float a = y[i], b = y[i + h];
            y[i] = a + b;
            y[i + h] = a - b;
        }
    }
}

// The Paley factor of a block in place; sums run in ascending order from +0.
template <int START, int ORDER, class Column> DQ_DEVICE void column_paley(Column& y, bool transposed) {
    constexpr int size = paley_order(ORDER), run = ORDER / size;
    constexpr Paley<odd_factor(ORDER)> paley{};
    constexpr int whole = Column::unrolled ? run : 1;
#pragma unroll whole
    for (int c = 0; c < run; ++c) {
        float u[size];
#pragma unroll
        for (int i = 0; i < size; ++i) u[i] = y[START + i * run + c];
#pragma unroll
        for (int i = 0; i < size; ++i) {
            float total = 0.0f;
#pragma unroll
            for (int k = 0; k < size; ++k) total = paley.negative(i, k, transposed) ? total - u[k] : total + u[k];
            y[START + i * run + c] = total;
        }
    }
}

// A head of D values turned in place, without the factors; backward uses the transposed Paley matrices.
template <int D, bool BACKWARD, int START = 0, class Column> DQ_DEVICE void turn_column(Column& y) {
    if constexpr (START < D) {
        constexpr int order = block_order(D - START);
        column_butterflies<START, order, order / paley_order(order)>(y);
        if constexpr (paley_order(order) > 1) column_paley<START, order>(y, BACKWARD);
        turn_column<D, BACKWARD, START + order>(y);
    }
}

// Butterflies of a power of two of at least 32 values that a warp holds in registers, value `lane + 32 * i` in `y[i]`
// of a lane.
template <int PER> DQ_DEVICE void lane_butterflies(float (&y)[PER], int lane) {
#pragma unroll
    for (int mask = 1; mask < LANES; mask *= 2) {
        const float sign = lane & mask ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < PER; ++i) y[i] = add_signed(from_lane_xor(y[i], mask), sign, y[i]);
    }
#pragma unroll
    for (int h = 1; h < PER; h *= 2) {
#pragma unroll
        for (int pair = 0; pair < PER / 2; ++pair) {
            const int i = pair / h * 2 * h + pair % h;
            const float a = y[i], b = y[i + h];
            y[i] = a + b;
            y[i + h] = a - b;
        }
    }
}

// A head in shared memory turned forward in place by a warp, without the factors.  `scratch` holds 60 floats.
template <int D, int START = 0> DQ_DEVICE void turn_row(float* y, float* scratch, int lane) {
    if constexpr (START < D) {
        constexpr int order = block_order(D - START), size = paley_order(order), span = order / size;
        if constexpr (size == 1 && order >= LANES) {
            constexpr int per = order / LANES;
            float part[per];
#pragma unroll
            for (int i = 0; i < per; ++i) part[i] = y[START + lane + LANES * i];
            lane_butterflies<per>(part, lane);
#pragma unroll
            for (int i = 0; i < per; ++i) y[START + lane + LANES * i] = part[i];
        } else {
            for (int h = 1; h < span; h *= 2) {
                for (int pair = lane; pair < order / 2; pair += LANES) {
                    const int i = START + pair / h * 2 * h + pair % h;
                    const float a = y[i], b = y[i + h];
                    y[i] = a + b;
                    y[i + h] = a - b;
                }
                warp_barrier();
            }
            if constexpr (size > 1) {
                constexpr Paley<odd_factor(order)> paley{};
                for (int c = 0; c < span; ++c) {
                    float* column = y + START + c;
                    for (int i = lane; i < size; i += LANES) scratch[i] = column[i * span];
                    warp_barrier();
                    for (int i = lane; i < size; i += LANES) {
                        const u64 signs = paley.rows[i];
                        float total = 0.0f;
                        for (int k = 0; k < size; ++k) total = signs >> k & 1 ? total - scratch[k] : total + scratch[k];
                        column[i * span] = total;
                    }
                    warp_barrier();
                }
            }
        }
        warp_barrier();
        turn_row<D, START + order>(y, scratch, lane);
    }
}

}  // namespace dquant
