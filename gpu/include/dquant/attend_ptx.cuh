// Instructions of the attention kernels that C++ has no name for.  A host compiler takes them from
// gpu/host/attend_simt.h, for tests without a GPU.
//
// Loads of the decoding loop are volatile: otherwise the compiler runs one stream after the other and exposes the
// latency of shared memory.
#pragma once

#include "dquant/attend.cuh"

#if defined(__CUDACC__)

#define DQ_COPY_ENGINE (__CUDA_ARCH__ >= 900 && !DQ_CHECKED)

namespace dquant {

DQ_DEVICE u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// Where dynamic shared memory begins, if that is known when compiling: then table addresses cost nothing.
#if __CUDA_ARCH__ >= 900
constexpr u32 SHARED_START = 1024;
constexpr bool SHARED_START_KNOWN = true;
template <int AT> DQ_DEVICE u32 load_entry(u32 offset) {
    u32 value;
    asm volatile("ld.volatile.shared.u16 %0, [%1 + %2];" : "=r"(value) : "r"(offset), "n"(AT + SHARED_START));
    return value;
}
template <int AT> DQ_DEVICE u32 load_wide_entry(u32 offset) {
    u32 value;
    asm volatile("ld.volatile.shared.u32 %0, [%1 + %2];" : "=r"(value) : "r"(offset), "n"(AT + SHARED_START));
    return value;
}
DQ_DEVICE u32 shared_start(const void*) { return SHARED_START; }
#else
constexpr bool SHARED_START_KNOWN = false;
extern __shared__ __align__(128) unsigned char shared_memory[];
template <int AT> DQ_DEVICE u32 load_entry(u32 offset) {
    u32 value;
    asm volatile("ld.volatile.shared.u16 %0, [%1];" : "=r"(value) : "r"(offset + AT + shared_address(shared_memory)));
    return value;
}
template <int AT> DQ_DEVICE u32 load_wide_entry(u32 offset) {
    u32 value;
    asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(value) : "r"(offset + AT + shared_address(shared_memory)));
    return value;
}
DQ_DEVICE u32 shared_start(const void* shared) { return shared_address(shared); }
#endif
DQ_DEVICE u32 load_half(u32 at) {
    u32 value;
    asm volatile("ld.volatile.shared.u16 %0, [%1];" : "=r"(value) : "r"(at) : "memory");
    return value;
}
DQ_DEVICE u32 load_word(u32 at) {
    u32 value;
    asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(value) : "r"(at) : "memory");
    return value;
}
DQ_DEVICE void store_shared4(u32 at, u32 x, u32 y, u32 z, u32 w) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
DQ_DEVICE void store_half(u32 at, u32 x) {
    asm volatile("{ .reg .b16 h; cvt.u16.u32 h, %1; st.shared.b16 [%0], h; }" ::"r"(at), "r"(x) : "memory");
}
DQ_DEVICE void store_shared2(u32 at, u32 x, u32 y) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(x), "r"(y) : "memory");
}

DQ_DEVICE void stop() { __trap(); }

// Four 8x8 matrices of 16-bit elements; `transposed` turns each.
DQ_DEVICE void load_matrices(u32 (&a)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(at)
                 : "memory");
}
DQ_DEVICE void load_transposed(u32 (&a)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(at)
                 : "memory");
}
DQ_DEVICE u32 transpose(u32 a) {
    u32 b;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(b) : "r"(a));
    return b;
}
// c += a b for a 16x16 and b 16x8, FP16 with FP32 sums.
DQ_DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 2**x and 1/x, within two units in the last place; denormal results are zero.
DQ_DEVICE float power2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DQ_DEVICE float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Barriers in shared memory: `count` arrivals, and bytes that are announced, end a phase.
DQ_DEVICE void barrier_init(u32 at, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
// Makes barriers known to the copy engine; by the thread that set them up.
DQ_DEVICE void barriers_ready() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
DQ_DEVICE void barrier_arrive(u32 at) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(at) : "memory");
}
// A warp's arrival; a barrier counts `warp_arrivals` of each.
constexpr int warp_arrivals = DQ_CHECKED ? LANES : 1;
DQ_DEVICE void warp_arrives(u32 at, int lane) {
    __syncwarp();
    if (DQ_CHECKED || lane == 0) barrier_arrive(at);
}
DQ_DEVICE void barrier_wait(u32 at, u32 phase) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @p bra DONE; bra AGAIN; DONE: }"
        :: "r"(at), "r"(phase) : "memory");
