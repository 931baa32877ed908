// What attention kernels need of a plan that was read from a file (file.hpp): numbers to compile them for, tables and
// factors, and what variance classes add to their parameters.
//
//     dquant::host::AttendPlan attention(*file.header().groups[0].profile, /*query heads of a KV head*/ 4);
//
// Made once a layer; layers of equal options share machine code.  Raises `Refused` with Python's reason codes for plans
// that kernels do not take.  The same numbers as dquantcodec/cuda/attend_launch.py and group_attend.py, byte for byte.
#pragma once

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "attend_params.cuh"
#include "host/group_kind.hpp"

namespace dquant::host {

class AttendPlan {
public:
    bool grouped = false;                  // whether a kind has variance classes: which kernels are compiled
    std::vector<std::string> options;      // -DDQ_...: the plan's numbers, without those that a launch chooses
    std::vector<std::uint16_t> tables[2];  // of keys and values; a rANS entry is two of these
    std::vector<float> factors;            // [H, D]: sign over the square root of the rotation's order
    std::vector<std::int8_t> matrix;       // [D, D]: the rotation from input (row) to output, without those factors

    AttendPlan(const Profile& plan, int group) : heads_(plan.heads), dim_(plan.dim) {
        need(!plan.streams[1].mean && dim_ % 32 == 0 && dim_ <= 256, "device-geometry",
             "attention takes head sizes that are multiples of 32 up to 256 and values without means");
        define("HEADS", heads_);
        define("HEAD_DIM", dim_);
        define("WINDOW", plan.window);
        define("SUBSTREAMS", plan.streams[0].substreams);
        define("GROUP", group);
        define("PAGE_BYTES", plan.page_bytes(plan.window));
        grouped = plan.streams[0].grouping || plan.streams[1].grouping;
        for (int kind = 0; kind < 2; ++kind)
            if (grouped)
                add_groups(kind, plan);
            else
                add_letters(kind, plan.streams[kind]);
        if (grouped) {
            need(kinds_[0].heads == kinds_[1].heads, "device-heads",
                 "attention takes keys and values whose streams hold heads in the same order");
            const std::size_t bytes = sizeof(AttendParams) + 6 * sizeof(std::uint64_t) + records().size();
            need(bytes <= 32000, "device-classes", "too many heads and groups for the parameters of a kernel");
            define("PARAM_BYTES", bytes);
        }
        add_rotation(*plan.signs);
    }

    // Lays what the plan's kernels read into the device's memory, by `put(vector)`, which returns an address, and points
    // `p` to it.  Returns what follows `p` among the parameters of grouped plans' kernels (`GroupAttendParams`).
    template <class Put>
    std::vector<std::uint8_t> place(AttendParams& p, const Put& put) const {
        const auto point = [](auto& field, std::uint64_t address) { std::memcpy(&field, &address, sizeof address); };
        point(p.key_table, put(tables[0]));
        point(p.value_table, put(tables[1]));
        point(p.factors, put(factors));
        point(p.matrix, put(matrix));
        std::vector<std::uint8_t> rest;
        if (!grouped) return rest;
        const GroupKind &key = kinds_[0], &value = kinds_[1];
        append(rest, std::vector<std::uint64_t>{put(key.heads), put(places_of_heads(key)), put(key_order(key)),
                                                put(by_channel(key, key.gains)), put(by_channel(key, key.middles)),
                                                put(value_order(value))});
        append(rest, records());
        return rest;
    }

private:
    void define(const std::string& name, std::uint64_t number) { define(name, std::vector<std::uint64_t>{number}); }
    template <class T>
    void define(const std::string& name, const std::vector<T>& numbers) {
        std::string list;
        for (const T& number : numbers) list += (list.empty() ? "" : ",") + std::to_string(number);
        options.push_back("-DDQ_" + name + "=" + list);
    }
    static std::string name_of(int kind) { return kind == 0 ? "KEY_" : "VALUE_"; }

    template <class T>
    static void append(std::vector<std::uint8_t>& bytes, const std::vector<T>& numbers) {
        const auto first = reinterpret_cast<const std::uint8_t*>(numbers.data());
        bytes.insert(bytes.end(), first, first + numbers.size() * sizeof(T));
    }

    // One table for all letters: `Letters` in attend.cuh.
    void add_letters(int kind, const Stream& s) {
        const std::string name = name_of(kind);
        define(name + "LEVELS", s.levels);
        define(name + "LETTER", s.k);
        define(name + "PRECISION", s.precision);
        define(name + "WORDS", s.words);
        define(name + "RANS", s.coder == RANS);
        define(name + "MEAN", s.mean);
        define(name + "MID_TREAD", s.mid_tread);

        int width = 0;
        for (int most = s.levels - 1; most > 0; most /= 2) ++width;
        const int field_bits = width * s.k;
        // A letter's symbols side by side.
        const auto fields = [&](std::uint32_t letter) {
            std::uint32_t found = 0;
            for (int f = 0; f < s.k; ++f, letter /= s.levels) found |= letter % s.levels << (f * width);
            return found;
        };
        std::vector<std::uint16_t>& table = tables[kind];
        table.resize((s.coder == RANS ? 2 : 1) << s.precision);
        if (s.coder == PREFIX) {
            const int first_field = field_bits > 10 ? 4 : 6;
            fill_table(table.data(), s.table->code, s.precision,
                       [&](std::uint32_t letter) { return fields(letter) << first_field; });
            return;
        }
        need(field_bits <= 10, "device-coder", "attention takes rANS letters of at most 10 bits");
        for (std::uint32_t slot = 0; slot < 1u << s.precision; ++slot) {
            const std::uint32_t letter = s.table->letter_of_slot[slot], frequency = s.table->frequencies[letter];
            need(frequency < 1024, "device-coder", "attention takes rANS letters with frequencies below 1024");
            const std::uint32_t entry =
                frequency << 22 | (slot - s.table->starts[letter]) << 12 | fields(letter) << (12 - field_bits);
            std::memcpy(&table[2 * slot], &entry, sizeof entry);
        }
    }

