// Decoder arithmetic (specification, clauses 5 to 7): pages and exact rows to FP32, the same bits as everywhere.
#pragma once

#include <cfloat>
#include <map>
#include <mutex>
#include <vector>

#ifdef DQUANT_ZSTD
#include <zstd.h>
#endif

#include "bytes.hpp"
#include "header.hpp"

namespace dquant::host {

// The bits of a container of the prefix coder, read from bit 1 on (clause 6.3).
class Bits {
public:
    explicit Bits(const std::vector<std::uint32_t>& words) : words_(words) {}

    int letter(const PrefixCode& code) {
        std::uint32_t value = 0, first = 0, before = 0;
        for (std::size_t length = 1; length < code.count.size(); ++length) {
            need(at_ < 32 * std::uint64_t{words_.size()}, "container-overrun");
            value = value << 1 | bit(at_++);
            first <<= 1;
            if (value - first < code.count[length]) return code.letters[before + value - first];
            before += code.count[length];
            first += code.count[length];
        }
        throw Refused("container-overrun", "a code that is none");
    }

    void close(bool strict) const {
        if (!strict) return;
        bool rest = bit(0);
        for (std::uint64_t i = at_; i < 32 * std::uint64_t{words_.size()}; ++i) rest = rest || bit(i);
        need(!rest, "container-padding");
    }

private:
    bool bit(std::uint64_t i) const { return words_[i / 32] >> (i % 32) & 1; }
    const std::vector<std::uint32_t>& words_;
    std::uint64_t at_ = 1;
};

// Clause 6.6: code lengths of the best prefix code with none above `p`.
inline std::vector<int> package_merge(const std::vector<std::uint64_t>& weights, int p) {
    struct Item {
        std::uint64_t weight;
        int letter;  // -1 for a package
    };
    const auto lighter = [](const Item& a, const Item& b) { return a.weight < b.weight; };
    std::vector<Item> leaves;
    for (std::size_t i = 0; i < weights.size(); ++i) leaves.push_back({weights[i], static_cast<int>(i)});
    std::stable_sort(leaves.begin(), leaves.end(), lighter);
    std::vector<std::vector<Item>> lists{leaves};
    while (static_cast<int>(lists.size()) < p) {
        std::vector<Item> next = leaves;  // among equals leaves come first
        const std::vector<Item>& last = lists.back();
        for (std::size_t i = 0; i + 1 < last.size(); i += 2) next.push_back({last[i].weight + last[i + 1].weight, -1});
        std::stable_sort(next.begin(), next.end(), lighter);
        lists.push_back(std::move(next));
    }
    std::vector<int> lengths(weights.size(), 0);
    std::size_t taken = 2 * weights.size() - 2;
    for (auto list = lists.rbegin(); list != lists.rend(); ++list) {
        std::size_t k = 0;
        for (std::size_t i = 0; i < std::min(taken, list->size()); ++i) k += (*list)[i].letter >= 0;
        for (std::size_t i = 0; i < k; ++i) ++lengths[leaves[i].letter];
        taken = 2 * (taken - k);
    }
    return lengths;
}

// Clause 6.7: follows a letter of a table field by field from `state`, calling `f` with each class, its level (half steps
// if it is dependent) and frequency; returns the state after it.
template <class F>
int follow(const GroupTable& table, std::uint32_t letter, int quantiser, int state, F f) {
    static constexpr int turns[2][8] = {{0, 0, 1, 1}, {0, 1, 0, 1, 0, 1, 0, 1}};
    static constexpr int next[2][8][2] = {{{0, 2}, {2, 0}, {1, 3}, {3, 1}},
                                          {{0, 2}, {5, 7}, {1, 3}, {6, 4}, {2, 0}, {4, 6}, {3, 1}, {7, 5}}};
    for (const auto& c : table.classes) {
        const int m = static_cast<int>(letter % c->levels());
        letter /= c->levels();
        const int k = m - c->q;
        int turn = 0, level = k;
        if (c->dependent) {
            turn = turns[quantiser - 1][state];
            state = next[quantiser - 1][state][k & 1];
            level = 2 * k - turn * ((k > 0) - (k < 0));
        }
        f(*c, level, c->sets[turn][m]);
    }
    return state;
}

// Made when first needed, which several threads may do at once.
inline const PrefixCode& group_code(const GroupTable& table, int quantiser, int state) {
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    auto& code = table.codes[state];
    if (!code) {
        std::vector<std::uint64_t> weights(table.letters, 1);
        for (std::uint32_t letter = 0; letter < table.letters; ++letter)
            follow(table, letter, quantiser, state, [&](const Class&, int, std::uint32_t f) { weights[letter] *= f; });
        code = std::make_unique<PrefixCode>(PrefixCode::of(package_merge(weights, table.precision)));
    }
    return *code;
}

inline int odd_part(int n) {
    while (n % 2 == 0) n /= 2;
    return n;
}

// Clause 6.5: Paley's matrix of order 4r; of order 1 for r = 1.
inline const std::vector<std::vector<int>>& paley(int r) {
    static const auto matrices = [] {
        std::map<int, std::vector<std::vector<int>>> found{{1, {{1}}}};
        for (const auto& [odd, q, two] : {std::tuple{3, 11, false}, {5, 19, false}, {7, 13, true}, {9, 17, true},
                                          {11, 43, false}, {15, 59, false}}) {
            std::vector<int> chi(q, -1);
            chi[0] = 0;
            for (int b = 1; b < q; ++b) chi[b * b % q] = 1;
            std::vector<std::vector<int>> c(q + 1, std::vector<int>(q + 1, 1));
            c[0][0] = 0;
            for (int i = 0; i < q; ++i) {
                c[i + 1][0] = two ? 1 : -1;
                for (int j = 0; j < q; ++j) c[i + 1][j + 1] = chi[((j - i) % q + q) % q];
            }
            if (!two) {
                for (int i = 0; i <= q; ++i) ++c[i][i];
                found[odd] = c;
                continue;
            }
            static constexpr int one[2][2] = {{1, 1}, {1, -1}}, other[2][2] = {{1, -1}, {-1, -1}};
            std::vector<std::vector<int>> p(2 * q + 2, std::vector<int>(2 * q + 2));
            for (int i = 0; i < 2 * q + 2; ++i)
                for (int j = 0; j < 2 * q + 2; ++j)
                    p[i][j] = c[i / 2][j / 2] * one[i % 2][j % 2] + (i / 2 == j / 2) * other[i % 2][j % 2];
            found[odd] = p;
        }
        return found;
    }();
    return matrices.at(r);
}

inline int largest_order(int room) {
    for (int n = room; n > 1; --n) {
        const int r = odd_part(n);
        if (r == 1 || ((r == 3 || r == 5 || r == 7 || r == 9 || r == 11 || r == 15) && n % 4 == 0)) return n;
    }
    return 1;
}

// Turns one head of `dim` values back, without the signs.
inline void rotate_back(float* y, int dim) {
    std::vector<float> u;
    for (int order; dim > 0; y += order, dim -= order) {
        order = largest_order(dim);
        const auto& matrix = paley(odd_part(order));
        const int size = static_cast<int>(matrix.size()), run = order / size;
        for (int h = 1; h < run; h *= 2)
            for (int i = 0; i < order; i += 2 * h)
                for (int j = i; j < i + h; ++j) {
                    const float a = y[j], b = y[j + h];
                    y[j] = a + b;
                    y[j + h] = a - b;
                }
        u.resize(size);
        for (int c = 0; size > 1 && c < run; ++c) {
            for (int i = 0; i < size; ++i) u[i] = y[i * run + c];
            for (int i = 0; i < size; ++i) {
                float sum = 0;
                for (int k = 0; k < size; ++k) sum = matrix[k][i] > 0 ? sum + u[k] : sum - u[k];
                y[i * run + c] = sum;
            }
        }
        const float z = static_cast<float>(1 / std::sqrt(static_cast<double>(order)));
        for (int i = 0; i < order; ++i) y[i] *= z;
    }
}

// One page of a head group (clauses 5 and 6).
class Page {
public:
    Page(Bytes bytes, const Profile& profile) : bytes_(bytes), p_(profile) {}

