// The kernels of grouped streams as a library for tests without a GPU: one geometry, by the same -D options as on a
// device.
#include "../kernels/encode_groups.cu"

extern "C" {

void set_backwards(int backwards) { dquant_simt::block().backwards = backwards; }

void run_dquant_group_head(const Stream::Params* params, int blocks, int threads, long shared_bytes) {
    dquant_simt::launch(blocks, threads, shared_bytes, [=] { dquant_group_head(*params); });
}
void run_dquant_group_means(const Stream::Params* params, int blocks, int threads, long shared_bytes) {
    dquant_simt::launch(blocks, threads, shared_bytes, [=] { dquant_group_means(*params); });
}
void run_dquant_encode_groups(const Stream::Params* params, int blocks, int threads, long shared_bytes) {
    dquant_simt::launch(blocks, threads, shared_bytes, [=] { dquant_encode_groups(*params); });
}

long shared_bytes(const Stream::Params* params) {
    return Stream::Room(params->tables, GroupPlan::substreams).bytes();
}
long warp_bytes(const Stream::Params* params) { return Stream::warp_bytes(params->tables); }
}
