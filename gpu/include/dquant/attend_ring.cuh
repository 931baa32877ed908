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
    u32 base;  // a multiple of the ring's size, if it is known when compiling where shared memory begins

    DQ_DEVICE u32 place(u32 at) const {
        return SHARED_START_KNOWN ? base | (at & (RING - 1)) : base + (at & (RING - 1));
    }
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

// What a warp knows of a ring, beside the offsets that its lanes have reached.  It stands in shared memory: registers
// would have to make room for it in every chunk.
struct alignas(16) RingState {
    const u8* words;      // of the stream that is read, and of the one behind it, less their offsets
    const u8* following;  // null: not known yet
    u32 end;              // of the stream that is read
    u32 asked;            // up to where copies have begun
    i32 tokens;           // lanes whose tokens exist; others hold nobody up
    u32 reserved;
};
static_assert(sizeof(RingState) == 32, "AttendShape has room for it");

// The streams of one kind that a warp reads, letters L, through a ring of RING bytes.
template <class L, int RING> struct RingFeed {
    typedef typename StreamOf<L>::Type Stream;
    typedef RingWords<RING> Words;
    // Rows that a chunk's letters and the look ahead may read, the one at `at` among them.
    static constexpr int rows = 1 + (L::rans ? L::chunk_letters : (L::chunk_letters * L::code_bits + 31) / 32);

    static_assert((RING & (RING - 1)) == 0 && RING % 128 == 0, "offsets modulo the size are masked");
    static_assert(rows * L::row_bytes <= RING, "a chunk's words fit");

    u32 base;
    u32 limit;  // from offsets up to it on, a chunk's words are there
    RingState* state;

    DQ_DEVICE void init(u32 base_, u32, RingState* state_) {
        base = base_;
        state = state_;
        *state = RingState{nullptr, nullptr, 0, 0, 0, 0};
        warp_barrier();
    }
    DQ_DEVICE Words near_words() const { return Words{base}; }
    DQ_DEVICE FarWords<L> far_words() const { return FarWords<L>{state->words, state->end}; }

    // Copies as far as there is room once all lanes have read up to `read`.
    DQ_DEVICE void refill(RingState& now, u32 read, int lane) {
        const u32 known = now.following ? now.end + L::stream_bytes : now.end;
        if (now.asked < read) now.asked = read;
        copy(now, read + RING < known ? read + RING : known, lane);
    }
    DQ_DEVICE void copy(RingState& now, u32 target, int lane) {
        u32 at = now.asked + lane * 16;
#pragma unroll 1
        while (at < target) {
            copy_async16(base + (at & (RING - 1)), (at < now.end ? now.words : now.following) + at);
            at += LANES * 16;
        }
        if (now.asked < target) now.asked = target;
    }
    // `ready`: up to where copies have ended.
    DQ_DEVICE void allow(const RingState& now, u32 ready, int lane) {
        limit = lane >= now.tokens || ready >= now.end ? ~0u : ready - rows * L::row_bytes + lane * L::word_bytes;
    }
    // Takes what has arrived, and makes use of what all lanes have read.
    DQ_DEVICE void turn(const Stream& s, int lane) {
        RingState now = *state;
        allow(now, now.asked, lane);
        const u32 read = warp_least(lane < now.tokens ? s.at - lane * L::word_bytes : ~0u);
        refill(now, read < now.end ? read : now.end, lane);
        warp_barrier();
        state->asked = now.asked;
    }
    DQ_DEVICE void arrived(int lane) { allow(*state, state->asked, lane); }

    // `bytes` of them, as far as there is room, at once where nothing is in the ring yet.
    DQ_DEVICE void fetch_first(const u8* words, u32 bytes, int lane) {
        RingState now = *state;
        now.following = words - now.end;
        warp_barrier();
        if (now.end == 0) copy(now, bytes < RING ? bytes : RING, lane);
        *state = now;
    }
    DQ_DEVICE void fetch_rest(const u8*, int) {}
    DQ_DEVICE void wait_rest() {}
    DQ_DEVICE u32 free_bytes(const Stream&, int) const { return 0; }

    template <int ROWS> DQ_DEVICE void start(Stream& s, int lane, int tokens) {
        warp_barrier();
        RingState now = *state;
        const u32 begin = now.end;
        now.words = now.following;
        now.following = nullptr;
        now.end += L::stream_bytes;
        now.tokens = tokens;
        warp_barrier();
        if (now.asked < begin + rows * L::row_bytes) refill(now, begin, lane);
        copy_async_wait();
        *state = now;
        warp_barrier();
        allow(now, now.asked, lane);
        start_stream(s, begin + lane * L::word_bytes, near_words());
    }
    // Whether this lane finds the words of its next chunk in the ring.
    DQ_DEVICE bool near(const Stream& s) const { return s.at <= limit; }
};

// LETTERS letters of one stream to their stage, wherever its words are.
template <class L, int LETTERS, class Pair, class Stream>
DQ_DEVICE void decode_far(Pair pair, Stream& s, const FarWords<L>& words, u32 stage) {
#pragma unroll 1
    for (int i = 0; i < LETTERS; ++i) {
        pair.look_up_first(s, words);
        store_half(L::letter_at(stage, i), pair.finish_one(s));
    }
}

}  // namespace dquant
