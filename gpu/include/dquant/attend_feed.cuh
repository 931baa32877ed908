// How words get into shared memory while a block decodes: no warp has room for two units.
#pragma once

#include "dquant/attend_ring.cuh"

namespace dquant {

// The words of a warp's tile in shared memory: one sub-stream of letters L, BYTES long.
//
// The next unit's words take the place of those that all lanes have read: first the rows that are free when a unit's
// last head begins, later the rest.
template <class L, int BYTES = L::stream_bytes> struct Feed {
    typedef typename StreamOf<L>::Type Stream;
    typedef SharedWords Words;

    u32 buffer, barrier;  // and a second barrier behind it, for the rest
    u32 first_bytes, first_phase, rest_phase;
    bool rest_pending;

    DQ_DEVICE void init(u32 buffer_, u32 barrier_, void*) {
        buffer = buffer_, barrier = barrier_;
        first_bytes = first_phase = rest_phase = 0;
        rest_pending = false;
    }
    // Rows that all lanes have read; the one at `at` may be read again.
    DQ_DEVICE u32 free_bytes(const Stream& s, int lane) const {
        const u32 read = warp_least(s.at - lane * L::word_bytes - buffer);
        return read > BYTES ? BYTES : read;
    }
    DQ_DEVICE void fetch_first(const u8* words, u32 bytes, int lane) {
        first_bytes = bytes;
        copy_stream(buffer, words, bytes, barrier, lane);
    }
    DQ_DEVICE void fetch_rest(const u8* words, int lane) {
        rest_pending = first_bytes < BYTES;
        if (rest_pending)
            copy_stream(buffer + first_bytes, words + first_bytes, BYTES - first_bytes, barrier + 8, lane);
    }
    DQ_DEVICE void wait_first() {
        wait_stream(barrier, first_phase);
        first_phase ^= 1;
    }
    DQ_DEVICE void wait_rest() {
        if (!rest_pending) return;
        wait_stream(barrier + 8, rest_phase);
        rest_phase ^= 1;
        rest_pending = false;
    }
    // Begins to read; waits for the rest only if ROWS of words are not there yet.
    template <int ROWS> DQ_DEVICE void start(Stream& s, int lane, int) {
        wait_first();
        if (first_bytes < ROWS * L::row_bytes) wait_rest();
        start_stream(s, buffer + lane * L::word_bytes, near_words());
    }
    DQ_DEVICE Words near_words() const { return Words(); }
};

// A ring of RING bytes, or 0: whole streams.
template <class L, int RING> struct FeedOf {
    typedef RingFeed<L, RING> Type;
};
template <class L> struct FeedOf<L, 0> {
    typedef Feed<L> Type;
};

}  // namespace dquant
