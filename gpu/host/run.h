// A kernel as a function that a test calls.
#pragma once

#include "dquant/platform.cuh"

#define DQ_RUN(kernel, Params)                                                                  \
    void run_##kernel(const dquant::Params* params, int blocks, int threads, long shared_bytes) { \
        dquant_simt::launch(blocks, threads, shared_bytes, [=] { kernel(*params); });            \
    }
