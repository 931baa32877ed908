// The plan that the host's -D options describe, for the kernels of this folder.
#pragma once

#include "dquant/numbers.cuh"
#include "dquant/plan.cuh"

struct Plan {
    static constexpr int heads = DQ_HEADS, head_dim = DQ_HEAD_DIM;
    static constexpr int levels = DQ_LEVELS, letter = DQ_LETTER;
    static constexpr int precision = DQ_PRECISION, words = DQ_WORDS;
    static constexpr int substreams = DQ_SUBSTREAMS;
    static constexpr bool rans = DQ_RANS, mean = DQ_MEAN, mid_tread = DQ_MID_TREAD, unbiased = DQ_UNBIASED;
    static constexpr double step = DQ_STEP;
};

// Element type of rows: 0 FP32, 1 FP16, 2 BF16.
template <int> struct ElementOf {
    typedef dquant::Float32 Element;
};
template <> struct ElementOf<1> {
    typedef dquant::Float16 Element;
};
template <> struct ElementOf<2> {
    typedef dquant::BFloat16 Element;
};
typedef ElementOf<DQ_ELEMENT>::Element Element;
