// The kernel that decodes grouped kinds as a library for tests without a GPU, by the same -D options as on a device.
#include "../kernels/decode_groups.cu"

extern "C" {

void set_backwards(int backwards) { dquant_simt::block().backwards = backwards; }

void run_dquant_decode_groups(const dquant::GroupDecodeParams* params, int blocks, int threads, long shared_bytes) {
    dquant_simt::launch(blocks, threads, shared_bytes, [=] { dquant_decode_groups(*params); });
}

long group_warp_bytes() { return dquant::GroupShape<GroupedPlan>::warp_bytes; }
}
