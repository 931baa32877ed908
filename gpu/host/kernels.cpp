// The kernels as a library for tests without a GPU: one plan, by the same -D options as on a device.
#include "../kernels/append.cu"
#include "../kernels/decode.cu"
#include "../kernels/encode.cu"

#define DQ_RUN(kernel, Params)                                                                  \
    void run_##kernel(const dquant::Params* params, int blocks, int threads, long shared_bytes) { \
        dquant_simt::launch(blocks, threads, shared_bytes, [=] { kernel(*params); });            \
    }

extern "C" {

void set_backwards(int backwards) { dquant_simt::block().backwards = backwards; }

DQ_RUN(dquant_append, AppendParams)
DQ_RUN(dquant_decode, DecodeParams)
DQ_RUN(dquant_encode_head, EncodeParams)
DQ_RUN(dquant_encode_means, EncodeParams)
DQ_RUN(dquant_encode, EncodeParams)

long decode_shared_bytes(int warps) {
    return dquant::DecodeShape<Plan>::tables_bytes + (long)warps * dquant::DecodeShape<Plan>::warp_bytes;
}
long means_shared_bytes(int warps) { return dquant::means_shared_bytes<Plan>(warps); }
long encode_bytes(int warps) { return dquant::encode_bytes<Plan>(warps); }

// Numbers one by one, for comparison with NumPy's.
dquant::u16 double_to_half(double x) { return dquant::double_to_half(x); }
dquant::u16 round_up_half(float x) { return dquant::round_up_half(x); }
dquant::u16 round_down_half(float x) { return dquant::round_down_half(x); }
dquant::u16 float_to_half(float x) { return dquant::float_to_half(x); }
float half_to_float(dquant::u16 bits) { return dquant::half_to_float(bits); }
}
