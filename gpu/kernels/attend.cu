// Decode attention over the pages of one plan, compiled for one geometry (see dquantcodec/cuda/attend.py).
#include "dquant/attend_finish.cuh"
#include "dquant/attend_pages.cuh"

namespace {

struct Constants {
    static constexpr int heads = DQ_HEADS, head_dim = DQ_HEAD_DIM, window = DQ_WINDOW, substreams = DQ_SUBSTREAMS;
    static constexpr int group = DQ_GROUP, positions = DQ_POSITIONS, warps = DQ_WARPS;
    static constexpr int element = DQ_ELEMENT, out_element = DQ_OUT_ELEMENT;
    static constexpr int finish_threads = DQ_FINISH_THREADS;
    static constexpr bool masked = DQ_MASKED, soft_cap = DQ_SOFT_CAP, grouped = false;
    typedef dquant::AttendParams Params;
    struct Key {
        static constexpr int levels = DQ_KEY_LEVELS, letter = DQ_KEY_LETTER, precision = DQ_KEY_PRECISION;
        static constexpr int words = DQ_KEY_WORDS, ring = DQ_KEY_RING;
        static constexpr bool rans = DQ_KEY_RANS, mean = DQ_KEY_MEAN, mid_tread = DQ_KEY_MID_TREAD;
    };
    struct Value {
        static constexpr int levels = DQ_VALUE_LEVELS, letter = DQ_VALUE_LETTER, precision = DQ_VALUE_PRECISION;
        static constexpr int words = DQ_VALUE_WORDS, ring = DQ_VALUE_RING;
        static constexpr bool rans = DQ_VALUE_RANS, mean = DQ_VALUE_MEAN, mid_tread = DQ_VALUE_MID_TREAD;
    };
};
typedef dquant::AttendShape<Constants> Shape;
static_assert(Shape::page_bytes == DQ_PAGE_BYTES, "the plan's pages");
static_assert(Shape::shared_bytes == DQ_SHARED_BYTES, "shared memory as the host counts it");

}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::threads, DQ_BLOCKS)
    attend_pages(const __grid_constant__ dquant::AttendParams p) {
    dquant::attend_pages<Constants>(p);
}

extern "C" __global__ void __launch_bounds__(DQ_FINISH_THREADS)
    attend_finish(const __grid_constant__ dquant::AttendParams p) {
    dquant::attend_finish<Constants>(p);
}