    // FP32 values of a kind: token `t` goes to `out + t * stride`, `H * D` numbers of the group.
    void decode(int kind, std::uint32_t tokens, float* out, std::uint64_t stride, bool strict) const {
        const Stream& s = p_.streams[kind];
        const int exponent = bytes_.get<std::int16_t>(2 * kind);
        need(exponent >= -157 && exponent <= 119, "page-exponent");
        const std::uint64_t n = std::uint64_t{p_.heads} * p_.dim;
        std::vector<float> mean(s.mean ? n : 0);
        for (std::uint64_t i = 0; i < mean.size(); ++i) {
            const float scale = half_to_float(bytes_.get<std::uint16_t>(s.mean_at + 2 * (i / p_.dim)));
            need(std::isfinite(scale), "page-affine");
            mean[i] = scale * bytes_.get<std::int8_t>(s.mean_at + 2 * std::uint64_t{p_.heads} + i);
        }
        for (std::uint32_t token = 0; token < tokens; ++token) {
            float* y = out + token * stride;
            const float scale = affine(s, token, s.affine_numbers() - 1), low = affine(s, token, 0);
            need(std::isfinite(scale) && std::isfinite(low), "page-affine");
            if (s.grouping) {
                groups(s, token, y, strict);
                for (std::uint64_t i = 0; i < n; ++i) y[i] *= scale;
            } else {
                const float offset = s.mid_tread ? -static_cast<float>(s.levels - 1) / 2 * scale : low;
                symbols(s, token, y, strict);
                for (std::uint64_t i = 0; i < n; ++i) y[i] = offset + scale * y[i];
            }
            for (std::uint64_t i = 0; i < mean.size(); ++i) y[i] += mean[i];
            if (s.rotated)
                for (std::uint32_t h = 0; h < p_.heads; ++h) rotate_back(y + h * p_.dim, static_cast<int>(p_.dim));
            for (std::uint64_t i = 0; i < n; ++i) {
                const double x = std::ldexp(double{s.rotated ? y[i] * (*p_.signs)[i] : y[i]}, exponent);
                y[i] = static_cast<float>(std::copysign(std::min(std::fabs(x), double{FLT_MAX}), x));
            }
        }
    }

