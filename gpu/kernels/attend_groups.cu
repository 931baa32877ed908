// Decode attention over the pages of a plan with variance classes, compiled for the shapes of its groups (see
// dquantcodec/cuda/group_attend.py).  DQ_KEY_GROUP_LETTERS and its like are lists: a number for every group.
#include "dquant/attend_finish.cuh"
#include "dquant/attend_pages.cuh"

namespace {

struct Constants {
    static constexpr int heads = DQ_HEADS, head_dim = DQ_HEAD_DIM, window = DQ_WINDOW, substreams = DQ_SUBSTREAMS;
    static constexpr int group = DQ_GROUP, positions = DQ_POSITIONS, warps = DQ_WARPS;
    static constexpr int element = DQ_ELEMENT, out_element = DQ_OUT_ELEMENT;
    static constexpr int finish_threads = DQ_FINISH_THREADS;
    static constexpr bool masked = DQ_MASKED, soft_cap = DQ_SOFT_CAP, grouped = true;
    struct Key {
        static constexpr int words = DQ_KEY_WORDS, precision = DQ_KEY_PRECISION, table_bytes = DQ_KEY_TABLE_BYTES;
        static constexpr int states = DQ_KEY_STATES, groups = DQ_KEY_GROUPS;
        static constexpr int ring = DQ_KEY_RING;
        static constexpr bool rans = false, mid_tread = true, mean = DQ_KEY_MEAN;
        static constexpr bool rotated = DQ_KEY_ROTATED, low = DQ_KEY_LOW;
        static constexpr int first_field = DQ_KEY_FIRST_FIELD;
        DQ_CONSTANT static int letters(int group) {
            const int list[] = {DQ_KEY_GROUP_LETTERS};
            return list[group];
        }
        DQ_CONSTANT static int fields(int group) {
            const int list[] = {DQ_KEY_GROUP_FIELDS};
            return list[group];
        }
        DQ_CONSTANT static int width(int half) {
            const int list[] = {DQ_KEY_FIELD_WIDTHS};
            return list[half];
        }
    };
    struct Value {
        static constexpr int words = DQ_VALUE_WORDS, precision = DQ_VALUE_PRECISION;
        static constexpr int table_bytes = DQ_VALUE_TABLE_BYTES, states = DQ_VALUE_STATES, groups = DQ_VALUE_GROUPS;
        static constexpr int ring = DQ_VALUE_RING;
        static constexpr bool rans = false, mid_tread = true, mean = DQ_VALUE_MEAN;
        static constexpr bool rotated = DQ_VALUE_ROTATED, low = DQ_VALUE_LOW;
        static constexpr int first_field = DQ_VALUE_FIRST_FIELD;
        DQ_CONSTANT static int letters(int group) {
            const int list[] = {DQ_VALUE_GROUP_LETTERS};
            return list[group];
        }
        DQ_CONSTANT static int fields(int group) {
            const int list[] = {DQ_VALUE_GROUP_FIELDS};
            return list[group];
        }
        DQ_CONSTANT static int width(int half) {
            const int list[] = {DQ_VALUE_FIELD_WIDTHS};
            return list[half];
        }
    };
    typedef dquant::GroupAttendParams<Constants> Params;
};
typedef dquant::AttendShape<Constants> Shape;
static_assert(Shape::page_bytes == DQ_PAGE_BYTES, "the plan's pages");
static_assert(Shape::shared_bytes == DQ_SHARED_BYTES, "shared memory as the host counts it");
static_assert(sizeof(Constants::Params) == DQ_PARAM_BYTES, "shared with NumPy");

}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::threads, DQ_BLOCKS)
    attend_pages(const __grid_constant__ Constants::Params p) {
    dquant::attend_pages<Constants>(p);
}

extern "C" __global__ void __launch_bounds__(DQ_FINISH_THREADS)
    attend_finish(const __grid_constant__ Constants::Params p) {
    dquant::attend_finish<Constants>(p);
}
