// Attention over grouped streams (specification, clauses 6.6 and 6.7): what differs from one table for all letters.
//
// A group is a chunk: eight letters of one table and one field layout, the same for all tokens of a layer, so all lanes
// of a warp take one path.  A field of a group is eight channels, half an operand of a matrix product: halves are
// numbered in stream order, and halves 2 t and 2 t + 1 make tile t, also where they come from two groups.  Shapes are
// known when compiling, and so is where fields stand; tables, channels and gains are data.  The struct of constants has
// beside what attend.cuh names
//
//     static constexpr bool grouped = true;
//     typedef GroupAttendParams<C> Params;
//     struct Key {
//         static constexpr int words, precision, table_bytes;  // of a container; the longest code; of all tables
//         static constexpr int ring;
//         static constexpr int states, groups;
//         static constexpr bool rans = false, mid_tread = true, mean;
//         static constexpr bool rotated;                       // beside a grouped kind: groups of one table
//         static constexpr int first_field;                    // lowest bit of an entry's fields: 6, or 5 or 4
//         static constexpr bool low;                           // the last of several fields stands lowest
//         static constexpr int letters(int group), fields(int group);
//         static constexpr int width(int half);                // bits of the half's fields, in all tables it meets
//     };
#pragma once

#include "dquant/attend_decode.cuh"