    // Whether padding of the head, or what belongs to tokens from `tokens` on, is other than zero.
    bool unused(std::uint32_t tokens) const {
        bool found = bytes_.part(p_.head_used, p_.head_bytes - p_.head_used).any();
        for (const Stream& s : p_.streams)
            for (std::uint32_t token = tokens; token < align(tokens, 32); ++token) {
                for (int j = 0; j < s.substreams; ++j)
                    for (const std::uint32_t word : words(s, token, j)) found = found || word;
                for (int i = 0; i < s.affine_numbers(); ++i) found = found || bytes_.get<std::uint16_t>(place(s, token, i));
            }
        return found;
    }

private:
    std::uint64_t place(const Stream& s, std::uint32_t token, int i) const {
        return p_.head_bytes + token / 32 * p_.tile_bytes + s.affine_at + 2 * (s.affine_numbers() * (token % 32) + i);
    }
    float affine(const Stream& s, std::uint32_t token, int i) const {
        return half_to_float(bytes_.get<std::uint16_t>(place(s, token, i)));
    }

    std::vector<std::uint32_t> words(const Stream& s, std::uint32_t token, int substream) const {
        const std::uint64_t first = p_.head_bytes + token / 32 * p_.tile_bytes + s.words_at;
        std::vector<std::uint32_t> found(s.words);
        for (int w = 0; w < s.words; ++w) {
            const std::uint64_t at = first + s.word_bytes() * ((std::uint64_t(substream) * s.words + w) * 32 + token % 32);
            found[w] = s.coder == RANS ? bytes_.get<std::uint16_t>(at) : bytes_.get<std::uint32_t>(at);
        }
        return found;
    }

    // Clause 6.1: the symbols of a token, as numbers.
    void symbols(const Stream& s, std::uint32_t token, float* out, bool strict) const {
        const int dim = static_cast<int>(p_.dim), per_head = (dim + s.k - 1) / s.k;
        const int heads = static_cast<int>(p_.heads) / s.substreams;
        std::vector<int> letters(std::size_t(heads) * per_head);
        for (int j = 0; j < s.substreams; ++j) {
            const std::vector<std::uint32_t> container = words(s, token, j);
            if (s.coder == RANS) {
                rans(s, container, letters, strict);
            } else {
                Bits bits(container);
                for (int& letter : letters) letter = bits.letter(s.table->code);
                bits.close(strict);
            }
            for (int head = 0; head < heads; ++head)
                for (int d = 0; d < dim; ++d) {
                    int letter = letters[head * per_head + d / s.k];
                    for (int i = 0; i < d % s.k; ++i) letter /= s.levels;
                    *out++ = static_cast<float>(letter % s.levels);
                }
        }
    }

    // Clause 6.2.
    static void rans(const Stream& s, const std::vector<std::uint32_t>& container, std::vector<int>& out, bool strict) {
        const LetterTable& table = *s.table;
        std::uint32_t x = container[0] << 16 | container[1];
        std::size_t next = 2;
        for (int& letter : out) {
            const std::uint32_t slot = x & ((1u << table.precision) - 1);
            letter = table.letter_of_slot[slot];
            x = table.frequencies[letter] * (x >> table.precision) + slot - table.starts[letter];
            if (x < 65536) {
                x = x << 16 | (next < container.size() ? container[next] : 0);
                ++next;
            }
        }
        need(next <= container.size(), "container-overrun");
        need(x == 65536, "container-state");
        bool rest = false;
        for (std::size_t i = next; i < container.size(); ++i) rest = rest || container[i];
        need(!strict || !rest, "container-padding");
    }

