// The header block (specification, clause 3): what everything behind it is decoded with.
#pragma once

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bytes.hpp"
#include "json.hpp"

namespace dquant::host {

// A canonical prefix code (clause 6.3): how many codes there are of each length, and the letters in their order.
struct PrefixCode {
    std::vector<std::uint32_t> count;
    std::vector<std::uint16_t> letters;

    static PrefixCode of(const std::vector<int>& lengths) {
        PrefixCode code;
        code.letters.resize(lengths.size());
        for (std::size_t i = 0; i < lengths.size(); ++i) code.letters[i] = static_cast<std::uint16_t>(i);
        std::stable_sort(code.letters.begin(), code.letters.end(),
                         [&](std::uint16_t a, std::uint16_t b) { return lengths[a] < lengths[b]; });
        code.count.assign(1 + *std::max_element(lengths.begin(), lengths.end()), 0);
        for (const int length : lengths) ++code.count[length];
        return code;
    }
};

// Clause 3.4, with what its coder needs.
struct LetterTable {
    int precision = 0;
    std::vector<std::uint16_t> frequencies;
    std::vector<std::uint16_t> letter_of_slot;  // rANS
    std::vector<std::uint32_t> starts;
    PrefixCode code;  // of powers of two
};

// Clause 3.7; `sets` are frequencies of the levels -q to q, by quantiser.
struct Class {
    int q = 0, gain = 0;
    bool dependent = false;
    std::vector<std::vector<std::uint32_t>> sets;
    int levels() const { return 2 * q + 1; }
    // Zero, counted from the lowest level: in half steps for a dependent class.
    int middle() const { return dependent ? 2 * q : q; }
    // What a level, as it is counted, is multiplied with.
    double factor() const { return gain / (dependent ? 512.0 : 256.0); }
    int field_bits() const {
        int bits = 0;
        for (int n = 2 * middle(); n; n /= 2) ++bits;
        return bits;
    }
};

struct GroupTable {
    int precision = 0;
    std::uint32_t letters = 1;
    std::vector<std::shared_ptr<const Class>> classes;
    mutable std::vector<std::unique_ptr<PrefixCode>> codes;  // by state, made when first met
};

struct Shape {
    int letters, fields;
};

// Clause 3.8.
struct Grouping {
    int heads = 0, dim = 0, coded = 0, groups = 0, quantiser = 0;
    std::vector<GroupTable> tables;
    std::vector<Shape> shapes;
    std::vector<std::uint16_t> order;
    std::vector<std::uint8_t> choice;      // [heads][groups]
    std::vector<std::uint16_t> channels;   // [heads][coded]
};

enum Coder { RANS = 1, PREFIX = 2 };

// One kind of a profile (clause 3.2), and where it stands in pages (5.1).
struct Stream {
    int coder = 0, quantiser = 0, mid_tread = 0, k = 0, levels = 0, precision = 0, substreams = 0, mean = 0, words = 0;
    int vector = 0;
    bool rotated = false;
    double step = 0;
    std::shared_ptr<const LetterTable> table;
    std::shared_ptr<const Grouping> grouping;
    std::uint64_t mean_at = 0, words_at = 0, affine_at = 0;
    int word_bytes() const { return coder == RANS ? 2 : 4; }
    int affine_numbers() const { return mid_tread ? 1 : 2; }
};

struct Profile {
    std::uint32_t heads = 0, dim = 0, window = 0;
    std::string name;
    Stream streams[2];
    std::shared_ptr<const std::vector<float>> signs;
    std::uint64_t head_used = 4, head_bytes = 0, tile_bytes = 0;
    std::uint64_t page_bytes(std::uint64_t tokens) const { return head_bytes + (tokens + 31) / 32 * tile_bytes; }
};

enum Storage { CODED = 1, EXACT = 2, ABSENT = 3 };
enum Dtype { BFLOAT16 = 1, FLOAT16 = 2, FLOAT32 = 3 };

// Clause 3.3; `groups` are the profiles of the head groups of a coded layer.
struct Layer {
    int storage = 0, dtype = 0;
    std::uint32_t heads = 0, dim = 0, number = 0;
    std::vector<std::shared_ptr<const Profile>> groups;
    std::uint64_t values() const { return std::uint64_t{heads} * dim; }
    int itemsize() const { return dtype == FLOAT32 ? 4 : 2; }
    std::uint64_t row_bytes() const { return values() * itemsize(); }
};

// A head group among all of the file, as PAGES records have them.
struct Group {
    std::uint32_t layer, first_head;
    std::shared_ptr<const Profile> profile;
};

struct Header {
    std::uint32_t block_bytes = 0, sequences = 0, sinks = 0, recent = 0, window = 0;
    std::uint8_t salt[8] = {};
    std::vector<Layer> layers;
    std::vector<Group> groups;
    std::vector<std::uint32_t> exact, stored;  // layers by place
    Info info;
};

inline void check_geometry(std::uint64_t heads, std::uint64_t dim) {
    need(heads >= 1 && heads <= 1024 && dim >= 1 && dim <= 1024 && heads * dim <= 65536, "limit-geometry");
}

class HeaderReader {
public:
    static Header read(Bytes file) { return HeaderReader(file).header_; }

private:
    explicit HeaderReader(Bytes file) {
        static const std::uint8_t signature[] = {0x89, 'D', 'Q', 'K', '\r', '\n', 0x1A, '\n'};
        need(std::memcmp(file.data ? file.data : signature, signature, std::min<std::uint64_t>(8, file.size)) == 0,
             "signature");
        need(file.size >= 128, "header-truncated");
        const std::uint16_t major = file.get<std::uint16_t>(8);
        need(major == 1, "version-major", std::to_string(major));
        const std::uint32_t bytes = file.get<std::uint32_t>(12);
        need(bytes <= 16u << 20, "limit-header");
        need(bytes >= 4096 && bytes % 4096 == 0, "header-length");
        need(bytes <= file.size, "header-truncated");
        block_ = file.part(0, bytes);
        need(crc32c(block_.part(128, bytes - 128), crc32c(block_.part(0, 124))) == u32(124), "header-crc");
        need(block_.get<std::uint64_t>(16) == 0, "feature-required");
        need(u32(116) == 0, "header-matrices");
        need(u32(120) == 0, "header-reserved");
        const std::uint32_t layers = u32(48), profiles = u32(56), tables = u32(60), signs = u32(64), json = u32(96);
        header_.block_bytes = bytes;
        header_.sequences = u32(52);
        header_.sinks = u32(68);
        header_.recent = u32(72);
        std::memcpy(header_.salt, block_.data + 32, 8);
        need(layers >= 1 && layers <= 1024, "limit-layers");
        need(header_.sequences >= 1 && header_.sequences <= 65536, "limit-sequences");
        need(profiles <= 8192, "limit-profiles");
        need(tables <= 2048, "limit-tables");
        need(signs <= profiles, "limit-signs");
        need(u32(100) <= 1024, "limit-classes");
        need(u32(104) <= 2 * profiles, "limit-groupings");
        need(json <= 65536, "limit-json");
        // Every section stands where the one before it ends.
        at_ = 128;
        const std::vector<Bytes> profile_entries = entries(76, profiles, 192);
        const std::vector<Bytes> layer_entries = entries(80, layers, 32);
        section(84, tables, [&] { read_table(); });
        section(88, signs, [&] { read_signs(); });
        section(108, u32(100), [&] { read_class(); });
        section(112, u32(104), [&] { read_grouping(); });
        section(92, 0, [] {});
        need(align(at_ + json, 4096) == bytes, "header-coverage");
        need(!block_.part(at_ + json, bytes - at_ - json).any(), "header-reserved");
        for (const Bytes& entry : profile_entries) read_profile(entry);
        for (const auto& profile : profiles_) {
            need(profile->window == profiles_[0]->window, "profile-window-differs");
            header_.window = profile->window;
        }
        std::uint64_t groups = 0;
        for (const Bytes& entry : layer_entries) groups += entry.get<std::uint16_t>(16);
        need(groups <= 8192, "limit-groups");
        for (const Bytes& entry : layer_entries) read_layer(entry);
        for (std::uint32_t i = 0; i < layers; ++i) {
            need(i == 0 || header_.layers[i - 1].number < header_.layers[i].number, "layer-number");
            if (header_.layers[i].storage == EXACT) header_.exact.push_back(i);
            if (header_.layers[i].storage != ABSENT) header_.stored.push_back(i);
        }
        header_.info = Json::read(block_.part(at_, json));
    }