namespace dquant {

template <class Kind, int D> struct GroupLetters {
    static constexpr bool rans = false, rotated = Kind::rotated;
    static constexpr int first_field = Kind::first_field;
    static constexpr int chunk_letters = 8;
    static constexpr int chunks = Kind::groups;
    static constexpr int word_bytes = 4, row_bytes = LANES * word_bytes;
    static constexpr int chunk_rows = chunk_letters * Kind::precision / 32 + 4;
    static constexpr int stream_bytes = Kind::words * row_bytes;
    static constexpr int ring_bytes = Kind::ring * row_bytes;
    static constexpr int code_bits = Kind::precision;
    static constexpr int table_bytes = Kind::table_bytes;
    // Entries of a state's tables hold the state after them where the address of its tables has it.
    static constexpr int states = Kind::states;
    static constexpr u32 state_mask = states == 1 ? 0 : 0xFFFF & ~(0xFFFFu >> bit_length(states - 1));

    DQ_CONSTANT static int letters(int group) { return group < chunks ? Kind::letters(group) : 0; }
    DQ_CONSTANT static int fields(int group) { return group < chunks ? Kind::fields(group) : 0; }
    DQ_CONSTANT static int first_half(int group) { return group == 0 ? 0 : first_half(group - 1) + fields(group - 1); }
    DQ_CONSTANT static int letters_before(int group) {
        return group == 0 ? 0 : letters_before(group - 1) + letters(group - 1);
    }
    static constexpr int halves = first_half(chunks), tiles = (halves + 1) / 2;
    DQ_CONSTANT static int letters_of(int chunk) { return letters(chunk); }
    // Where letter `i` of a group goes, as `store_group` puts them.
    DQ_CONSTANT static u32 letter_at(u32 stage, int i) { return stage + 2 * i; }
    DQ_CONSTANT static int most_rows(int heads) {
        return heads * letters_before(chunks) * Kind::precision / 32 + 4;
    }
    // Whether a field is taken from letters as they are, or shifted by six bits.
    DQ_CONSTANT static bool shifted(int group, int field) {
        return !(Kind::low && fields(group) > 1 && field == fields(group) - 1);
    }
    // Levels count from their middle, which is part of every half's factors.
    static constexpr float middle = 1.0f;

    // Lowest bit of a field once it is shifted, and a mask of two letters' fields.
    DQ_CONSTANT static int place(int group, int field) {
        const int last = fields(group) - 1;
        int at = first_field;
        if (last == 0) {
            at = 16 - (states > 1 ? bit_length(states - 1) : 0) - width(group, 0);
        } else if (Kind::low) {
            if (field == last) return at;
            at += width(group, last);
        }
        for (int f = 0; f < field; ++f) at += width(group, f);
        return at - 6;
    }
    DQ_CONSTANT static int width(int group, int field) { return Kind::width(first_half(group) + field); }
    DQ_CONSTANT static u32 mask(int group, int field) {
        return (((1u << width(group, field)) - 1) << place(group, field)) * 0x10001u;
    }
};

// A mask of a table's indices and where it begins, in bytes.
struct alignas(8) TablePlace {
    u32 mask, begin;
};

// Shared with NumPy; parameters, because constant memory feeds all lanes at once and leaves shared memory alone.
template <class C> struct GroupAttendParams : AttendParams {
    typedef GroupLetters<typename C::Key, C::head_dim> K;
    typedef GroupLetters<typename C::Value, C::head_dim> V;

    const i32* heads;         // [H]: which head stands at a place of the coded order, of both kinds
    const i32* places;        // [H]: and the reverse
    const u32* key_order;     // [H][halves of keys][8]: channel | FP16 factor << 16; 0 where there is none
    const float* key_gains;   // [H, D]: 0 of channels left out
    const float* key_middles; // [H, D]
    const i16* value_order;   // [H][tiles of values][2][8]: channel, or -1
    TablePlace keys[C::heads * K::chunks];    // of a head's groups
    TablePlace values[C::heads * V::chunks];
    float middles[C::heads * V::halves];  // of a half, as sums of levels have it, over 64
    float units[C::heads * V::halves];    // of sums of levels
};

// Weights times scales, of which the largest lies in [1, 2), are multiplied by this to use the range of FP16, for what
// comes of them as well: products with levels, which lie below 2**11, come out times 2**-24, and 32 are summed.
constexpr float WEIGHT_UNIT = 16384.0f;
constexpr float OUTPUT_UNIT = 16777216.0f / WEIGHT_UNIT;

// What makes outputs of sums of levels, by half HALF of tile `tile` of value head `coded`.
template <class C> struct Output {
    typedef typename AttendShape<C>::Values V;

    // What a sum begins with for every unit of `shifted`.
    DQ_DEVICE static float middle(const typename C::Params& p, int coded, int tile, int half) {
        if constexpr (C::grouped)
            return 2 * tile + half < V::halves ? p.middles[coded * V::halves + 2 * tile + half] : 0.0f;
        else
            return V::weight(tile % V::letter) / 64.0f;
    }
    DQ_DEVICE static float unit(const typename C::Params& p, int coded, int tile, int half) {
        if constexpr (C::grouped)
            return p.units[coded * V::halves + 2 * tile + half];
        else
            return OUTPUT_UNIT / V::weight(tile % V::letter);
    }
};

// The container of one token, and the last entry, in which the state stands.
struct GroupStream : BitStream {
    u32 entry;
};
template <class Words> DQ_DEVICE void start_stream(GroupStream& s, u32 at, const Words& words) {
    start_stream((BitStream&)s, at, words);
    s.entry = 0;
}

template <class Kind, int D> struct StreamOf<GroupLetters<Kind, D>, false> {
    typedef GroupStream Type;
};

// The two steps of a pair of letters of one group.
template <class L, int TABLE> struct PairOfGroup {
    const u32 mask, table;
    u32 window, first, second;

    DQ_DEVICE explicit PairOfGroup(const TablePlace& place) : mask(place.mask), table(place.begin) {}

    // Only the low five bits of a shift count.
    DQ_DEVICE static u32 length(u32 entry) { return L::first_field == 4 ? entry & 15 : entry; }

    // Only six bits of a position count, of which the uppermost says when a word has ended.
    DQ_DEVICE static void pass(GroupStream& s, u32 lengths, u32 fields) {
        const u32 before = s.position;
        s.position += lengths;
        // A field in that bit takes its carry along.
        next_words(s.low, s.high, s.at, s.position, L::first_field == 5 ? before ^ fields : before, s.next);
    }

    DQ_DEVICE u32 look_up(u32 state) const {
        u32 offset = window & mask | table;
        if (L::states > 1) offset |= state & L::state_mask;
        return load_entry<TABLE>(offset);
    }
    template <class Words> DQ_DEVICE void look_up_first(GroupStream& s, const Words& words) {
        window = funnel(s.low, s.high, s.position);
        first = look_up(s.entry);
        s.next = words.word(s.at);
    }
    template <class Words> DQ_DEVICE void look_up_second(const GroupStream&, const Words&) {
        window = funnel(window, window, length(first));
        second = look_up(first);
    }
    DQ_DEVICE u32 finish_two(GroupStream& s) const {
        pass(s, length(first) + length(second), first ^ second);
        s.entry = second;
        return two_letters(first, second);
    }
    DQ_DEVICE u32 finish_one(GroupStream& s) const {
        pass(s, length(first), first);
        s.entry = first;
        return first;
    }
};

// Up to eight letters of one token: rows of 16 bytes.
template <int LETTERS> DQ_DEVICE void store_group(u32 stage, const u32 (&letters)[4]) {
    if (LETTERS > 4)
        store_shared4(stage, letters[0], letters[1], letters[2], letters[3]);
    else
        store_shared2(stage, letters[0], letters[1]);
}

// Group GROUP of a key head beside group GROUP of a value head, by their tables; KEYS and VALUES: of which kinds.
template <class C, int GROUP, bool KEYS, bool VALUES, class KeyWords, class ValueWords>
DQ_DEVICE void decode_groups(
    GroupStream& key, const KeyWords& key_words, GroupStream& value, const ValueWords& value_words,
    const TablePlace& key_table, const TablePlace& value_table, u32 stage
) {
    typedef AttendShape<C> S;
    constexpr int keys_count = KEYS ? S::Keys::letters(GROUP) : 0;
    constexpr int values_count = VALUES ? S::Values::letters(GROUP) : 0;
    PairOfGroup<typename S::Keys, S::key_table_at> k(key_table);
    PairOfGroup<typename S::Values, S::value_table_at> v(value_table);
    u32 keys[4] = {}, values[4] = {};
#pragma unroll
    for (int pair = 0; pair < (most(keys_count, values_count) + 1) / 2; ++pair) {
        const int i = 2 * pair;
        if (i < keys_count) k.look_up_first(key, key_words);
        if (i < values_count) v.look_up_first(value, value_words);
        if (i + 1 < keys_count) k.look_up_second(key, key_words);
        if (i + 1 < values_count) v.look_up_second(value, value_words);
        if (i < keys_count) keys[pair] = i + 1 < keys_count ? k.finish_two(key) : k.finish_one(key);
        if (i < values_count) values[pair] = i + 1 < values_count ? v.finish_two(value) : v.finish_one(value);
    }
    if (keys_count > 0) store_group<keys_count>(stage, keys);
    if (values_count > 0) store_group<values_count>(stage + LANES * 16, values);
}

// Half WHICH of tile TILE as far as group GROUP holds it, from its letters, as they are and shifted: registers 2 m and
// 2 m + 1 of letters are of tokens 16 m on and 16 m + 8 on.
template <class L, int GROUP, int TILE, int WHICH>
DQ_DEVICE void take_half(u32 (&half)[4], const u32 (&letters)[4], const u32 (&high)[4]) {
    constexpr int field = 2 * TILE + WHICH - L::first_half(GROUP);
    constexpr bool there = field >= 0 && field < L::fields(GROUP);
    constexpr int known = there ? field : 0;
    constexpr u32 mask = there ? L::mask(GROUP, known) : 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) half[i] = (L::shifted(GROUP, known) ? high[i] : letters[i]) & mask;
}

// All tiles that group GROUP has a part of: `product(tile, first half, second half)`.
template <class L, int GROUP, int TILE = L::first_half(GROUP) / 2, class Product>
DQ_DEVICE void multiply_tiles(const u32 (&letters)[4], const u32 (&high)[4], const Product& product) {
    if constexpr (2 * TILE < L::first_half(GROUP) + L::fields(GROUP)) {
        u32 first[4], second[4];
        take_half<L, GROUP, TILE, 0>(first, letters, high);
        take_half<L, GROUP, TILE, 1>(second, letters, high);
        product(TILE, first, second);
        multiply_tiles<L, GROUP, TILE + 1>(letters, high, product);
    }
}

}  // namespace dquant
