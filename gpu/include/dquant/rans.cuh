// The rANS coder (specification, clause 6.2): a lane reads or writes the container of one token.
#pragma once

#include "dquant/letters.cuh"

namespace dquant {

constexpr u32 RANS_LOWEST = 65536;

// Reads one token's container.  `rows` is where the token's word 0 stands; its next words follow 32 words apart.
// Beyond the container the last word is read again and again, which the status then reports.
template <class C> struct RansReader {
    static constexpr u32 mask = (1u << C::precision) - 1;

    const u16* rows;
    i32 next;
    u32 state;

    DQ_DEVICE explicit RansReader(const u16* first) : rows(first), next(2) {
        state = (u32)rows[0] << 16 | rows[LANES];
    }

    // The entry of the next letter.
    DQ_DEVICE u32 letter(const LetterTables& tables) {
        const u32 slot = state & mask;
        const u32 step = tables.advance[slot];
        const u32 entry = tables.entries[slot];
        state = (step >> 16) * (state >> C::precision) + (step & 0xFFFF);
        if (state < RANS_LOWEST) {
            state = state << 16 | rows[(next < C::words ? next : C::words - 1) * LANES];
            next += 1;
        }
        return entry;
    }

    DQ_DEVICE void two_letters(const LetterTables& tables, u32& first, u32& second) {
        first = letter(tables);
        second = letter(tables);
    }

    DQ_DEVICE u8 status(u8 overrun, u8 wrong_state) const {
        if (next > C::words) return overrun;
        return state != RANS_LOWEST ? wrong_state : 0;
    }
};

// Writes one token's container, `rows` as in the reader, from its letters `pitch` apart, and says whether it fits;
// otherwise nothing is written.  `steps` and `reciprocals` are `step` and `reciprocal` of dquantcodec.rans.RansTable.
//
// The coder runs backwards over the letters and emits a word a letter at most, so the words take the places of letters
// that are used up: the first one the last place.
template <class C>
DQ_DEVICE bool write_rans(const u32* steps, const u64* reciprocals, u16* letters, int pitch, u16* rows) {
    constexpr int count = Shape<C>::letters;
    constexpr u32 p = C::precision;
    u32 state = RANS_LOWEST;
    int place = count;
    for (int i = count - 1; i >= 0; --i) {
        const int letter = letters[i * pitch];
        const u32 step = steps[letter];
        const u32 f = step >> 16;
        if (state >> (32 - p) >= f) {
            place -= 1;
            letters[place * pitch] = (u16)state;
            state >>= 16;
        }
        const u32 quotient = (u32)(state * reciprocals[letter] >> (32 + p));
        state += quotient * ((1u << p) - f) + (step & 0xFFFF);
    }
    const int used = 2 + count - place;
    if (used > C::words) return false;
    rows[0] = (u16)(state >> 16);
    rows[LANES] = (u16)state;
    for (int i = place; i < count; ++i) rows[(2 + i - place) * LANES] = letters[i * pitch];
    for (int i = used; i < C::words; ++i) rows[i * LANES] = 0;
    return true;
}

}  // namespace dquant
