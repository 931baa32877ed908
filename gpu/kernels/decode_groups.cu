// Entry point: one grouped kind of pages to rows.  DQ_WARPS warps a block, DQ_BLOCKS of them on a multiprocessor.
#include "dquant/group_decode.cuh"
#include "element.cuh"

namespace {

// What the layers of a geometry have in common; their groups and tables are data.
struct GroupedPlan {
    static constexpr int heads = DQ_HEADS, head_dim = DQ_HEAD_DIM;
    static constexpr int levels = 255, letter = 1;
    static constexpr int precision = 14, words = DQ_WORDS;
    static constexpr int substreams = DQ_SUBSTREAMS, states = DQ_STATES;
    static constexpr bool rans = false, mean = DQ_MEAN, mid_tread = true;
    static constexpr bool shared_lookups = DQ_SHARED_LOOKUPS;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(DQ_WARPS * 32, DQ_BLOCKS)
    dquant_decode_groups(const __grid_constant__ dquant::GroupDecodeParams params) {
    DQ_SHARED(shared);
    dquant::decode_grouped_block<GroupedPlan, Element>(
        params, shared, blockIdx.x, gridDim.x, threadIdx.x, blockDim.x);
}