    std::uint32_t u32(std::uint64_t at) const { return block_.get<std::uint32_t>(at); }

    template <class F>
    void section(std::uint64_t field, std::uint32_t count, F read) {
        need(u32(field) == at_ && at_ <= block_.size, "header-coverage");
        for (std::uint32_t i = 0; i < count; ++i) read();
    }
    std::vector<Bytes> entries(std::uint64_t field, std::uint32_t count, std::uint32_t size) {
        std::vector<Bytes> found;
        section(field, count, [&] { found.push_back(take(size)); });
        return found;
    }
    Bytes take(std::uint64_t size) {
        need(size <= block_.size - at_, "header-coverage");
        at_ += size;
        return block_.part(at_ - size, size);
    }
    template <class T>
    T number() {
        return take(sizeof(T)).template get<T>(0);
    }
    template <class T, class U>
    std::vector<U> numbers(std::uint64_t count) {
        const Bytes raw = take(count * sizeof(T));
        std::vector<U> found(count);
        for (std::uint64_t i = 0; i < count; ++i) found[i] = raw.get<T>(i * sizeof(T));
        return found;
    }
    // Zeros behind an entry that began at `begin`, up to a multiple of 8 bytes.
    void padding(std::uint64_t begin) { need(!take(align(at_ - begin, 8) - (at_ - begin)).any(), "header-reserved"); }