#else
    asm volatile(
        "{ .reg .pred p; AGAIN: mbarrier.test_wait.parity.shared.b64 p, [%0], %1; @p bra DONE; bra AGAIN; DONE: }"
        :: "r"(at), "r"(phase) : "memory");
#endif
}

// Asynchronous copy of 16 bytes a thread.
DQ_DEVICE void copy_async16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DQ_DEVICE void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Brings 32 bytes into the multiprocessor's own cache, on the way of a copy of four to `unused`: a load that nobody
// takes is left out by the assembler.
DQ_DEVICE void touch(u32 unused, const void* at) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(unused), "l"((u64)at & ~3ull) : "memory");
}
DQ_DEVICE void prefetch_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory"); }

// Of two launches in a row, the second may begin once all blocks of the first have said so (or ended), and waits for
// the first one's results where it needs them.  Without such a launch, and before Hopper, both do nothing.
DQ_DEVICE void let_next_grid_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DQ_DEVICE void wait_for_grid_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The compiler keeps `x` instead of computing it again where it is used.
DQ_DEVICE void keep_in_register(u32& x) { asm volatile("" : "+r"(x)); }
DQ_DEVICE int lowest_bit(u32 x) { return __ffs((int)x) - 1; }
DQ_DEVICE u32 warp_least(u32 x) { return __reduce_min_sync(0xFFFFFFFFu, x); }
DQ_DEVICE bool warp_all(bool condition) { return __all_sync(0xFFFFFFFFu, condition); }

// Copies `bytes` (a multiple of 16, not 0) to shared memory, on behalf of a whole warp; the barrier, which has one
// arrival, then ends a phase.  Before Hopper the warp's own asynchronous copies do it.
DQ_DEVICE void copy_stream(u32 to, const void* from, u32 bytes, u32 barrier, int lane) {
#if DQ_COPY_ENGINE
    if (lane == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
    }
#else
    for (u32 i = lane * 16; i < bytes; i += LANES * 16) copy_async16(to + i, (const u8*)from + i);
#endif
}
DQ_DEVICE void wait_stream(u32 barrier, u32 phase) {
#if DQ_COPY_ENGINE
    barrier_wait(barrier, phase);
#else
    copy_async_wait();
    __syncwarp();
#endif
}

// Entries of 16 bits side by side: by a product, because units for integers are busier than those for products.
DQ_DEVICE u32 two_letters(u32 first, u32 second) {
    u32 both;
    asm("mad.lo.u32 %0, %1, 65536, %2;" : "=r"(both) : "r"(second), "r"(first));
    return both;
}

// What `go_on` does to an rANS state below 65536, in one predicate.
DQ_DEVICE void take_word(u32& state, u32& at, u32 next) {
    asm("{ .reg .pred p; setp.lt.u32 p, %0, 65536; @p prmt.b32 %0, %2, %0, 0x5410; @p add.u32 %1, %1, 64; }"
        : "+r"(state), "+r"(at)
        : "r"(next));
}

// Likewise to the words of a prefix stream.
DQ_DEVICE void next_words(u32& low, u32& high, u32& at, u32 position, u32 before, u32 next) {
    u32 first, second;
    asm("{ .reg .pred p; .reg .u32 t; xor.b32 t, %3, %4; and.b32 t, t, 32; setp.ne.u32 p, t, 0;"
        " selp.b32 %0, %6, %5, p; selp.b32 %1, %7, %6, p; @p add.u32 %2, %2, 128; }"
        : "=&r"(first), "=&r"(second), "+r"(at)
        : "r"(position), "r"(before), "r"(low), "r"(high), "r"(next));
    low = first;
    high = second;
}

}  // namespace dquant

#else
#include "attend_simt.h"
#endif

namespace dquant {

DQ_DEVICE float low_half(u32 bits) { return half_to_float((u16)bits); }
DQ_DEVICE float high_half(u32 bits) { return half_to_float((u16)(bits >> 16)); }

}  // namespace dquant
