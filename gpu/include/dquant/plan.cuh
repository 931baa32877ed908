// The compile-time side of a plan (dquantcodec/plan.py): one kind (keys or values) of one geometry.
//
// Kernels are templates over a struct `C` of constants:
//
//     struct C {
//         static constexpr int heads, head_dim;        // H, D
//         static constexpr int levels, letter;         // M, symbols of a letter
//         static constexpr int precision, words;       // p, words of one sub-stream's container
//         static constexpr int substreams;
//         static constexpr bool rans, mean, mid_tread, unbiased;
//         static constexpr double step;                // of a mid-tread grid, for encoders
//     };
#pragma once

#include "dquant/platform.cuh"

namespace dquant {

DQ_CONSTANT int bit_length(int x) {
    int bits = 0;
    for (; x > 0; x /= 2) bits += 1;
    return bits;
}

// Numbers that follow from a plan.
template <class C> struct Shape {
    static constexpr int values = C::heads * C::head_dim;
    // Letters of a head, and of a sub-stream.
    static constexpr int per_head = (C::head_dim + C::letter - 1) / C::letter;
    static constexpr int heads = C::heads / C::substreams;
    static constexpr int letters = heads * per_head;
    // Symbols of a sub-stream, and of a head's last letter.
    static constexpr int symbols = heads * C::head_dim;
    static constexpr int last_letter = C::head_dim - (per_head - 1) * C::letter;
    static constexpr int field_bits = bit_length(C::levels - 1);
    static constexpr int word_bytes = C::rans ? 2 : 4;
    // Bytes of one sub-stream's words of a tile.
    static constexpr int stream_bytes = C::words * LANES * word_bytes;
    static constexpr int affine = C::mid_tread ? 1 : 2;

    static_assert(C::heads % C::substreams == 0, "sub-streams hold whole heads");
    static_assert(field_bits * C::letter <= 12, "a letter's symbols fit in 12 bits");
};

}  // namespace dquant