    void read_table() {
        const std::uint64_t begin = at_;
        const std::uint32_t letters = number<std::uint32_t>(), precision = number<std::uint32_t>();
        need(letters >= 2 && letters <= 4096 && precision >= 8 && precision <= 15, "limit-table");
        auto table = std::make_shared<LetterTable>();
        table->precision = static_cast<int>(precision);
        table->frequencies = numbers<std::uint16_t, std::uint16_t>(letters);
        std::uint32_t sum = 0;
        bool powers = true;
        for (const std::uint16_t f : table->frequencies) {
            need(f != 0, "table-zero");
            table->starts.push_back(sum);
            sum += f;
            powers = powers && (f & (f - 1)) == 0;
        }
        need(sum == 1u << precision, "table-sum");
        std::vector<int> lengths;
        for (std::uint32_t letter = 0; letter < letters; ++letter) {
            const std::uint16_t f = table->frequencies[letter];
            table->letter_of_slot.insert(table->letter_of_slot.end(), f, static_cast<std::uint16_t>(letter));
            int log = 0;
            while (f >> (log + 1)) ++log;
            lengths.push_back(static_cast<int>(precision) - log);
        }
        if (powers) table->code = PrefixCode::of(lengths);
        padding(begin);
        tables_.push_back(table);
    }

    void read_signs() {
        const std::uint64_t begin = at_;
        const std::uint32_t bits = number<std::uint32_t>(), reserved = number<std::uint32_t>();
        need(bits <= 65536, "limit-signs");
        const Bytes packed = take((bits + 7) / 8);
        auto signs = std::make_shared<std::vector<float>>();
        bool rest = reserved != 0;
        for (std::uint64_t i = 0; i < 8 * packed.size; ++i) {
            const bool one = packed.data[i / 8] >> (i % 8) & 1;
            if (i < bits)
                signs->push_back(one ? -1.0f : 1.0f);
            else
                rest = rest || one;
        }
        need(!rest, "header-reserved");
        padding(begin);
        signs_.push_back(signs);
    }

