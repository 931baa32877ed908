// Entry points: one kind of rows to pages.  DQ_WARPS warps a block of `dquant_encode`, DQ_BLOCKS of them on a
// multiprocessor; DQ_SCRATCH keeps a block's streams in global memory, for those too long for shared memory.
#include "dquant/encode.cuh"
#include "plan.cuh"

extern "C" __global__ void __launch_bounds__(256) dquant_encode_head(dquant::EncodeParams params) {
    DQ_SHARED(shared);
    dquant::encode_head<Plan, Element>(params, shared, blockIdx.x, threadIdx.x, blockDim.x);
}

extern "C" __global__ void __launch_bounds__(256) dquant_encode_means(dquant::EncodeParams params) {
    DQ_SHARED(shared);
    dquant::encode_means<Plan, Element>(params, shared, blockIdx.x, threadIdx.x, blockDim.x);
}

extern "C" __global__ void __launch_bounds__(DQ_WARPS * 32, DQ_BLOCKS) dquant_encode(dquant::EncodeParams params) {
    DQ_SHARED(shared);
    dquant::u8* memory = DQ_SCRATCH ? params.scratch + blockIdx.x * params.scratch_bytes : shared;
    dquant::encode_block<Plan, Element>(params, memory, blockIdx.x, gridDim.x, threadIdx.x, blockDim.x);
}
