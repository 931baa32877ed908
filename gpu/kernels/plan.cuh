// The plan that the host's -D options describe, for the kernels of this folder.
#pragma once

#include "dquant/plan.cuh"
#include "element.cuh"

struct Plan {
    static constexpr int heads = DQ_HEADS, head_dim = DQ_HEAD_DIM;
    static constexpr int levels = DQ_LEVELS, letter = DQ_LETTER;
    static constexpr int precision = DQ_PRECISION, words = DQ_WORDS;
    static constexpr int substreams = DQ_SUBSTREAMS;
    static constexpr bool rans = DQ_RANS, mean = DQ_MEAN, mid_tread = DQ_MID_TREAD, unbiased = DQ_UNBIASED;
    static constexpr double step = DQ_STEP;
};
