// Words of streams too long to be in shared memory as a whole: a ring for each kind, refilled while letters are decoded.
//
// Offsets count bytes over all streams that a warp reads one after another; what has offset `x` stands at `x` modulo
// the ring's size.  Rows that all lanes have read make room for as many ahead.  Lanes read at about the same pace, but
// nothing makes them: a chunk of letters whose words are not all in the ring is decoded from global memory instead,
// letter by letter.
#pragma once

#include "dquant/attend_decode.cuh"

namespace dquant {

template <int RING> struct RingWords {
    u32 base;  // a multiple of the ring's size

    DQ_DEVICE u32 place(u32 at) const { return base | (at & (RING - 1)); }
    DQ_DEVICE u32 word(u32 at) const { return load_word(place(at)); }
    DQ_DEVICE u32 half(u32 at) const { return load_half(place(at)); }
};

// The same stream where the page has it.  Behind its last row, which nothing depends on, an earlier one is read again.
template <class L> struct FarWords {
    const u8* words;  // of offset 0, if the stream began there
    u32 end;

    DQ_DEVICE const u8* place(u32 at) const {
        return words + (at < end ? at : end - L::row_bytes + at % L::row_bytes);
    }
    DQ_DEVICE u32 word(u32 at) const { return *(const u32*)place(at); }
    DQ_DEVICE u32 half(u32 at) const { return *(const u16*)place(at); }
};

// The streams of one kind that a warp reads, letters L, through a ring of RING bytes.
template <class L, int RING> struct RingFeed {
    typedef typename StreamOf<L>::Type Stream;
    typedef RingWords<RING> Words;
    // Rows that a chunk's letters and the look ahead may read, the one at `at` among them.
    static constexpr int rows = 1 + (L::rans ? L::chunk_letters : (L::chunk_letters * L::code_bits + 31) / 32);

    static_assert((RING & (RING - 1)) == 0 && RING % 128 == 0, "offsets modulo the size are masked");
    static_assert(rows * L::row_bytes <= RING, "a chunk's words fit");

    u32 base;
    u32 end;              // of the stream that is read
    u32 asked, ready;     // up to where copies have begun, and are known to have ended
    const u8* words;      // of the stream that is read, and of the one behind it, less their offsets
    const u8* following;  // null: not known yet
    bool counts;          // this lane's token exists: others hold nobody up

    DQ_DEVICE void init(u32 base_, u32) {
        base = base_;
        end = asked = ready = 0;
        words = following = nullptr;
    }
    DQ_DEVICE Words near_words() const { return Words{base}; }
    DQ_DEVICE FarWords<L> far_words() const { return FarWords<L>{words, end}; }

    // Copies as far as there is room once all lanes have read up to `read`.
    DQ_DEVICE void refill(u32 read, int lane) {
        const u32 known = following ? end + L::stream_bytes : end;
        const u32 target = read + RING < known ? read + RING : known;
        const u32 from = asked > read ? asked : read;
#pragma unroll 1
        for (u32 at = from + lane * 16; at < target; at += LANES * 16)
            copy_async16(base + (at & (RING - 1)), (at < end ? words : following) + at);
        if (asked < target) asked = target;
    }
    DQ_DEVICE void refill(const Stream& s, int lane) {
        const u32 read = warp_least(counts ? s.at - lane * L::word_bytes : ~0u);
        refill(read < end ? read : end, lane);
    }
    // Copies that have begun must have ended, for all lanes.
    DQ_DEVICE void arrived() { ready = asked; }

    DQ_DEVICE void fetch_first(const u8* words_, u32, int lane) {
        following = words_ - end;
        if (end == 0) refill(0u, lane);
    }
    DQ_DEVICE void fetch_rest(const u8*, int) {}
    DQ_DEVICE void wait_rest() {}
    DQ_DEVICE u32 free_bytes(const Stream&, int) const { return 0; }

    template <int ROWS> DQ_DEVICE void start(Stream& s, int lane, bool counts_) {
        const u32 begin = end;
        end += L::stream_bytes;
        words = following;
        following = nullptr;
        counts = counts_;
        if (ready < begin + rows * L::row_bytes) {
            refill(begin, lane);
            copy_async_wait();
            warp_barrier();
            arrived();
        }
        start_stream(s, begin + lane * L::word_bytes, near_words());
    }
    // Whether this lane finds the words of its next chunk in the ring.
    DQ_DEVICE bool near(const Stream& s) const {
        return !counts || ready >= end || (i32)(ready - s.at) >= rows * L::row_bytes;
    }
};

// LETTERS letters of one stream, wherever its words are; letter `i` to the place `place(i)`.
template <int LETTERS, class Pair, class Stream, class Words, class Place>
DQ_DEVICE void decode_far(Pair pair, Stream& s, const Words& words, const Place& place) {
#pragma unroll 1
    for (int i = 0; i < LETTERS; ++i) {
        pair.look_up_first(s);
        store_half(place(i), pair.finish_one(s, words));
    }
}

}  // namespace dquant