    void read_class() {
        const std::uint64_t begin = at_;
        auto found = std::make_shared<Class>();
        found->q = number<std::uint8_t>();
        const int dependent = number<std::uint8_t>();
        found->gain = number<std::uint16_t>();
        found->dependent = dependent == 1;
        std::vector<std::vector<std::uint32_t>> uppers;
        for (int i = 0; i < (found->dependent ? 2 : 1); ++i)
            uppers.push_back(numbers<std::uint16_t, std::uint32_t>(found->q + 1));
        need(dependent <= 1, "header-reserved");
        padding(begin);
        need(found->q >= 1 && found->q <= (found->dependent ? 63 : 127), "class-weights");
        for (const auto& upper : uppers) {
            std::vector<std::uint32_t> set(upper.rbegin(), upper.rend());
            set.insert(set.end(), upper.begin() + 1, upper.end());
            std::uint32_t sum = 0, least = set[0], most = 0;
            for (const std::uint32_t f : set) sum += f, least = std::min(least, f), most = std::max(most, f);
            need(least > 0 && sum == 1u << 14 && (!found->sets.empty() || most == upper[0]), "class-weights");
            found->sets.push_back(set);
        }
        need(found->gain >= 1 && found->gain <= 1023, "class-gain");
        classes_.push_back(found);
    }

    void read_grouping() {
        const std::uint64_t begin = at_;
        auto g = std::make_shared<Grouping>();
        g->heads = number<std::uint16_t>();
        g->dim = number<std::uint16_t>();
        g->coded = number<std::uint16_t>();
        g->groups = number<std::uint16_t>();
        const int tables = number<std::uint8_t>();
        g->quantiser = number<std::uint8_t>();
        const bool reserved = take(6).any();
        need(g->quantiser <= 2, "profile-quantiser");
        need(g->heads >= 1 && g->heads <= 1024 && g->coded >= 1 && g->coded <= g->dim && g->dim <= 1024 &&
                 g->heads * g->dim <= 65536 && g->groups <= 512 && tables <= 16,
             "limit-grouping");
        for (int i = 0; i < tables; ++i) {
            GroupTable table;
            table.precision = number<std::uint8_t>();
            const int count = number<std::uint8_t>();
            bool fits = number<std::uint16_t>() == 0 && count <= 4;
            const auto named = numbers<std::uint16_t, std::uint16_t>(4);
            for (int f = 0; f < 4; ++f) {
                if (f >= count)
                    fits = fits && named[f] == 0xFFFF;
                else if (named[f] < classes_.size())
                    table.classes.push_back(classes_[named[f]]);
                else
                    fits = false;
            }
            need(fits, "grouping-table");
            g->tables.push_back(std::move(table));
        }
        for (int i = 0; i < g->groups; ++i) {
            const int letters = number<std::uint8_t>();
            g->shapes.push_back({letters, number<std::uint8_t>()});
        }
        g->order = numbers<std::uint16_t, std::uint16_t>(g->heads);
        g->choice = numbers<std::uint8_t, std::uint8_t>(std::uint64_t(g->heads) * g->groups);
        const std::uint64_t channels = std::uint64_t(g->heads) * g->coded;
        g->channels = g->dim > 256 ? numbers<std::uint16_t, std::uint16_t>(channels)
                                   : numbers<std::uint8_t, std::uint16_t>(channels);
        need(!reserved, "header-reserved");
        padding(begin);
        check_grouping(*g);
        groupings_.push_back(g);
    }

