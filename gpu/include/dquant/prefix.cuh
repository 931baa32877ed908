// The prefix coder (specification, clause 6.3): a lane reads or writes the container of one token.
#pragma once

#include "dquant/letters.cuh"

namespace dquant {

// Reads one token's container.  `rows` is where the token's word 0 stands; its next words follow 32 words apart.
// Beyond the container the last word is read again and again, which the status then reports.
template <class C> struct PrefixReader {
    static constexpr u32 mask = (1u << C::precision) - 1;

    const u32* rows;
    i32 next;           // the next word; `high` is the one before it
    u32 low, high, at;  // the next bit is bit `at` modulo 32 of `low`; above bit 7, `at` is anything

    DQ_DEVICE explicit PrefixReader(const u32* first) : rows(first), next(2), at(1) {
        low = rows[0];
        high = rows[LANES];
    }

    // The next 32 bits.
    DQ_DEVICE u32 peek() const { return funnel(low, high, at); }

    // Passes one or two codes, by their entries: together fewer than 32 bits.
    DQ_DEVICE void pass(u32 entries) {
        const u32 then = at + entries;
        if ((then ^ at) & 32) {
            low = high;
            high = rows[(next < C::words ? next : C::words - 1) * LANES];
            next += 1;
        }
        at = then;
    }

    // The entry of the next letter.
    DQ_DEVICE u32 letter(const LetterTables& tables) {
        const u32 entry = tables.entries[peek() & mask];
        pass(entry);
        return entry;
    }

    // The entries of two letters by one look at the words.
    DQ_DEVICE void two_letters(const LetterTables& tables, u32& first, u32& second) {
        static_assert(2 * C::precision < 32, "two codes fit in a word");
        const u32 bits = peek();
        first = tables.entries[bits & mask];
        second = tables.entries[funnel(bits, 0, first) & mask];
        pass(first + second);
    }

    // The container has been left if the next bit is in a word behind it, or has passed that word's first.
    DQ_DEVICE u8 status(u8 overrun, u8) const {
        const i32 word = next - 2;
        return word > C::words || (word == C::words && (at & 31) > 0) ? overrun : 0;
    }
};

// Writes one token's container by a warp: all lanes put 32 letters at a time, whose places follow from a sum over
// lanes. `words` holds a container in shared memory; `codes` uint32 [letters] is dquantcodec.prefix.PrefixTable.codes.
// Letters that drift found to fit do fit: their costs are exact.
template <class C> struct PrefixWriter {
    static_assert(!C::rans, "rANS has no places that a sum could tell");

    const u32* codes;
    u32* words;
    i32 at;

    DQ_DEVICE void begin(int lane) {
        at = 1;
        warp_barrier();
        for (int i = lane; i < C::words; i += LANES) words[i] = 0;
        warp_barrier();
    }

    DQ_DEVICE void put(int, int letter, bool exists, int lane) {
        const u32 code = exists ? codes[letter] : 0;
        const i32 length = (i32)(code >> 16);
        i32 end = length;
        for (int distance = 1; distance < LANES; distance *= 2) {
            const i32 before = from_lane_below(end, distance);
            if (lane >= distance) end += before;
        }
        const i32 start = at + end - length, word = start >> 5, shift = start & 31;
        const u32 bits = code & 0xFFFF;
        if (length > 0 && word < C::words) atomic_or(&words[word], bits << shift);
        if (shift + length > 32 && word + 1 < C::words) atomic_or(&words[word + 1], bits >> (32 - shift));
        at += from_lane(end, LANES - 1);
    }

    // To the page, `rows` as in the reader.
    DQ_DEVICE void finish(u32* rows, int lane) {
        warp_barrier();
        for (int i = lane; i < C::words; i += LANES) rows[i * LANES] = words[i];
        warp_barrier();
    }
};

}  // namespace dquant