    // Tables for groups of letters: `GroupLetters` in attend_groups.cuh.
    void add_groups(int i, const Profile& plan) {
        const Stream& s = plan.streams[i];
        const GroupKind& kind = kinds_[i] = s.grouping ? group_kind(*s.grouping) : group_kind(as_grouping(s, plan));
        tables[i] = kind.table;
        std::vector<int> letters, fields;
        for (const Shape& shape : kind.shapes) {
            letters.push_back(shape.letters);
            fields.push_back(shape.fields);
        }
        const std::string name = name_of(i);
        define(name + "WORDS", s.words);
        define(name + "PRECISION", kind.precision);
        define(name + "TABLE_BYTES", 2 * kind.table.size());
        define(name + "STATES", kind.states);
        define(name + "GROUPS", kind.shapes.size());
        define(name + "MEAN", s.mean);
        define(name + "ROTATED", s.rotated);
        define(name + "FIRST_FIELD", kind.first_field);
        define(name + "LOW", kind.low);
        define(name + "GROUP_LETTERS", letters);
        define(name + "GROUP_FIELDS", fields);
        define(name + "FIELD_WIDTHS", kind.widths);
    }

    void add_rotation(const std::vector<float>& signs) {
        const int dim = static_cast<int>(dim_);
        std::vector<float> scales;
        while (static_cast<int>(scales.size()) < dim) {
            const int order = largest_order(dim - static_cast<int>(scales.size()));
            scales.insert(scales.end(), order, static_cast<float>(1 / std::sqrt(double(order))));
        }
        for (std::size_t i = 0; i < signs.size(); ++i) factors.push_back(scales[i % dim] * signs[i]);
        matrix.resize(std::size_t(dim) * dim);
        for (int output = 0; output < dim; ++output) {
            std::vector<float> back(dim);
            back[output] = 1;
            rotate_back(back.data(), dim);
            for (int input = 0; input < dim; ++input)
                matrix[input * dim + output] = static_cast<std::int8_t>((back[input] > 0) - (back[input] < 0));
        }
    }

    // What a grouped plan's parameters hold themselves: the tables of all groups, and for every half of values the middle
    // in the unit of its levels, over 64, and what sums of levels are multiplied with (`OUTPUT_UNIT` over that unit).
    std::vector<std::uint8_t> records() const {
        const GroupKind& value = kinds_[1];
        std::vector<float> middles, units;
        for (std::size_t i = 0; i < value.gains.size(); ++i) {
            const int place = value.places[i % value.halves()];
            middles.push_back(static_cast<float>(std::ldexp(value.middles[i], place - 6)));
            units.push_back(static_cast<float>(std::ldexp(value.gains[i], 10 - place)));
        }
        std::vector<std::uint8_t> bytes;
        append(bytes, kinds_[0].records);
        append(bytes, value.records);
        append(bytes, middles);
        append(bytes, units);
        return bytes;
    }

    static std::vector<std::int32_t> places_of_heads(const GroupKind& kind) {
        std::vector<std::int32_t> places(kind.heads.size());
        for (std::size_t i = 0; i < places.size(); ++i) places[kind.heads[i]] = static_cast<std::int32_t>(i);
        return places;
    }

    // Channels of keys, each beside the FP16 number, a power of two, that takes a query to the unit of its levels.
    static std::vector<std::uint32_t> key_order(const GroupKind& key) {
        std::vector<std::uint32_t> found;
        for (std::size_t i = 0; i < key.order.size(); ++i) {
            const int place = key.places[i / HALF_CHANNELS % key.halves()];
            const auto factor = static_cast<std::uint32_t>(6 - place + 15) << 10;
            found.push_back(key.order[i] < 0 ? 0 : static_cast<std::uint32_t>(key.order[i]) | factor << 16);
        }
        return found;
    }

    // Channels of values, in whole tiles of two halves.
    std::vector<std::int16_t> value_order(const GroupKind& value) const {
        const std::size_t row = std::size_t(value.halves()) * HALF_CHANNELS;
        std::vector<std::int16_t> found;
        for (std::size_t i = 0; i < value.order.size(); ++i) {
            found.push_back(static_cast<std::int16_t>(value.order[i]));
            if (i % row == row - 1 && value.halves() % 2) found.insert(found.end(), HALF_CHANNELS, -1);
        }
        return found;
    }

    // [H, D]: what halves have, by channel; 0 for those left out.
    std::vector<float> by_channel(const GroupKind& kind, const std::vector<double>& of_half) const {
        std::vector<float> found(std::size_t{heads_} * dim_);
        for (std::size_t i = 0; i < kind.order.size(); ++i) {
            const std::size_t half = i / HALF_CHANNELS, head = kind.heads[half / kind.halves()];
            if (kind.order[i] >= 0) found[head * dim_ + kind.order[i]] = static_cast<float>(of_half[half]);
        }
        return found;
    }

    std::uint32_t heads_, dim_;
    GroupKind kinds_[2];  // of grouped plans
};

}  // namespace dquant::host
