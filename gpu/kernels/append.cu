// Entry point: new tokens into tails, a block a sequence.
#include "dquant/append.cuh"

extern "C" __global__ void __launch_bounds__(256) dquant_append(dquant::AppendParams params) {
    dquant::append(params, blockIdx.x, threadIdx.x, blockDim.x);
}
