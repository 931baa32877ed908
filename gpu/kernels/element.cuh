// The element type of rows that the host's -D options name: DQ_ELEMENT is 0 for FP32, 1 for FP16, 2 for BF16.
#pragma once

#include "dquant/numbers.cuh"

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
