// One kind of a plan with variance classes as attention kernels take it (see dquant/attend_groups.cuh): letters become
// 16-bit table entries whose fields a matrix product takes as they are.  A rotated kind beside a grouped one is written
// as groups of one table.  The same numbers as dquantcodec/cuda/group_attend.py, byte for byte.
#pragma once

#include <algorithm>
#include <memory>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "bytes.hpp"
#include "decode.hpp"
#include "header.hpp"

namespace dquant::host {

// Eight channels of a field are a half, counted group by group.
constexpr int HALF_CHANNELS = 8;
// Tables are rounded up to so many bytes, so that more layers share a kernel; those of a trellis to fewer.
constexpr std::uint64_t TABLE_STEP = 8192, TRELLIS_TABLE_STEP = 2048;

struct GroupKind {
    std::vector<Shape> shapes;           // of a head's groups
    int precision = 0, states = 1;       // the longest code; states of a trellis
    int first_field = 0;                 // lowest bit of an entry's fields
    bool low = false;                    // the last of several fields stands lowest, and is taken unshifted
    std::vector<std::uint16_t> table;    // entries of all tables; those of other states at equal distances
    std::vector<int> widths;             // [halves]: bits of the field, in all tables that share its place
    std::vector<int> places;             // [halves]: a level is a number times two to this
    std::vector<std::uint32_t> records;  // [H][groups][2]: index mask of the table and its place, both in bytes
    std::vector<int> order;              // [H][halves][8]: channels within their head, -1 where there is none
    std::vector<double> gains, middles;  // [H][halves]
    std::vector<int> heads;              // [H]: the head at every place of the coded order
    int halves() const { return static_cast<int>(widths.size()); }
};

// Fills what the next `precision` bits are looked up in: the length of the code that they begin with and what `fields`
// says of its letter.  Codes stand in their words from the lowest bit on, a code's first bit lowest.
template <class F>
void fill_table(std::uint16_t* table, const PrefixCode& code, int precision, F fields) {
    std::uint32_t value = 0, number = 0;
    for (std::uint32_t length = 1; length < code.count.size(); ++length) {
        value <<= 1;
        for (std::uint32_t i = 0; i < code.count[length]; ++i, ++value, ++number) {
            std::uint32_t reversed = 0;
            for (std::uint32_t bit = 0; bit < length; ++bit) reversed |= (value >> bit & 1) << (length - 1 - bit);
            const auto entry = static_cast<std::uint16_t>(fields(code.letters[number]) | length);
            for (std::uint32_t at = reversed; at < 1u << precision; at += 1u << length) table[at] = entry;
        }
    }
}

// A rotated kind as groups: all fields of one class, all letters of one table.
inline Grouping as_grouping(const Stream& s, const Profile& plan) {
    need(s.coder == PREFIX && s.mid_tread, "device-classes",
         "attention takes prefix codes and mid-tread grids beside grouped streams");
    auto levels = std::make_shared<Class>();
    levels->q = (s.levels - 1) / 2;
    levels->gain = 256;
    levels->sets.assign(1, std::vector<std::uint32_t>(s.levels, 1));
    GroupTable table;
    table.precision = s.precision;
    table.letters = static_cast<std::uint32_t>(s.table->frequencies.size());
    table.classes.assign(s.k, levels);
    table.codes.push_back(std::make_unique<PrefixCode>(s.table->code));

    Grouping g;
    g.heads = static_cast<int>(plan.heads), g.dim = static_cast<int>(plan.dim);
    const int letters = (g.dim + s.k - 1) / s.k;
    for (int first = 0; first < letters; first += HALF_CHANNELS)
        g.shapes.push_back({std::min(HALF_CHANNELS, letters - first), s.k});
    g.groups = static_cast<int>(g.shapes.size());
    g.tables.push_back(std::move(table));
    g.coded = letters * s.k;
    g.choice.assign(std::size_t(g.heads) * g.groups, 0);
    for (int head = 0; head < g.heads; ++head) {
        g.order.push_back(static_cast<std::uint16_t>(head));
        for (int group = 0; group < g.groups; ++group)
            for (int f = 0; f < s.k; ++f)
                for (int l = 0; l < g.shapes[group].letters; ++l)  // the last letter may reach beyond the head
                    g.channels.push_back(static_cast<std::uint16_t>((group * HALF_CHANNELS + l) * s.k + f));
    }
    return g;
}

// Bits of the fields of every group: of each field those of the widest table.
typedef std::vector<std::vector<int>> Widths;
inline Widths group_widths(const Grouping& g) {
    Widths found;
    for (const Shape& shape : g.shapes) found.emplace_back(shape.fields, 0);
    for (std::size_t i = 0; i < g.choice.size(); ++i) {
        std::vector<int>& widths = found[i % g.groups];
        for (std::size_t f = 0; f < widths.size(); ++f)
            widths[f] = std::max(widths[f], g.tables[g.choice[i]].classes[f]->field_bits());
    }
    return found;
}

inline int entry_bits(const std::vector<int>& widths) { return std::accumulate(widths.begin(), widths.end(), 0); }

inline int widest(const Widths& all) {
    int bits = 0;
    for (const std::vector<int>& widths : all) bits = std::max(bits, entry_bits(widths));
    return bits;
}

// Groups that share a table share widths as well, if those fit in `room` bits: then one copy of the table serves them.
// Returns which of `layouts`, which grow, every group has.
inline std::vector<int> share_layouts(const Grouping& g, Widths& layouts, int room) {
    std::vector<int> layout_of(g.groups);
    std::iota(layout_of.begin(), layout_of.end(), 0);
    for (std::size_t table = 0; table < g.tables.size(); ++table) {
        std::set<int> sharing;
        for (std::size_t i = 0; i < g.choice.size(); ++i)
            if (g.choice[i] == table) sharing.insert(static_cast<int>(i) % g.groups);
        for (const int group : sharing) {
            const int ours = layout_of[*sharing.begin()], theirs = layout_of[group];
            std::vector<int> both = layouts[ours];
            for (std::size_t f = 0; f < both.size(); ++f) both[f] = std::max(both[f], layouts[theirs][f]);
            if (ours == theirs || entry_bits(both) > room) continue;
            layouts[ours] = both;
            std::replace(layout_of.begin(), layout_of.end(), theirs, ours);
        }
    }
    return layout_of;
}

// Lowest bits of the fields in an entry whose uppermost `above` bits hold a state.
inline std::vector<int> field_places(const std::vector<int>& widths, int first, bool low, int above) {
    const std::size_t fields = widths.size();
    if (fields == 1) return {16 - above - widths[0]};
    std::vector<int> places(fields);
    for (std::size_t i = 0; i < fields; ++i) {
        const std::size_t f = low ? (i + fields - 1) % fields : i;
        places[f] = first;
        first += widths[f];
    }
    return places;
}

// A table as often as it is read with different places of fields: number and layout, and where it begins, in bytes.
struct TableCopy {
    int table, layout;
    std::size_t size, begin;
};

// All that groups need, the largest first, one behind the other.
inline std::vector<TableCopy> table_copies(const Grouping& g, const std::vector<int>& layout_of) {
    std::set<std::pair<int, int>> wanted;
    for (std::size_t i = 0; i < g.choice.size(); ++i) wanted.insert({g.choice[i], layout_of[i % g.groups]});
    std::vector<TableCopy> copies;
    for (const auto& [table, layout] : wanted)
        copies.push_back({table, layout, std::size_t{2} << g.tables[table].precision, 0});
    std::stable_sort(copies.begin(), copies.end(), [](const TableCopy& a, const TableCopy& b) { return a.size > b.size; });
    std::size_t end = 0;
    for (TableCopy& copy : copies) {
        copy.begin = end;
        end += copy.size;
    }
    return copies;
}

// Entries of a table for letters that start from `state`: the code's length, fields at `places`, the state that follows.
inline void fill_group_table(std::uint16_t* entries, const Grouping& g, const GroupTable& table, int state,
                             const std::vector<int>& places, int above) {
    fill_table(entries, group_code(table, g.quantiser, state), table.precision, [&](std::uint32_t letter) {
        std::uint32_t fields = 0;
        int f = 0;
        const int after = follow(table, letter, g.quantiser, state, [&](const Class& c, int level, std::uint32_t) {
            fields |= static_cast<std::uint32_t>(level + c.middle()) << places[f++];
        });
        return fields | static_cast<std::uint32_t>(after) << (16 - above);
    });
}

inline GroupKind group_kind(const Grouping& g) {
    GroupKind kind;
    kind.shapes = g.shapes;
    kind.heads.assign(g.order.begin(), g.order.end());
    for (const GroupTable& table : g.tables) kind.precision = std::max(kind.precision, table.precision);
    kind.states = g.quantiser == 0 ? 1 : g.quantiser == 1 ? 4 : 8;
    const int above = g.quantiser == 0 ? 0 : g.quantiser + 1;

    Widths layouts = group_widths(g);
    // Fields from bit 6 on cost decoders least.
    kind.first_field = kind.states > 1 ? 4 : std::max(4, std::min(6, 16 - widest(layouts)));
    const int room = 16 - above - kind.first_field;
    const std::vector<int> layout_of = share_layouts(g, layouts, room);
    // An unshifted field lies in the eleven bits that an FP16 number can hold as an integer.
    kind.low = std::all_of(layouts.begin(), layouts.end(), [&](const std::vector<int>& widths) {
        return widths.size() == 1 || kind.first_field + widths.back() <= 11;
    });
    const auto places_of = [&](int layout) { return field_places(layouts[layout], kind.first_field, kind.low, above); };

    const std::vector<TableCopy> copies = table_copies(g, layout_of);
    const std::size_t used = copies.back().begin + copies.back().size, distance = std::size_t{1} << (16 - above);
    need(widest(layouts) <= room && (kind.first_field == 6 || kind.low) && used <= distance, "device-classes",
         "attention takes no tables like these; decode the layer instead");
    const std::size_t bytes = (kind.states - 1) * distance + used;
    kind.table.resize(align(bytes, kind.states > 1 ? TRELLIS_TABLE_STEP : TABLE_STEP) / 2);
    for (const TableCopy& copy : copies)
        for (int state = 0; state < kind.states; ++state)
            fill_group_table(&kind.table[(copy.begin + state * distance) / 2], g, g.tables[copy.table], state,
                             places_of(copy.layout), above);

    for (int group = 0; group < g.groups; ++group) {
        const std::vector<int> widths = layouts[layout_of[group]], places = places_of(layout_of[group]);
        for (std::size_t f = 0; f < widths.size(); ++f) {
            const bool unshifted = kind.low && f > 0 && f + 1 == widths.size();
            kind.widths.push_back(widths[f]);
            kind.places.push_back(places[f] - (unshifted ? 0 : 6));
        }
    }
    const std::uint16_t* channel = g.channels.data();
    for (std::size_t i = 0; i < g.choice.size(); ++i) {
        const auto copy = std::find_if(copies.begin(), copies.end(), [&](const TableCopy& c) {
            return c.table == g.choice[i] && c.layout == layout_of[i % g.groups];
        });
        kind.records.push_back(static_cast<std::uint32_t>(copy->size - 2));
        kind.records.push_back(static_cast<std::uint32_t>(copy->begin));
        const int letters = g.shapes[i % g.groups].letters;
        for (const auto& c : g.tables[g.choice[i]].classes) {
            kind.gains.push_back(c->factor());
            kind.middles.push_back(c->middle());
            for (int l = 0; l < HALF_CHANNELS; ++l)
                kind.order.push_back(l < letters && channel[l] < g.dim ? channel[l] : -1);
            channel += letters;
        }
    }
    return kind;
}

}  // namespace dquant::host
