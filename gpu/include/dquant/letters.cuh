// Letters: which symbols they hold, and the tables that turn code words into them (specification, clause 6.1).
#pragma once

#include "dquant/plan.cuh"

namespace dquant {

// What a decoder looks letters up in, uint32 [2**p] each (dquantcodec/cuda/tables.py).
//
// entries: bits 0-7 the code's length (prefix; 0 for rans), then the letter's symbols, `symbol_bits` each: a byte, so
//          that symbols are moved by byte permutations, or six bits for letters of four
// advance: how rANS moves on, `f << 16 | slot - c`; null for prefix
struct LetterTables {
    const u32* entries;
    const u32* advance;
};
static_assert(sizeof(LetterTables) == 16, "shared with NumPy");

constexpr int SYMBOLS_AT = 8;

template <class C> DQ_CONSTANT int symbol_bits() { return C::letter == 4 ? 6 : 8; }

template <class C> DQ_CONSTANT int table_bytes() { return (C::rans ? 8 : 4) << C::precision; }

// Symbol k of a letter's entry.
template <class C> DQ_DEVICE u32 symbol(u32 entry, int k) {
    constexpr int bits = symbol_bits<C>();
    return entry >> (SYMBOLS_AT + k * bits) & ((1u << bits) - 1);
}

// Symbols of letter i of a head; the places of its last letter beyond the head are free.
template <class C> DQ_CONSTANT int letter_symbols(int i) {
    return i == Shape<C>::per_head - 1 ? Shape<C>::last_letter : C::letter;
}

}  // namespace dquant