    static void check_grouping(Grouping& g) {
        for (const std::uint16_t head : g.order) need(head < g.heads, "grouping-order");
        for (const std::uint16_t channel : g.channels) need(channel < g.dim, "grouping-order");
        bool used = false, dependent = false;
        for (const GroupTable& table : g.tables)
            for (const auto& c : table.classes) used = true, dependent = dependent || c->dependent;
        need(used, "grouping-classes");
        need(dependent == (g.quantiser > 0), "grouping-states");
        for (GroupTable& table : g.tables) {
            std::uint64_t letters = 1;
            int bits = 0;
            for (const auto& c : table.classes) {
                letters *= c->levels();
                bits += c->field_bits();
            }
            need(!table.classes.empty() && table.precision >= 8 && table.precision <= 14, "grouping-table");
            need(letters <= std::uint64_t(std::min(4096, 1 << table.precision)), "grouping-table");
            need(bits <= (g.quantiser == 0 ? 12 : g.quantiser == 1 ? 10 : 9), "grouping-table");
            table.letters = static_cast<std::uint32_t>(letters);
            table.codes.resize(g.quantiser == 0 ? 1 : g.quantiser == 1 ? 4 : 8);
        }
        need(g.groups >= 1, "grouping-shape");
        int sum = 0;
        for (const Shape& s : g.shapes) {
            need(s.letters >= 1 && s.letters <= 8 && s.fields >= 1 && s.fields <= 4, "grouping-shape");
            sum += s.letters * s.fields;
        }
        need(sum == g.coded, "grouping-shape");
        for (std::size_t i = 0; i < g.choice.size(); ++i)
            need(g.choice[i] < g.tables.size() &&
                     int(g.tables[g.choice[i]].classes.size()) == g.shapes[i % g.groups].fields,
                 "grouping-table");
        need(std::set<int>(g.order.begin(), g.order.end()).size() == g.order.size(), "grouping-order");
        for (int head = 0; head < g.heads; ++head) {
            const auto first = g.channels.begin() + std::ptrdiff_t(head) * g.coded;
            need(std::set<int>(first, first + g.coded).size() == std::size_t(g.coded), "grouping-order");
        }
    }

    void read_profile(Bytes entry) {
        auto p = std::make_shared<Profile>();
        p->heads = entry.get<std::uint32_t>(0);
        p->dim = entry.get<std::uint32_t>(4);
        p->window = entry.get<std::uint32_t>(8);
        need(!entry.part(12, 4).any() && !entry.part(48, 16).any(), "header-reserved");
        check_geometry(p->heads, p->dim);
        need(p->window % 32 == 0 && p->window >= 32 && p->window <= 4096, "profile-window");
        for (int kind = 0; kind < 2; ++kind) p->streams[kind] = read_stream(entry.part(64 + 64 * kind, 64), *p);
        const int vector = p->streams[0].vector;
        need(vector == p->streams[1].vector, "profile-rotation");
        need(std::size_t(vector) < signs_.size() && signs_[vector]->size() == std::size_t(p->heads) * p->dim,
             "profile-signs");
        p->signs = signs_[vector];
        Bytes name = entry.part(16, 32);
        while (name.size && name.data[name.size - 1] == 0) --name.size;
        need(utf8(name), "profile-name");
        p->name.assign(reinterpret_cast<const char*>(name.data), name.size);
        for (Stream& s : p->streams) {
            s.mean_at = p->head_used;
            if (s.mean) p->head_used += 2 * std::uint64_t{p->heads} + std::uint64_t{p->heads} * p->dim;
            s.words_at = p->tile_bytes;
            s.affine_at = s.words_at + std::uint64_t{32} * s.substreams * s.words * s.word_bytes();
            p->tile_bytes = s.affine_at + 64 * std::uint64_t(s.affine_numbers());
        }
        p->head_bytes = align(p->head_used, 64);
        profiles_.push_back(p);
    }

