// As attend.cpp, for plans with variance classes.
#include "../kernels/attend_groups.cu"

extern "C" {

void set_backwards(int backwards) { dquant_simt::block().backwards = backwards; }

void run_attend(const Constants::Params* params, int finish_blocks) {
    dquant_simt::launch(params->blocks, Shape::threads, Shape::shared_bytes, [=] { attend_pages(*params); });
    dquant_simt::launch(finish_blocks, DQ_FINISH_THREADS, 16, [=] { attend_finish(*params); });
}
}
