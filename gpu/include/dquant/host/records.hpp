// Records (specification, clauses 4 and 9.1): the log of a file, and which record holds a token of a sequence.
#pragma once

#include <deque>
#include <optional>
#include <vector>

#include "bytes.hpp"
#include "header.hpp"

namespace dquant::host {

enum RecordType { PAGES = 1, ROWS = 2, REWIND = 3, INDEX = 0x8001, FILL = 0x8003 };

struct Record {
    std::uint64_t offset = 0, payload_bytes = 0, first = 0;
    std::uint32_t type = 0, version = 0, tokens = 0, sequence = 0, number = 0, flags = 0, epoch = 0, table_crc = 0;
    std::uint32_t reserved = 0;
    std::uint64_t payload() const { return offset + 64; }
    std::uint64_t payload_end() const { return payload() + payload_bytes; }
    std::uint64_t end() const { return align(payload_end(), 4096); }
    std::uint64_t token_end() const { return first + tokens; }
    bool says_tokens() const { return type == PAGES || type == ROWS || type == REWIND; }
};

// The record whose valid header `raw` (64 bytes) stands at `offset`.
inline std::optional<Record> record_at(Bytes raw, std::uint64_t offset, const std::uint8_t* salt) {
    if (raw.size < 64 || std::memcmp(raw.data, "DQKR", 4) != 0) return {};
    if (crc32c(raw.part(0, 60)) != raw.get<std::uint32_t>(60) || std::memcmp(raw.data + 40, salt, 8) != 0) return {};
    Record r;
    r.offset = offset;
    r.type = raw.get<std::uint16_t>(4);
    r.version = raw.get<std::uint16_t>(6);
    r.payload_bytes = raw.get<std::uint64_t>(8);
    r.first = raw.get<std::uint64_t>(16);
    r.tokens = raw.get<std::uint32_t>(24);
    r.sequence = raw.get<std::uint32_t>(28);
    r.number = raw.get<std::uint32_t>(32);
    r.flags = raw.get<std::uint32_t>(36);
    r.epoch = raw.get<std::uint32_t>(48);
    r.table_crc = raw.get<std::uint32_t>(52);
    r.reserved = raw.get<std::uint32_t>(56);
    return r;
}

// Where a page stands in the payload of a PAGES record, and how many tokens it holds.
struct PagePlace {
    std::uint32_t group, window, tokens;
    std::uint64_t at, size;
};

// A block of a ROWS record.
struct Block {
    std::uint32_t layer;
    int kind, encoding;
    std::uint32_t crc;
    std::uint64_t at, size;
};

inline std::uint32_t windows_of(const Record& r, const Header& h) {
    return static_cast<std::uint32_t>((std::uint64_t{r.tokens} + h.window - 1) / h.window);
}

inline std::uint64_t page_table_bytes(const Record& r, const Header& h) {
    return align(4 * h.groups.size() * std::uint64_t{windows_of(r, h)}, 64);
}

inline const std::vector<std::uint32_t>& rows_layers(const Record& r, const Header& h) {
    return r.flags ? h.exact : h.stored;
}

// Calls `f` with every page of a PAGES record, in stored order; returns where the last one ends.
template <class F>
std::uint64_t for_pages(const Record& r, const Header& h, F f) {
    std::uint64_t at = page_table_bytes(r, h);
    for (std::uint32_t group = 0; group < h.groups.size(); ++group)
        for (std::uint32_t window = 0; window < windows_of(r, h); ++window) {
            const std::uint32_t tokens = std::min(h.window, r.tokens - window * h.window);
            const std::uint64_t size = h.groups[group].profile->page_bytes(tokens);
            f(PagePlace{group, window, tokens, at, size});
            at += size;
        }
    return at;
}

// Clauses 4.1 to 4.4: what a record header may say; `before` records precede it, the last of `epoch`.
inline void check_record(const Record& r, const Header& h, std::uint64_t before, std::uint32_t epoch) {
    need(r.number == before, "record-number");
    need(r.epoch >= epoch, "record-epoch");
    need(r.reserved == 0, "record-reserved");
    if (!r.says_tokens()) return need(r.type >= 0x8000, "record-type", std::to_string(r.type));
    need(r.version == 1, "record-version");
    need(r.flags <= (r.type == ROWS ? 1u : 0u), "record-flags");
    need(r.sequence < h.sequences, "record-sequence");
    need((r.tokens > 0) == (r.type != REWIND), "record-tokens");
    need(r.first <= 1ull << 40 && r.token_end() <= 1ull << 40, "limit-tokens");
    if (r.type == REWIND) return need(r.payload_bytes == 0 && r.table_crc == 0, "record-length");
    need(r.type == PAGES ? !h.groups.empty() : !rows_layers(r, h).empty(), "record-layers");
    if (r.type == PAGES) {
        need((std::uint64_t{r.tokens} + h.window - 1) / h.window <= 1024, "limit-run");
        need(r.payload_bytes == for_pages(r, h, [](const PagePlace&) {}), "record-length");
    } else {
        std::uint64_t largest = 0;
        for (const std::uint32_t i : rows_layers(r, h)) largest = std::max(largest, h.layers[i].row_bytes());
        need(r.tokens == 1 || r.tokens * largest <= 16ull << 20, "limit-rows");
        need(r.payload_bytes >= align(32 * rows_layers(r, h).size(), 64), "record-length");
        need(r.payload_bytes % 64 == 0, "record-length");
    }
}

// A record and the tokens that are read from it, from the first to before the last.
struct Stretch {
    std::size_t record;
    std::uint64_t first, last;
};

// Clause 4.2: one sequence, while its records come in.
class Sequence {
public:
    explicit Sequence(const Header& h) : has_{!h.groups.empty(), !h.exact.empty()} {}

