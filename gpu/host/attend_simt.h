// The attention kernels' instructions on a CPU, for tests without a GPU (see simt.h): blocks of one warp, whose copies
// are there at once, so that no wait ever has to wait.
#pragma once

#include <algorithm>

#define __shared__ static

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

namespace dquant {

constexpr u32 SHARED_START = 1024;
constexpr bool SHARED_START_KNOWN = true;
inline unsigned char* shared_pointer(u32 at) { return dquant_simt::block().shared + (at - SHARED_START); }
inline u32 shared_address(const void* at) {
    return SHARED_START + (u32)((const unsigned char*)at - dquant_simt::block().shared);
}
inline u32 shared_start(const void*) { return SHARED_START; }

template <class T> inline T load_shared(u32 at) {
    T value;
    std::memcpy(&value, shared_pointer(at), sizeof value);
    return value;
}
template <int AT> inline u32 load_entry(u32 offset) { return load_shared<u16>(SHARED_START + AT + offset); }
template <int AT> inline u32 load_wide_entry(u32 offset) { return load_shared<u32>(SHARED_START + AT + offset); }
inline u32 load_half(u32 at) { return load_shared<u16>(at); }
inline u32 load_word(u32 at) { return load_shared<u32>(at); }
inline void store_half(u32 at, u32 x) {
    const u16 half = (u16)x;
    std::memcpy(shared_pointer(at), &half, sizeof half);
}
inline void store_shared2(u32 at, u32 x, u32 y) {
    const u32 values[2] = {x, y};
    std::memcpy(shared_pointer(at), values, sizeof values);
}
inline void store_shared4(u32 at, u32 x, u32 y, u32 z, u32 w) {
    store_shared2(at, x, y);
    store_shared2(at + 8, z, w);
}
inline void stop() { std::abort(); }

inline void load_matrices(u32 (&a)[4], u32 at) {
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
    for (int i = 0; i < 4; ++i) a[i] = load_shared<u32>(from_lane(at, 8 * i + r) + 4 * c);
}
inline void load_transposed(u32 (&a)[4], u32 at) {
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
    for (int i = 0; i < 4; ++i) {
        const u32 low = from_lane(at, 8 * i + 2 * c), high = from_lane(at, 8 * i + 2 * c + 1);
        a[i] = load_shared<u16>(low + 2 * r) | (u32)load_shared<u16>(high + 2 * r) << 16;
    }
}
inline u32 transpose(u32 a) {
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4, shift = r % 2 * 16;
    const u32 low = from_lane(a, 8 * c + r / 2), high = from_lane(a, 8 * c + 4 + r / 2);
    return (low >> shift & 0xFFFF) | (high >> shift & 0xFFFF) << 16;
}
inline float half_of(u32 pair, int i) { return half_to_float((u16)(pair >> (16 * i))); }
inline void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
    double sum[4] = {d[0], d[1], d[2], d[3]};
    for (int k = 0; k < 4; ++k) {
        u32 rows[4], columns[2][2];
        for (int i = 0; i < 4; ++i) rows[i] = from_lane(a[i], 4 * r + k);
        for (int n = 0; n < 2; ++n) {
            columns[n][0] = from_lane(b0, 4 * (2 * c + n) + k);
            columns[n][1] = from_lane(b1, 4 * (2 * c + n) + k);
        }
        for (int i = 0; i < 4; ++i)
            for (int half = 0; half < 2; ++half)
                for (int e = 0; e < 2; ++e)
                    sum[i] += (double)half_of(rows[i / 2 + 2 * half], e) * half_of(columns[i % 2][half], e);
    }
    for (int i = 0; i < 4; ++i) d[i] = (float)sum[i];
}

inline float power2(float x) { return std::exp2(x); }
inline float reciprocal(float x) { return 1.0f / x; }

// A phase ends with `count` arrivals; those that are still to come, then the count, then the phase.
inline void barrier_init(u32 at, u32 count) { store_shared2(at, count, count << 1); }
inline void barriers_ready() {}
inline void barrier_arrive(u32 at) {
    u32 left = load_shared<u32>(at) - 1, state = load_shared<u32>(at + 4);
    if (left == 0) left = state >> 1, state ^= 1;
    store_shared2(at, left, state);
}
constexpr int warp_arrivals = 1;
inline void warp_arrives(u32 at, int lane) {
    warp_barrier();
    if (lane == 0) barrier_arrive(at);
}
inline void barrier_wait(u32 at, u32 phase) {
    warp_barrier();  // what other lanes do before they wait is done
    if ((load_shared<u32>(at + 4) & 1) != phase) return;
    std::fprintf(stderr, "a barrier would wait for ever\n");
    std::abort();
}

inline void copy_async16(u32 to, const void* from) { std::memcpy(shared_pointer(to), from, 16); }
inline void copy_async_wait() {}
inline void touch(u32, const void*) {}
inline void prefetch_l2(const void*) {}
inline void let_next_grid_start() {}
inline void wait_for_grid_before() {}
inline void keep_in_register(u32&) {}
inline int lowest_bit(u32 x) { return __builtin_ctz(x); }
inline u32 warp_least(u32 x) {
    for (int mask = 16; mask > 0; mask /= 2) x = std::min(x, from_lane_xor(x, mask));
    return x;
}
inline bool warp_all(bool condition) { return ballot(condition) == ~0u; }
inline void copy_stream(u32 to, const void* from, u32 bytes, u32 barrier, int lane) {
    // All lanes have read what stood there before any of it is replaced.
    warp_barrier();
    if (lane == 0) {
        std::memcpy(shared_pointer(to), from, bytes);
        barrier_arrive(barrier);
    }
    warp_barrier();
}
inline void wait_stream(u32 barrier, u32 phase) { barrier_wait(barrier, phase); }

inline u32 two_letters(u32 first, u32 second) { return second << 16 | first; }
inline void take_word(u32& state, u32& at, u32 next) {
    if (state >= 65536) return;
    state = state << 16 | next;
    at += 64;
}
inline void next_words(u32& low, u32& high, u32& at, u32 position, u32 before, u32 next) {
    if (!((position ^ before) & 32)) return;
    low = high;
    high = next;
    at += 128;
}

}  // namespace dquant