    Stream read_stream(Bytes entry, const Profile& p) {
        const auto u8 = [&](std::uint64_t at) { return int{entry.get<std::uint8_t>(at)}; };
        const auto u16 = [&](std::uint64_t at) { return int{entry.get<std::uint16_t>(at)}; };
        Stream s;
        s.coder = u8(0), s.quantiser = u8(1), s.mid_tread = u8(2), s.k = u8(3), s.levels = u8(4), s.precision = u8(5);
        s.substreams = u8(6), s.mean = u8(7), s.words = u16(8), s.vector = u16(14), s.step = entry.get<double>(16);
        const int table = u16(10), rotation = u8(12), gain = u8(24), grouping = u16(26);
        need(s.coder == RANS || s.coder == PREFIX, "profile-coder");
        need(s.quantiser <= 2, "profile-quantiser");
        need(s.mid_tread <= 1, "profile-grid");
        need(gain <= 1, "profile-gain");
        need(s.mean <= 1, "profile-mean");
        need(rotation <= 1, "profile-rotation");
        need(u8(28) == 0, "profile-escape");
        need(u16(30) == 0, "profile-matrix");
        need(u8(13) == 0 && u8(25) == 0 && u8(29) == 0 && !entry.part(32, 32).any(), "header-reserved");
        need(s.substreams == 1 || s.substreams == 2 || s.substreams == 4, "profile-substreams");
        need(p.heads % s.substreams == 0, "profile-heads");
        need(s.words >= 2 && s.words <= 32767, "profile-words");
        s.rotated = rotation == 1;
        if (!s.rotated) {
            need(!s.k && !s.levels && !s.precision && !table, "profile-grouping");
            need(s.coder == PREFIX && s.mid_tread && s.step > 0 && s.step <= 64, "profile-grouping");
            need(std::size_t(grouping) < groupings_.size(), "profile-grouping");
            s.grouping = groupings_[grouping];
            need(std::uint32_t(s.grouping->heads) == p.heads && std::uint32_t(s.grouping->dim) == p.dim &&
                     s.grouping->quantiser == s.quantiser,
                 "profile-grouping");
            return s;
        }
        need(!grouping && !s.quantiser, "profile-grouping");
        need(s.levels >= 2 && s.levels <= 64, "profile-levels");
        if (s.mid_tread) {
            need(s.levels % 2 == 1, "profile-levels");
            need(s.step > 0 && s.step <= 16, "profile-step");
        } else {
            need(s.step == 0 && gain == 0, "profile-grid");
        }
        need(s.precision >= 8 && s.precision <= 15, "profile-precision");
        std::uint64_t letters = 1;
        for (int i = 0; i < s.k && i < 5; ++i) letters *= s.levels;
        need(s.k >= 1 && s.k <= 4 && letters <= std::uint64_t(std::min(4096, 1 << s.precision)), "profile-letter");
        need(std::size_t(table) < tables_.size(), "profile-table");
        s.table = tables_[table];
        need(s.table->precision == s.precision && s.table->frequencies.size() == letters, "profile-table");
        need(s.coder == RANS || !s.table->code.letters.empty(), "profile-prefix");
        return s;
    }

    void read_layer(Bytes entry) {
        Layer layer;
        layer.storage = entry.get<std::uint8_t>(0);
        layer.dtype = entry.get<std::uint8_t>(1);
        const std::uint32_t first = entry.get<std::uint16_t>(2), groups = entry.get<std::uint16_t>(16);
        layer.heads = entry.get<std::uint32_t>(4);
        layer.dim = entry.get<std::uint32_t>(8);
        layer.number = entry.get<std::uint32_t>(12);
        need(layer.storage >= CODED && layer.storage <= ABSENT, "layer-storage");
        need(layer.dtype >= BFLOAT16 && layer.dtype <= FLOAT32, "layer-dtype");
        need(!entry.part(18, 14).any(), "header-reserved");
        if (layer.storage == CODED) {
            need(groups >= 1 && groups <= layer.heads, "layer-groups");
            need(first + groups <= profiles_.size(), "layer-profile");
            std::uint64_t heads = 0;
            for (std::uint32_t i = first; i < first + groups; ++i) {
                need(profiles_[i]->dim == layer.dim, "layer-profile");
                header_.groups.push_back(
                    {static_cast<std::uint32_t>(header_.layers.size()), static_cast<std::uint32_t>(heads), profiles_[i]});
                layer.groups.push_back(profiles_[i]);
                heads += profiles_[i]->heads;
            }
            need(heads == layer.heads, "layer-profile");
        } else {
            need(groups == 0, "layer-groups");
            need(first == 0xFFFF, "layer-profile");
        }
        check_geometry(layer.heads, layer.dim);
        header_.layers.push_back(layer);
    }

    Bytes block_;
    std::uint64_t at_ = 0;
    Header header_;
    std::vector<std::shared_ptr<const LetterTable>> tables_;
    std::vector<std::shared_ptr<const std::vector<float>>> signs_;
    std::vector<std::shared_ptr<const Class>> classes_;
    std::vector<std::shared_ptr<const Grouping>> groupings_;
    std::vector<std::shared_ptr<const Profile>> profiles_;
};

}  // namespace dquant::host
