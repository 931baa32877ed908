// The second launch: partial results of the pages and exact tokens to outputs.
//
// A block takes four query rows of one KV head of one sequence.  Exact tokens (leading and newest) are attended to as
// they are; partial results of the pages are added up, turned back and joined with them by their largest logits and
// totals.
#pragma once

#include "dquant/attend_query.cuh"

namespace dquant {

template <int ELEMENT> DQ_DEVICE void store_element(void* to, i64 at, float x) {
    if (ELEMENT == 0) {
        ((float*)to)[at] = x;
    } else if (ELEMENT == 1) {
        ((u16*)to)[at] = float_to_half(x);
    } else {
        ((u16*)to)[at] = (u16)floats_to_bfloats(x, x);
    }
}

template <class C> struct Finish {
    typedef AttendShape<C> S;
    typedef typename S::Values V;
    typedef Schedule<C> List;
    static constexpr int threads = C::finish_threads, warps = threads / LANES;
    static constexpr int dim = S::dim, rows = 4, per_lane = dim / LANES;
    static constexpr int quads = S::rows / rows;
    static constexpr int exact_tokens = 256;                // taken at a time
    static constexpr int key_parts = 4;                     // threads of a token's key, a part of the channels each
    static constexpr int value_sets = 4 * threads / dim;    // threads of four channels, each with a part of the tokens
    static constexpr int vectors = 2 * S::pieces / quads;   // of four rows, in a head's partial result
    static constexpr int merge_sets = most(1, threads / vectors);
    static constexpr int sets = most(value_sets, merge_sets);
    static constexpr int segments = 256;                    // taken at a time

    struct Shared {
        float4 query[dim];                 // of four rows
        union {
            float4 weights[exact_tokens];  // of exact tokens
            float factors[segments][rows]; // of segments
        };
        alignas(16) float sums[sets][rows][dim];
        float exact[rows][dim];
        float largest[rows], total[rows], fading[rows];          // of exact tokens
        float segment_largest[rows], segment_total[rows], segment_fading[rows];
        int items_before, items;
    };

    const typename C::Params& p;
    Shared& s;
    const int head, sequence, pass, quad, thread, warp, lane;

    DQ_DEVICE Finish(const typename C::Params& p, Shared& s)
        : p(p), s(s), head(blockIdx.x % C::heads), sequence(blockIdx.x / (C::heads * quads * S::passes)),
          pass(blockIdx.x / (C::heads * quads) % S::passes), quad(blockIdx.x / C::heads % quads), thread(threadIdx.x),
          warp(threadIdx.x / LANES), lane(threadIdx.x % LANES) {}

    // Where row `row` of the four stands in queries and outputs, counted in rows; false if it does not exist.
    DQ_DEVICE bool place(int row, i64& at, int& query_head) const {
        int position, member;
        const bool real = Queries<C>::place(pass, quad * rows + row, position, member);
        query_head = head * C::group + member;
        at = ((i64)sequence * C::positions + position) * (C::heads * C::group) + query_head;
        return real;
    }

    DQ_DEVICE void load_queries() {
        for (int i = thread; i < rows * dim; i += threads) {
            i64 at;
            int query_head;
            const bool real = place(i / dim, at, query_head);
            ((float*)&s.query[i % dim])[i / dim] =
                real ? load_element<C::element>(p.query, at * dim + i % dim) * (p.scale * LOG2_E) : 0.0f;
        }
    }

    // Exact token number `e`: where its row begins, whether in the tail, and its position in the sequence.
    DQ_DEVICE i64 exact_row(int e, int sinks, bool& tail, int& position) const {
        tail = e >= sinks;
        const i64 token = tail ? sequence * p.tail_stride + (e - sinks) : sequence * p.sink_stride + e;
        position = tail ? e + p.lengths[sequence] : e;
        return (token * C::heads + head) * dim;
    }

    DQ_DEVICE bool sees(int row, int position, int length) const {
        const int self = length - C::positions + ((pass * S::rows + quad * rows) + row) / C::group;
        return (!p.causal || position <= self) && (p.sliding_window == 0 || position > self - p.sliding_window);
    }

    // Keys and values of the first tokens on their way, before anything is known about queries.
    DQ_DEVICE void prefetch_exact(int sinks, int tail) const {
        constexpr int lines = (2 * dim + 127) / 128;
        for (int i = thread; i < least(exact_tokens, sinks + tail) * lines; i += threads) {
            bool is_tail;
            int position;
            const i64 at = exact_row(i / lines, sinks, is_tail, position) + i % lines * 64;
            prefetch_l2((const u16*)(is_tail ? p.tail_keys : p.sink_keys) + at);
            prefetch_l2((const u16*)(is_tail ? p.tail_values : p.sink_values) + at);
        }
    }

    // Logits of up to `exact_tokens` tokens: neighbouring threads share a token.
    DQ_DEVICE void exact_logits(int first, int count, int sinks, int length) {
        const int part = thread % key_parts;
#pragma unroll
        for (int turn = 0; turn < exact_tokens * key_parts / threads; ++turn) {
            const int t = turn * (threads / key_parts) + thread / key_parts;
            float dot[rows] = {};
            int position = 0;
            if (t < count) {
                bool tail;
                const i64 at = exact_row(first + t, sinks, tail, position);
                const uint4* key = (const uint4*)((const u16*)(tail ? p.tail_keys : p.sink_keys) + at);
#pragma unroll
                for (int i = 0; i < dim / 32; ++i) {
                    const uint4 bits = key[4 * i + part];
                    const u32 pairs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
                    for (int j = 0; j < 8; ++j) {
                        const float k = bits_float(j % 2 ? pairs[j / 2] & 0xFFFF0000u : pairs[j / 2] << 16);
                        const float4 q = s.query[8 * (4 * i + part) + j];
                        dot[0] += k * q.x, dot[1] += k * q.y, dot[2] += k * q.z, dot[3] += k * q.w;
                    }
                }
            }
#pragma unroll
            for (int row = 0; row < rows; ++row) {
                dot[row] += from_lane_xor(dot[row], 1);
                dot[row] += from_lane_xor(dot[row], 2);
            }
            if (t >= count) continue;
            float x = part == 0 ? dot[0] : part == 1 ? dot[1] : part == 2 ? dot[2] : dot[3];
            if (C::soft_cap) {
                const float cap = p.soft_cap * LOG2_E;
                x = cap - 2.0f * cap * reciprocal(1.0f + power2(x * (2.0f / p.soft_cap)));
            }
            ((float*)&s.weights[t])[part] = sees(part, position, length) ? x : -1e38f;
        }
    }

    // Logits to weights, a warp a row; the running largest and total go on.
    DQ_DEVICE void exact_weights(int count) {
        if (warp >= rows) return;
        float* of_row = (float*)s.weights + warp;
        float peak = s.largest[warp];
        for (int t = lane; t < count; t += LANES) peak = fmaxf(peak, of_row[t * rows]);
        for (int mask = 16; mask > 0; mask /= 2) peak = fmaxf(peak, from_lane_xor(peak, mask));
        float sum = 0.0f;
        for (int t = lane; t < count; t += LANES) {
            const float weight = power2(of_row[t * rows] - peak);
            of_row[t * rows] = weight;
            sum += weight;
        }
        sum = warp_sum(sum);
        warp_barrier();
        if (lane == 0) {
            const float fading = power2(s.largest[warp] - peak);
            s.fading[warp] = fading;
            s.total[warp] = s.total[warp] * fading + sum;
            s.largest[warp] = peak;
        }
    }

    // Exact tokens: outputs in `exact`, not divided by the total.
    DQ_DEVICE void attend_exact(int sinks, int tail) {
        const int length = sinks + p.lengths[sequence] + tail;
        const int d = thread % (dim / 4) * 4, set = thread / (dim / 4);
        float sum[rows][4] = {};
        prefetch_exact(sinks, tail);
        load_queries();
        for (int first = 0; first < sinks + tail; first += exact_tokens) {
            const int count = least(exact_tokens, sinks + tail - first);
            block_barrier();
            exact_logits(first, count, sinks, length);
            block_barrier();
            exact_weights(count);
            block_barrier();
            if (set >= value_sets) continue;
#pragma unroll
            for (int row = 0; row < rows; ++row)
#pragma unroll
                for (int k = 0; k < 4; ++k) sum[row][k] *= s.fading[row];
            for (int base = set; base < count; base += 8 * value_sets) {
                uint2 bits[8];
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    const int t = base + k * value_sets;
                    bool is_tail;
                    int position;
                    const i64 at = exact_row(first + least(t, count - 1), sinks, is_tail, position);
                    bits[k] = *(const uint2*)((const u16*)(is_tail ? p.tail_values : p.sink_values) + at + d);
                }
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    const int t = base + k * value_sets;
                    const float4 weight = t < count ? s.weights[t] : make_float4(0, 0, 0, 0);
                    const u32 pairs[2] = {bits[k].x, bits[k].y};
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const float value = bits_float(j % 2 ? pairs[j / 2] & 0xFFFF0000u : pairs[j / 2] << 16);
                        sum[0][j] += weight.x * value, sum[1][j] += weight.y * value;
                        sum[2][j] += weight.z * value, sum[3][j] += weight.w * value;
                    }
                }
            }
        }
        if (set < value_sets) {
#pragma unroll
            for (int row = 0; row < rows; ++row)
                *(float4*)&s.sums[set][row][d] = make_float4(sum[row][0], sum[row][1], sum[row][2], sum[row][3]);
        }
        block_barrier();
        for (int i = thread; i < rows * dim; i += threads) {
            float x = 0.0f;
#pragma unroll
            for (int k = 0; k < value_sets; ++k) x += s.sums[k][i / dim][i % dim];
            s.exact[i / dim][i % dim] = x;
        }
        block_barrier();
    }

    // Items of the whole list and of the sequences before this one; by one warp.
    DQ_DEVICE void count_items() {
        int all = 0, before = 0;
        for (int b = lane; b < p.batch; b += LANES) {
            const int units = List::units(p, b);
            all += units;
            if (b < sequence) before += units;
        }
        all = warp_sum(all), before = warp_sum(before);
        if (lane == 0) {
            s.items = all * S::groups;
            s.items_before = before * S::groups;
        }
    }

    // Factors of up to `segments` segments, a warp a row.
    DQ_DEVICE void segment_factors(const float2* state, int count) {
        if (warp >= rows) return;
        float2 mine[segments / LANES];
        float peak = s.segment_largest[warp];
        const float before = peak;
#pragma unroll
        for (int k = 0; k < segments / LANES; ++k) {
            const int i = k * LANES + lane;
            mine[k] = i < count ? state[(i64)i * S::heads * S::rows + warp] : make_float2(NO_LOGIT, 0.0f);
            peak = fmaxf(peak, mine[k].x);
        }
        for (int mask = 16; mask > 0; mask /= 2) peak = fmaxf(peak, from_lane_xor(peak, mask));
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < segments / LANES; ++k) {
            const float factor = power2(mine[k].x - peak);
            if (k * LANES + lane < count) s.factors[k * LANES + lane][warp] = factor;
            sum += factor * mine[k].y;
        }
        sum = warp_sum(sum);
        warp_barrier();
        if (lane == 0) {
            s.segment_fading[warp] = power2(before - peak);
            s.segment_total[warp] = s.segment_total[warp] * s.segment_fading[warp] + sum;
            s.segment_largest[warp] = peak;
        }
    }

    // Where the head stands in the streams.
    DQ_DEVICE int coded_head() const {
        if constexpr (C::grouped)
            return p.places[head];
        else
            return head;
    }
    // The channel of a letter's field, by its place in the partial results; below 0 or beyond the head for none.
    DQ_DEVICE int channel_at(int coded, int tile, int letter, int half) const {
        if constexpr (C::grouped) {
            return tile < V::tiles ? p.value_order[((coded * V::tiles + tile) * 2 + half) * 8 + letter] : -1;
        } else {
            const int number = 16 * (tile / V::letter) + letter + 8 * half;
            return number < V::per_head ? number * V::letter + tile % V::letter : -1;
        }
    }

    // The head's partial results: head `coded` of the streams, in `count` slots from `slot` on.
    struct Segments {
        int coded, count;
        i64 slot;
    };
    DQ_DEVICE Segments segments_of_head() const {
        const int coded = coded_head(), group = pass * C::substreams + coded / S::heads;
        const int units = List::units(p, sequence);
        if (units == 0) return Segments{coded, 0, 0};
        const int item = s.items_before + group * units, blocks = least(p.blocks, s.items);
        const int first_block = List::block_of(item, blocks, s.items);
        const int count = List::block_of(item + units - 1, blocks, s.items) - first_block + 1;
        return Segments{coded, count, first_block + sequence * S::groups + group};
    }

    // Sums of the segments, in rotated form, in `sums[0]` to `sums[merge_sets - 1]`.
    DQ_DEVICE void merge_segments(const Segments& of) {
        const int coded = of.coded, local = coded % S::heads, count = of.count;
        const i64 slot = of.slot;
        if (count == 0) return;
        if constexpr (C::grouped) {
            // Channels that are left out.
            for (int i = thread; i < merge_sets * rows * dim; i += threads) (&s.sums[0][0][0])[i] = 0.0f;
        }
        // A thread takes a vector (or, where there are more than threads, several of them in turn).
        for (int base = 0; base < vectors; base += threads) {
            const int vector = vectors < threads ? thread % vectors : base + thread;
            const int set = vectors < threads ? thread / vectors : 0;
            const bool works = vector < vectors && set < merge_sets;
            const int spot = vector / 2, tile = spot / 8;
            const int d = channel_at(coded, tile, spot % 8, vector % 2);
            float4 sum = make_float4(0, 0, 0, 0);
            if (thread < rows) s.segment_largest[thread] = NO_LOGIT, s.segment_total[thread] = 0.0f;
            for (int first = 0; first < count; first += segments) {
                const int some = least(segments, count - first);
                const float4* partial = (const float4*)(p.partial + (slot + first) * S::partial_floats) +
                                        (local * S::pieces + spot * quads + quad) * 2 + vector % 2;
                // Eight loads on their way at a time, whatever the number of segments, the first beside the factors'.
                float4 x[8];
                const auto load = [&](int base_i) {
#pragma unroll
                    for (int k = 0; k < 8; ++k) {
                        const int i = base_i + k * merge_sets;
                        x[k] = i < some ? partial[(i64)i * (S::partial_floats / 4)] : make_float4(0, 0, 0, 0);
                    }
                };
                if (works) load(set);
                block_barrier();
                segment_factors(
                    (const float2*)p.state + ((slot + first) * S::heads + local) * S::rows + quad * rows, some
                );
                block_barrier();
                if (!works) continue;
                const float4 fading = *(const float4*)s.segment_fading;
                sum.x *= fading.x, sum.y *= fading.y, sum.z *= fading.z, sum.w *= fading.w;
                for (int base_i = set; base_i < some; base_i += 8 * merge_sets) {
                    if (base_i > set) load(base_i);
#pragma unroll
                    for (int k = 0; k < 8; ++k) {
                        const float4 f = *(const float4*)s.factors[least(base_i + k * merge_sets, some - 1)];
                        sum.x += f.x * x[k].x, sum.y += f.y * x[k].y, sum.z += f.z * x[k].z, sum.w += f.w * x[k].w;
                    }
                }
            }
            if (works && d >= 0 && d < dim) {
                const float unit = Output<C>::unit(p, coded, tile, vector % 2);
                s.sums[set][0][d] = sum.x * unit, s.sums[set][1][d] = sum.y * unit;
                s.sums[set][2][d] = sum.z * unit, s.sums[set][3][d] = sum.w * unit;
            }
            block_barrier();
        }
    }

    DQ_DEVICE void run() {
        // Queries and exact tokens come from before the first launch, which waited for them.
        let_next_grid_start();
        if (thread < rows) {
            s.largest[thread] = s.segment_largest[thread] = NO_LOGIT;
            s.total[thread] = s.segment_total[thread] = 0.0f;
        }
        if (warp == warps - 1) count_items();
        const int sinks = List::exact(p.sink_lengths, sequence), tail = List::exact(p.tail_lengths, sequence);
        if (sinks + tail > 0) attend_exact(sinks, tail);
        const int row = warp;
        i64 at;
        int query_head;
        const bool real = warp < rows && place(row, at, query_head);
        const float sink = p.sink_logits && real ? p.sink_logits[query_head] * LOG2_E : NO_LOGIT;
        float factors[per_lane];
#pragma unroll
        for (int i = 0; i < per_lane; ++i) factors[i] = V::rotated ? p.factors[head * dim + lane + LANES * i] : 1.0f;
        block_barrier();
        const Segments of_head = segments_of_head();
        wait_for_grid_before();
        merge_segments(of_head);
        if (warp >= rows) return;
        const float largest = s.segment_largest[row], total = s.segment_total[row];
        float y[per_lane] = {};
        if (total > 0.0f) {
#pragma unroll
            for (int i = 0; i < per_lane; ++i)
                for (int k = 0; k < merge_sets; ++k) y[i] += s.sums[k][row][lane + LANES * i];
        }
        if constexpr (V::rotated) turn_lanes<dim, true>(y, p.matrix, lane);
        // A result over other tokens counts like one token whose logit is the log-sum-exp of all of them.
        float before = NO_LOGIT;
        if (p.before_lse && real) before = fmaxf(p.before_lse[at] / p.lse_factor, NO_LOGIT);
        const float peak = fmaxf(fmaxf(largest, s.largest[row]), fmaxf(sink, before));
        const float of_pages = power2(largest - peak), of_exact = power2(s.largest[row] - peak);
        const float of_before = before > NO_LOGIT ? power2(before - peak) : 0.0f;
        const float all = total * of_pages + s.total[row] * of_exact + of_before +
                          (sink > NO_LOGIT ? power2(sink - peak) : 0.0f);
        if (!real) return;
        const float share = all > 0.0f ? 1.0f / all : 0.0f;
#pragma unroll
        for (int i = 0; i < per_lane; ++i) {
            const int d = lane + LANES * i;
            float exact = s.total[row] > 0.0f ? s.exact[row][d] * of_exact : 0.0f;
            if (of_before > 0.0f) exact += p.before_out[at * dim + d] * of_before;
            store_element<C::out_element>(p.out, at * dim + d, (y[i] * factors[i] * of_pages + exact) * share);
        }
        if (lane == 0) p.lse[at] = all > 0.0f ? (peak + log2f(all)) * p.lse_factor : bits_float(0xFF800000u);
    }
};

template <class C> DQ_DEVICE void attend_finish(const typename C::Params& p) {
    __shared__ typename Finish<C>::Shared shared;
    Finish<C>(p, shared).run();
}

}  // namespace dquant
