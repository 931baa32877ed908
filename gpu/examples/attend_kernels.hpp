// The kernels that the example compiles, as text: structs of constants for the templates of gpu/include, from -D options
// that AttendPlan gives (DQ_GROUPED and DQ_BLOCK_SHARED_BYTES are the example's own).
#pragma once

static const char* const KERNELS = R"(
#include "dquant/attend_finish.cuh"
#include "dquant/attend_pages.cuh"

#if DQ_GROUPED
template <class C> using ParamsOf = dquant::GroupAttendParams<C>;
// Lists have a number for every group, or for every half.
#define DQ_KIND(KIND)                                                                                              \
    static constexpr int words = DQ_##KIND##_WORDS, precision = DQ_##KIND##_PRECISION;                             \
    static constexpr int table_bytes = DQ_##KIND##_TABLE_BYTES, states = DQ_##KIND##_STATES;                       \
    static constexpr int groups = DQ_##KIND##_GROUPS, first_field = DQ_##KIND##_FIRST_FIELD;                       \
    static constexpr int ring = !RINGED ? 0 : states > 1 ? 16 : 32;                                                \
    static constexpr bool rans = false, mid_tread = true, mean = DQ_##KIND##_MEAN;                                 \
    static constexpr bool rotated = DQ_##KIND##_ROTATED, low = DQ_##KIND##_LOW;                                    \
    DQ_CONSTANT static int letters(int group) { const int n[] = {DQ_##KIND##_GROUP_LETTERS}; return n[group]; }    \
    DQ_CONSTANT static int fields(int group) { const int n[] = {DQ_##KIND##_GROUP_FIELDS}; return n[group]; }      \
    DQ_CONSTANT static int width(int half) { const int n[] = {DQ_##KIND##_FIELD_WIDTHS}; return n[half]; }
#else
template <class C> using ParamsOf = dquant::AttendParams;
#define DQ_KIND(KIND)                                                                                              \
    static constexpr int levels = DQ_##KIND##_LEVELS, letter = DQ_##KIND##_LETTER;                                 \
    static constexpr int precision = DQ_##KIND##_PRECISION, words = DQ_##KIND##_WORDS;                             \
    static constexpr bool rans = DQ_##KIND##_RANS, mean = DQ_##KIND##_MEAN, mid_tread = DQ_##KIND##_MID_TREAD;     \
    static constexpr int ring = !RINGED ? 0 : rans ? 64 : 32;
#endif

template <int WARPS, bool RINGED> struct Constants {
    static constexpr int heads = DQ_HEADS, head_dim = DQ_HEAD_DIM, window = DQ_WINDOW, substreams = DQ_SUBSTREAMS;
    static constexpr int group = DQ_GROUP, positions = 1, warps = WARPS, element = 0, out_element = 0;
    static constexpr int finish_threads = 256;
    static constexpr bool masked = false, soft_cap = false, grouped = DQ_GROUPED;
    struct Key { DQ_KIND(KEY) };
    struct Value { DQ_KIND(VALUE) };
    typedef ParamsOf<Constants> Params;
};

// Blocks as dquantcodec/cuda/attend_launch.py makes them: as many warps as fit into shared memory, but no more than 8 where
// sums need the registers of 16, with whole streams if there is room for them and with rings of words otherwise.
template <int WARPS = 16, bool RINGED = false> DQ_CONSTANT auto fitting() {
    typedef Constants<WARPS, RINGED> Tried;
    typedef dquant::AttendShape<Tried> S;
    if constexpr (S::shared_bytes <= DQ_BLOCK_SHARED_BYTES && (WARPS <= 8 || S::dim * S::rows <= 512))
        return Tried();
    else if constexpr (!RINGED)
        return fitting<WARPS, true>();
    else {
        static_assert(WARPS > 1, "no block of this plan fits into shared memory");
        return fitting<(WARPS > 12 ? WARPS - 1 : WARPS > 2 ? WARPS - 2 : 1), false>();
    }
}
typedef decltype(fitting()) C;
typedef dquant::AttendShape<C> Shape;
static_assert(Shape::page_bytes == DQ_PAGE_BYTES, "pages as the file has them");
#if DQ_GROUPED
static_assert(sizeof(C::Params) == DQ_PARAM_BYTES, "parameters as the host lays them out");
#endif

// What the host needs to know of it.
extern "C" __device__ int attend_numbers[6] = {
    Shape::threads, Shape::shared_bytes, Shape::groups, Shape::passes * Shape::rows / 4,
    Shape::partial_floats, Shape::state_floats
};

extern "C" __global__ void __launch_bounds__(Shape::threads, 1)
    attend_pages(const __grid_constant__ C::Params p) { dquant::attend_pages<C>(p); }
extern "C" __global__ void __launch_bounds__(256)
    attend_finish(const __grid_constant__ C::Params p) { dquant::attend_finish<C>(p); }
)";