    std::vector<Stretch> coded, exact;
    std::uint64_t tokens = 0;

    void add(const Record& r, std::size_t place) {
        const std::uint64_t a = r.first, b = r.token_end();
        if (r.type == REWIND) {
            for (int side = 0; side < 2; ++side) {
                need(!has_[side] || a <= ends_[side], "coverage-tokens");
                ends_[side] = a;
            }
            floor_ = std::min(floor_, a);
            cut(coded, a), cut(rows_, a), cut(exact, a);
        } else if (r.type == PAGES) {
            need(a <= ends_[0], "coverage-tokens");
            need(floor_ <= a, "coverage-order");
            while (!rows_.empty() && rows_.front().last <= a) settle();
            if (!rows_.empty() && rows_.front().first < a) {
                coded.push_back({rows_.front().record, rows_.front().first, a});
                rows_.front().first = a;
            }
            while (!rows_.empty() && rows_.front().last <= b) rows_.pop_front();
            if (!rows_.empty() && rows_.front().first < b) rows_.front().first = b;
            coded.push_back({place, a, b});
            ends_[0] = std::max(ends_[0], b);
            floor_ = b;
        } else {
            for (int side = r.flags ? 1 : 0; side < 2; ++side) {
                if (!has_[side]) continue;
                need(a == ends_[side], "coverage-tokens");
                ends_[side] = b;
                if (side == 0)
                    rows_.push_back({place, a, b});
                else
                    exact.push_back({place, a, b});
            }
        }
    }

    void finish(bool torn) {
        while (!rows_.empty()) settle();
        tokens = has_[0] ? ends_[0] : has_[1] ? ends_[1] : 0;
        if (has_[0] && has_[1]) {
            need(torn || ends_[0] == ends_[1], "coverage-tokens");
            tokens = std::min(ends_[0], ends_[1]);
        }
        cut(coded, tokens), cut(exact, tokens);
    }

private:
    void settle() {
        coded.push_back(rows_.front());
        rows_.pop_front();
    }
    template <class Stretches>
    static void cut(Stretches& stretches, std::uint64_t end) {
        while (!stretches.empty() && stretches.back().first >= end) stretches.pop_back();
        if (!stretches.empty()) stretches.back().last = std::min(stretches.back().last, end);
    }

    bool has_[2];
    std::uint64_t ends_[2] = {0, 0}, floor_ = 0;
    std::deque<Stretch> rows_;
};

}  // namespace dquant::host