    // Clauses 6.6 and 6.7: gain times level of every channel of a token, 0 where nothing is coded.
    void groups(const Stream& s, std::uint32_t token, float* out, bool strict) const {
        const Grouping& g = *s.grouping;
        std::fill(out, out + std::size_t(g.heads) * g.dim, 0.0f);
        const int part = g.heads / s.substreams;
        for (int j = 0; j < s.substreams; ++j) {
            const std::vector<std::uint32_t> container = words(s, token, j);
            Bits bits(container);
            int state = 0;
            for (int place = j * part; place < (j + 1) * part; ++place) {
                const std::uint16_t* channels = &g.channels[std::size_t(place) * g.coded];
                float* head = out + std::size_t(g.order[place]) * g.dim;
                for (int group = 0; group < g.groups; ++group) {
                    const GroupTable& table = g.tables[g.choice[std::size_t(place) * g.groups + group]];
                    const Shape& shape = g.shapes[group];
                    for (int l = 0; l < shape.letters; ++l) {
                        const int letter = bits.letter(group_code(table, g.quantiser, state));
                        int f = 0;
                        state = follow(table, letter, g.quantiser, state, [&](const Class& c, int level, std::uint32_t) {
                            head[channels[f * shape.letters + l]] =
                                static_cast<float>(c.gain * level) / (c.dependent ? 512.0f : 256.0f);
                            ++f;
                        });
                    }
                    channels += shape.letters * shape.fields;
                }
            }
            bits.close(strict);
        }
    }

    Bytes bytes_;
    const Profile& p_;
};

// One Zstandard frame of `size` bytes (clause 7), into every `step`-th byte of `out`.
inline void inflate(Bytes frame, std::uint64_t size, std::uint8_t* out, int step) {
#ifdef DQUANT_ZSTD
    const auto content = ZSTD_getFrameContentSize(frame.data, frame.size);
    need(content != ZSTD_CONTENTSIZE_ERROR, "rows-frame");
    need(content == size && ZSTD_getDictID_fromFrame(frame.data, frame.size) == 0, "rows-length");
    need(ZSTD_findFrameCompressedSize(frame.data, frame.size) == frame.size, "rows-frame");
    std::vector<std::uint8_t> plane(size);
    need(ZSTD_decompress(plane.data(), size, frame.data, frame.size) == size, "rows-frame");
    for (std::uint64_t i = 0; i < size; ++i) out[i * step] = plane[i];
#else
    (void)frame, (void)size, (void)out, (void)step;
    throw Refused("rows-zstd", "compressed rows; build this reader with DQUANT_ZSTD and link libzstd");
#endif
}

// Clause 7: exact rows of a layer and kind to FP32, `tokens * H * D` numbers.
inline std::vector<float> decode_rows(Bytes block, int encoding, std::uint64_t tokens, const Layer& layer) {
    const std::uint64_t values = tokens * layer.values();
    const int size = layer.itemsize();
    need(encoding <= 1, "rows-encoding");
    std::vector<std::uint8_t> raw;
    if (encoding == 1) {
        need(block.size >= 4ull * size, "rows-length");
        std::uint64_t at = 4 * size, sum = at;
        for (int b = 0; b < size; ++b) {
            const std::uint64_t length = block.get<std::uint32_t>(4 * b);
            need(length <= values, "rows-length");
            sum += length;
        }
        need(sum == block.size, "rows-length");
        raw.resize(values * size);
        for (int b = 0; b < size; ++b) {
            const Bytes plane = block.part(at, block.get<std::uint32_t>(4 * b));
            if (plane.size == values)
                for (std::uint64_t i = 0; i < values; ++i) raw[i * size + b] = plane.data[i];
            else
                inflate(plane, values, raw.data() + b, size);
            at += plane.size;
        }
        block = {raw.data(), raw.size()};
    }
    need(block.size == values * size, "rows-length");
    std::vector<float> out(values);
    for (std::uint64_t i = 0; i < values; ++i)
        out[i] = layer.dtype == FLOAT32   ? block.get<float>(4 * i)
                 : layer.dtype == FLOAT16 ? half_to_float(block.get<std::uint16_t>(2 * i))
                                          : bfloat_to_float(block.get<std::uint16_t>(2 * i));
    return out;
}

}  // namespace dquant::host
