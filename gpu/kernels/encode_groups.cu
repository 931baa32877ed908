// Entry points: one grouped kind of rows to pages, without a trellis (DQ_STATES is 1) or with.  DQ_WARPS warps a block
// of `dquant_encode_groups`, DQ_BLOCKS of them on a multiprocessor; DQ_SCRATCH keeps a block's streams and tables in
// global memory.
#include "dquant/group_encode.cuh"
#include "dquant/trellis_encode.cuh"
#include "element.cuh"

namespace {

struct GroupPlan {
    static constexpr int heads = DQ_HEADS, head_dim = DQ_HEAD_DIM, substreams = DQ_SUBSTREAMS, states = DQ_STATES;
    static constexpr bool mean = DQ_MEAN, unbiased = DQ_UNBIASED, scratch = DQ_SCRATCH;
};

template <int> struct StreamOf {
    typedef dquant::TrellisStream<GroupPlan> Stream;
};
template <> struct StreamOf<1> {
    typedef dquant::GroupStream<GroupPlan> Stream;
};
typedef StreamOf<DQ_STATES>::Stream Stream;

}  // namespace

extern "C" __global__ void __launch_bounds__(256) dquant_group_head(Stream::Params params) {
    DQ_SHARED(shared);
    dquant::encode_head<GroupPlan, Element>(params.rows, shared, blockIdx.x, threadIdx.x, blockDim.x);
}

extern "C" __global__ void __launch_bounds__(256) dquant_group_means(Stream::Params params) {
    const int warps = blockDim.x / dquant::LANES, warp = threadIdx.x / dquant::LANES;
    dquant::encode_channel_means<GroupPlan, Element>(
        params.rows, (dquant::i64)blockIdx.x * warps + warp, threadIdx.x % dquant::LANES);
}

extern "C" __global__ void __launch_bounds__(DQ_WARPS * 32, DQ_BLOCKS)
    dquant_encode_groups(const __grid_constant__ Stream::Params params) {
    DQ_SHARED(shared);
    dquant::u8* scratch = params.rows.scratch + blockIdx.x * params.rows.scratch_bytes;
    dquant::encode_grouped<GroupPlan, Element, Stream>(
        params, shared, scratch, blockIdx.x, gridDim.x, threadIdx.x, blockDim.x);
}
