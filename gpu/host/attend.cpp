// The attention kernels as a library for tests without a GPU: one geometry, by the same -D options as on a device.
#include "../kernels/attend.cu"

extern "C" {

void set_backwards(int backwards) { dquant_simt::block().backwards = backwards; }

void run_attend(const dquant::AttendParams* params, int finish_blocks) {
    dquant_simt::launch(params->blocks, Shape::threads, Shape::shared_bytes, [=] { attend_pages(*params); });
    dquant_simt::launch(finish_blocks, DQ_FINISH_THREADS, 16, [=] { attend_finish(*params); });
}
}
