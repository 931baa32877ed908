// Entry point: one kind of pages to rows.  DQ_WARPS warps a block, DQ_BLOCKS of them on a multiprocessor.
#include "dquant/decode.cuh"
#include "plan.cuh"

extern "C" __global__ void __launch_bounds__(DQ_WARPS * 32, DQ_BLOCKS) dquant_decode(dquant::DecodeParams params) {
    DQ_SHARED(shared);
    dquant::decode_block<Plan, Element>(params, shared, blockIdx.x, gridDim.x, threadIdx.x, blockDim.x);
}
