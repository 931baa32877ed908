// Decoding two streams side by side, a token for each lane: the loop that attention spends its time in.
//
// What bounds it is shared memory: a look-up at 32 unrelated places takes about 3.5 passes, so two letters share one
// window, one position and one look whether a new word is needed.
#pragma once

#include "dquant/attend.cuh"
#include "dquant/attend_ptx.cuh"

namespace dquant {

// The container of one prefix-coded token.  `position` is the bit before the next code, so that the window, masked, is
// twice the table's index.  `low` and `high` are the word it lies in and the one behind; the one behind that stands at
// `at`, and is `next` once the next code is looked up: of two loads the one that is waited for goes first.
struct BitStream {
    u32 low, high, next, position, at;
};

// Where the words of a stream stand: all of them in shared memory, at the addresses that streams count in.
struct SharedWords {
    DQ_DEVICE u32 word(u32 at) const { return load_word(at); }
    DQ_DEVICE u32 half(u32 at) const { return load_half(at); }
};

template <class Words> DQ_DEVICE void start_stream(BitStream& s, u32 at, const Words& words) {
    s.low = words.word(at);
    s.high = words.word(at + 128);
    s.next = 0;
    s.position = 0;
    s.at = at + 256;
}

// Goes on to bit `position`, at most 31 further.  The next word is read again even if nothing moved: some lane nearly
// always needs a new one, and a row of words is one pass.
DQ_DEVICE void go_on(BitStream& s, u32 position) {
    next_words(s.low, s.high, s.at, position, s.position, s.next);
    s.position = position;
}

// The container of one rANS-coded token: its state, and the word that it asks for next, likewise at `at`.
struct RansStream {
    u32 state, next, at;
};

template <class Words> DQ_DEVICE void start_stream(RansStream& s, u32 at, const Words& words) {
    s.state = words.half(at) << 16 | words.half(at + 64);
    s.next = 0;
    s.at = at + 128;
}

// An entry holds the frequency f, `slot - c` and the fields, in 10, 10 and 12 bits.  Above the fields they read as
// 1024 f + slot - c, so a quotient that is 1024 too small makes one shift of the entry all that is to be added.
template <int PRECISION> DQ_DEVICE void go_on(RansStream& s, u32 entry) {
    s.state = (entry >> 22) * ((s.state >> PRECISION) - 1024) + (entry >> 12);
    take_word(s.state, s.at, s.next);
}

template <class L, bool RANS = L::rans> struct StreamOf {
    typedef BitStream Type;
};
template <class L> struct StreamOf<L, true> {
    typedef RansStream Type;
};

// The two steps of a pair of letters of one stream.
template <class L, int PRECISION, int TABLE, bool RANS = L::rans> struct PairOfLetters {
    static constexpr u32 index_mask = ((1u << PRECISION) - 1) << 1;
    u32 window, first, second;

    // Only the low five bits of a shift and six of a position count.  Fields of an entry that is not crowded lie above.
    DQ_DEVICE static u32 length(u32 entry) { return L::crowded ? entry & 15 : entry; }

    template <class Words> DQ_DEVICE void look_up_first(BitStream& s, const Words& words) {
        window = funnel(s.low, s.high, s.position);
        first = load_entry<TABLE>(window & index_mask);
        s.next = words.word(s.at);
    }
    template <class Words> DQ_DEVICE void look_up_second(BitStream&, const Words&) {
        window = funnel(window, window, length(first));
        second = load_entry<TABLE>(window & index_mask);
    }
    DQ_DEVICE u32 finish_two(BitStream& s) const {
        go_on(s, s.position + length(first) + length(second));
        return two_letters(first, second);
    }
    DQ_DEVICE u32 finish_one(BitStream& s) const {
        go_on(s, s.position + length(first));
        return first;
    }
};
template <class L, int PRECISION, int TABLE> struct PairOfLetters<L, PRECISION, TABLE, true> {
    static constexpr u32 index_mask = ((1u << PRECISION) - 1) << 2;
    u32 first, second;

    template <class Words> DQ_DEVICE static u32 look_up(RansStream& s, const Words& words) {
        const u32 entry = load_wide_entry<TABLE>(s.state << 2 & index_mask);
        s.next = words.half(s.at);
        return entry;
    }
    template <class Words> DQ_DEVICE void look_up_first(RansStream& s, const Words& words) {
        first = look_up(s, words);
    }
    template <class Words> DQ_DEVICE void look_up_second(RansStream& s, const Words& words) {
        go_on<PRECISION>(s, first);
        second = look_up(s, words);
    }
    DQ_DEVICE u32 finish_two(RansStream& s) const {
        go_on<PRECISION>(s, second);
        return permute_bytes(first, second, 0x5410);
    }
    DQ_DEVICE u32 finish_one(RansStream& s) const {
        go_on<PRECISION>(s, first);
        return first;
    }
};

// Letters of one token, eight at a time: rows of 32 bytes, their halves exchanged in every second four rows, so that
// neither stores nor matrix loads collide.
template <int LETTERS> DQ_DEVICE void store_letters(u32 stage, int group, const u32 (&letters)[4]) {
    const u32 at = stage ^ (group / 4 * 16);
    if (LETTERS - group / 4 * 8 > 4)
        store_shared4(at, letters[0], letters[1], letters[2], letters[3]);
    else
        store_shared2(at, letters[0], letters[1]);
}

// KEYS and VALUES letters (0 to 16) of the two streams to their stages.
template <class C, int KEYS, int VALUES, class KeyWords, class ValueWords>
DQ_DEVICE void decode_chunk(
    typename StreamOf<typename AttendShape<C>::Keys>::Type& key, const KeyWords& key_words,
    typename StreamOf<typename AttendShape<C>::Values>::Type& value, const ValueWords& value_words, u32 key_stage,
    u32 value_stage
) {
    typedef AttendShape<C> S;
    PairOfLetters<typename S::Keys, C::Key::precision, S::key_table_at> k;
    PairOfLetters<typename S::Values, C::Value::precision, S::value_table_at> v;
    u32 keys[4] = {}, values[4] = {};
#pragma unroll
    for (int pair = 0; pair < (most(KEYS, VALUES) + 1) / 2; ++pair) {
        const int i = 2 * pair;
        if (i < KEYS) k.look_up_first(key, key_words);
        if (i < VALUES) v.look_up_first(value, value_words);
        if (i + 1 < KEYS) k.look_up_second(key, key_words);
        if (i + 1 < VALUES) v.look_up_second(value, value_words);
        if (i < KEYS) keys[pair % 4] = i + 1 < KEYS ? k.finish_two(key) : k.finish_one(key);
        if (i < VALUES) values[pair % 4] = i + 1 < VALUES ? v.finish_two(value) : v.finish_one(value);
        if (i < KEYS && (pair % 4 == 3 || i + 2 >= KEYS)) store_letters<KEYS>(key_stage, pair, keys);
        if (i < VALUES && (pair % 4 == 3 || i + 2 >= VALUES)) store_letters<VALUES>(value_stage, pair, values);
    }
}

// Field `field` of 16-bit letters as FP16 subnormals.
template <class L> DQ_DEVICE void take_field(u32 (&levels)[4], const u32 (&letters)[4], int field) {
#pragma unroll
    for (int i = 0; i < 4; ++i) levels[i] = letters[i] >> L::shift(field) & L::mask(field);
}

}  // namespace dquant
