// Rows in memory, of any strides of tokens and heads, as encoders read them.
#pragma once

#include "dquant/numbers.cuh"
#include "dquant/pages.cuh"

namespace dquant {

struct alignas(8) Vector8 {
    u32 x, y;
};

template <class Element> DQ_DEVICE float finite_value(typename Element::Stored stored, bool& finite) {
    const float x = Element::load(stored);
    if (is_finite(x)) return x;
    finite = false;
    return 0.0f;
}

template <class Element, class Params>
DQ_DEVICE const typename Element::Stored* head_row(const Params& params, i64 token, int head) {
    return (const typename Element::Stored*)params.in + token * params.token_stride + head * params.head_stride;
}

// Eight numbers from a multiple of 16 bytes on.
template <class Element> DQ_DEVICE void load_vectors(const typename Element::Stored* in, float (&x)[8]) {
    const Vector16* vectors = (const Vector16*)in;
    if constexpr (sizeof(typename Element::Stored) == 4) {
        const Vector16 low = vectors[0], high = vectors[1];
        const u32 words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = bits_float(words[j]);
    } else {
        const Vector16 all = vectors[0];
        const u32 words[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = Element::load((u16)(words[j / 2] >> (16 * (j % 2))));
    }
}

// Channels `first` to `first + 8` of a token as they are; zeros beyond the last channel.
template <class C, class Element, class Params>
DQ_DEVICE void load_eight(const Params& params, i64 token, int first, float (&x)[8]) {
    constexpr int n = C::heads * C::head_dim, D = C::head_dim;
    if constexpr (D % 8 == 0) {
        if (first < n) {
            const int head = first / D;
            const typename Element::Stored* in = head_row<Element>(params, token, head) + (first - head * D);
            if (params.vectors) {
                load_vectors<Element>(in, x);
            } else {
#pragma unroll
                for (int j = 0; j < 8; ++j) x[j] = Element::load(in[j]);
            }
        } else {
#pragma unroll
            for (int j = 0; j < 8; ++j) x[j] = 0.0f;
        }
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int channel = first + j, head = channel / D;
            x[j] = channel < n ? Element::load(head_row<Element>(params, token, head)[channel - head * D]) : 0.0f;
        }
    }
}

// Four neighbouring numbers of a head's row as they are stored; zeros beyond the head.
template <class Element> struct FourNumbers {
    static constexpr int size = sizeof(typename Element::Stored);
    u32 words[size];

    template <int D> DQ_DEVICE void load(const typename Element::Stored* in, int first, bool vectors) {
        if (D % 8 == 0 && vectors) {
            if constexpr (size == 4) {
                const Vector16 all = first < D ? *(const Vector16*)(in + first) : Vector16{0, 0, 0, 0};
                words[0] = all.x;
                words[1] = all.y;
                words[2] = all.z;
                words[3] = all.w;
            } else {
                const Vector8 all = first < D ? *(const Vector8*)(in + first) : Vector8{0, 0};
                words[0] = all.x;
                words[1] = all.y;
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < size; ++i) words[i] = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (first + j >= D) continue;
            if constexpr (size == 4)
                words[j] = float_bits(in[first + j]);
            else
                words[j / 2] |= (u32)in[first + j] << (16 * (j % 2));
        }
    }
    DQ_DEVICE float number(int j) const {
        if constexpr (size == 4)
            return bits_float(words[j]);
        else
            return Element::load((u16)(words[j / 2] >> (16 * (j % 2))));
    }
};

// Takes numbers that are not finite as zero.
DQ_DEVICE void keep_finite(float (&x)[8], bool& finite) {
    // Zero times such a number is not a number, and stays none.
    float zero = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) zero = add_exact_product(x[j], 0.0f, zero);
    if (zero != 0.0f) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (!is_finite(x[j])) {
                finite = false;
                x[j] = 0.0f;
            }
        }
    }
}

}  // namespace dquant
