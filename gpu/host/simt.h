// CUDA's execution model on a CPU, just enough to test kernels without a GPU: the threads of a block are fibers, a
// warp's lanes run in turn from one collective to the next, and lanes that disagree about which collective comes next
// end the program.  Blocks run one after another.  Not for speed.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <csetjmp>
#include <functional>
#include <memory>
#include <vector>

#include <ucontext.h>

#define DQ_DEVICE inline
#define DQ_CONSTANT constexpr
#define DQ_SHARED(name) unsigned char* name = dquant_simt::block().shared
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__

namespace dquant_simt {

constexpr int WARP = 32;
enum Wait { RUN, WARP_STEP, BLOCK_STEP, DONE };

struct Fiber {
    ucontext_t context;
    jmp_buf resume;
    std::unique_ptr<char[]> stack;
    bool started = false;
    Wait wait = RUN;
    const char* step = nullptr;
    long steps = 0;
    int thread = 0;
};

struct Block {
    int threads = 0, index = 0, blocks = 0;
    unsigned char* shared = nullptr;
    std::vector<Fiber> fibers;
    Fiber* current = nullptr;
    // Order of lanes; results that depend on it lack a barrier.
    bool backwards = false;
    jmp_buf scheduler;
    std::function<void()> body;
    // Two sets in turn: a lane may begin its next collective before the last one has read this one.
    std::vector<uint64_t> exchange[2];
};

inline Block& block() {
    static Block value;
    return value;
}

inline void fiber_main() {
    Block& b = block();
    b.body();
    b.current->wait = DONE;
    _longjmp(b.scheduler, 1);
}

inline void run_fiber(Fiber& f) {
    Block& b = block();
    b.current = &f;
    if (_setjmp(b.scheduler)) return;
    if (f.started) _longjmp(f.resume, 1);
    f.started = true;
    setcontext(&f.context);
}

inline void wait_for(Wait wait, const char* step) {
    Fiber& f = *block().current;
    f.wait = wait;
    f.step = step;
    f.steps += 1;
    if (!_setjmp(f.resume)) _longjmp(block().scheduler, 1);
}

[[noreturn]] inline void disagree(const char* what, const Fiber& a, const Fiber& b) {
    std::fprintf(stderr, "threads %d and %d of a block disagree about a %s: %s and %s\n", a.thread, b.thread, what,
                 a.wait == DONE ? "end" : a.step, b.wait == DONE ? "end" : b.step);
    std::abort();
}

inline void run_block() {
    Block& b = block();
    for (;;) {
        bool blocked = true, done = true;
        for (int first = 0; first < b.threads; first += WARP) {
            Fiber* lanes = &b.fibers[first];
            while (lanes[0].wait == RUN || lanes[0].wait == WARP_STEP) {
                for (int lane = 0; lane < WARP; ++lane) run_fiber(lanes[b.backwards ? WARP - 1 - lane : lane]);
                for (int lane = 1; lane < WARP; ++lane)
                    if (lanes[lane].wait != lanes[0].wait || lanes[lane].steps != lanes[0].steps ||
                        (lanes[0].wait != DONE && lanes[lane].step != lanes[0].step))
                        disagree("collective", lanes[0], lanes[lane]);
            }
            blocked = blocked && lanes[0].wait == BLOCK_STEP;
            done = done && lanes[0].wait == DONE;
        }
        if (done) return;
        if (!blocked) disagree("block barrier", b.fibers[0], b.fibers[b.threads - WARP]);
        for (Fiber& f : b.fibers) f.wait = RUN;
    }
}

// Runs `body` for every thread of every block.  Shared memory is poisoned before each block and guarded behind it.
inline void launch(int blocks, int threads, size_t shared_bytes, const std::function<void()>& body) {
    Block& b = block();
    constexpr size_t guard = 4096;
    std::unique_ptr<unsigned char[]> memory(new unsigned char[shared_bytes + guard + 128]);
    unsigned char* aligned = memory.get() + (128 - (uintptr_t)memory.get() % 128) % 128;
    b.threads = threads;
    b.blocks = blocks;
    b.shared = aligned;
    b.body = body;
    for (auto& values : b.exchange) values.assign(threads, 0);
    b.fibers.resize(threads);
    for (int index = 0; index < blocks; ++index) {
        std::memset(aligned, 0xCD, shared_bytes + guard);
        b.index = index;
        for (int thread = 0; thread < threads; ++thread) {
            Fiber& f = b.fibers[thread];
            constexpr size_t stack_bytes = 256 * 1024;
            if (!f.stack) f.stack.reset(new char[stack_bytes]);
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = f.stack.get();
            f.context.uc_stack.ss_size = stack_bytes;
            f.context.uc_link = nullptr;
            makecontext(&f.context, fiber_main, 0);
            f.started = false;
            f.wait = RUN;
            f.steps = 0;
            f.thread = thread;
        }
        run_block();
        for (size_t i = 0; i < guard; ++i)
            if (aligned[shared_bytes + i] != 0xCD) {
                std::fprintf(stderr, "byte %zu behind %zu bytes of shared memory was written\n", i, shared_bytes);
                std::abort();
            }
    }
}

template <class T, class Source> inline T exchange(T value, Source source, const char* step) {
    static_assert(sizeof(T) <= 8, "shuffles move up to 8 bytes");
    Block& b = block();
    const int thread = b.current->thread, set = (int)(b.current->steps & 1);
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    b.exchange[set][thread] = bits;
    wait_for(WARP_STEP, step);
    const int lane = source(thread % WARP);
    bits = b.exchange[set][thread / WARP * WARP + lane];
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

struct Index {
    int (*get)();
    operator int() const { return get(); }
};
struct Indices {
    Index x;
};
inline int thread_index() { return block().current->thread; }
inline int block_index() { return block().index; }
inline int block_size() { return block().threads; }
inline int grid_size() { return block().blocks; }

}  // namespace dquant_simt

static const dquant_simt::Indices threadIdx{{dquant_simt::thread_index}}, blockIdx{{dquant_simt::block_index}},
    blockDim{{dquant_simt::block_size}}, gridDim{{dquant_simt::grid_size}};

namespace dquant {

struct alignas(16) Vector16 {
    u32 x, y, z, w;
};

inline u32 float_bits(float x) {
    u32 bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline float bits_float(u32 bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline u64 double_bits(double x) {
    u64 bits;
    std::memcpy(&bits, &x, 8);
    return bits;
}
inline double bits_double(u64 bits) {
    double x;
    std::memcpy(&x, &bits, 8);
    return x;
}
inline u32 funnel(u32 low, u32 high, u32 n) { return (u32)(((u64)high << 32 | low) >> (n & 31)); }
inline float half_to_float(u16 bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float x = std::ldexp((float)(exponent ? 1024 + fraction : fraction), (exponent ? exponent : 1) - 25);
    if (exponent == 31) x = fraction ? NAN : INFINITY;
    return bits & 0x8000 ? -x : x;
}
inline u16 float_to_half(float x) {
    const u16 sign = float_bits(x) >> 16 & 0x8000;
    const float magnitude = std::fabs(x);
    if (std::isnan(x)) return 0x7FFF;
    if (magnitude >= 65520.0f) return sign | 0x7C00;
    const int exponent = magnitude < 0x1p-14f ? -14 : std::ilogb(magnitude);
    // Steps of 2**(exponent - 10) in the units of FP16's bits; the default rounding is to nearest, ties to even.
    const int steps = (int)std::nearbyint(std::ldexp(magnitude, 10 - exponent));
    return sign | (u16)(steps + (exponent + 14) * 1024);
}

inline u32 larger_halves(u32 a, u32 b) {
    const u32 low = (a & 0xFFFF) > (b & 0xFFFF) ? a : b, high = a >> 16 > b >> 16 ? a : b;
    return (low & 0xFFFF) | (high & 0xFFFF0000);
}
inline u32 permute_bytes(u32 low, u32 high, u32 selector) {
    const u64 bytes = (u64)high << 32 | low;
    u32 result = 0;
    for (int i = 0; i < 4; ++i) result |= (u32)(bytes >> (selector >> (4 * i) & 7) * 8 & 255) << (8 * i);
    return result;
}
inline u32 floats_to_halves(float first, float second) {
    return float_to_half(first) | (u32)float_to_half(second) << 16;
}
inline u32 floats_to_bfloats(float first, float second) {
    u32 bits = 0;
    for (const float x : {second, first}) {
        const u32 b = float_bits(x);
        bits = bits << 16 | (std::isnan(x) ? 0x7FFF : (b + 0x7FFF + (b >> 16 & 1)) >> 16);
    }
    return bits;
}

inline void warp_barrier() { dquant_simt::wait_for(dquant_simt::WARP_STEP, "warp barrier"); }
inline void block_barrier() { dquant_simt::wait_for(dquant_simt::BLOCK_STEP, "block barrier"); }
template <class T> inline T from_lane(T value, int lane) {
    return dquant_simt::exchange(value, [=](int) { return lane & 31; }, "read of a lane");
}
template <class T> inline T from_lane_xor(T value, int mask) {
    return dquant_simt::exchange(value, [=](int lane) { return lane ^ mask; }, "exchange of lanes");
}
template <class T> inline T from_lane_below(T value, int distance) {
    return dquant_simt::exchange(
        value, [=](int lane) { return lane < distance ? lane : lane - distance; }, "read of a lane below");
}
inline u32 ballot(bool condition) {
    using namespace dquant_simt;
    Block& b = block();
    const int thread = b.current->thread, set = (int)(b.current->steps & 1);
    b.exchange[set][thread] = condition;
    wait_for(WARP_STEP, "ballot");
    u32 bits = 0;
    for (int lane = 0; lane < WARP; ++lane) bits |= (u32)b.exchange[set][thread / WARP * WARP + lane] << lane;
    return bits;
}
inline int last_bit(u32 bits) { return 31 - __builtin_clz(bits); }
inline i32 atomic_add(i32* at, i32 value) {
    const i32 before = *at;
    *at += value;
    return before;
}
inline void atomic_or(u32* at, u32 bits) { *at |= bits; }
inline void atomic_max(u32* at, u32 value) { *at = *at < value ? value : *at; }

inline double add_exact_product(double a, double b, double c) { return a * b + c; }
inline float add_exact_product(float a, float b, float c) { return a * b + c; }
inline float add_signed(float a, float sign, float b) { return a + sign * b; }
inline float exceeds(float a, float b) { return std::fmin(std::fmax(a - b, 0.0f), 1.0f); }
inline double square_root(double x) { return std::sqrt(x); }
inline float round_to_integer(float x) { return std::nearbyint(x); }

}  // namespace dquant
