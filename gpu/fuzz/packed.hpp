// Inputs of the fuzz targets in C++: files in packed form, and checksums made right, as `dquantcodec.testing` has them.
#pragma once

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "dquant/file.hpp"

namespace dquant::fuzz {

using host::Bytes;
using host::Header;
using host::Record;
typedef std::vector<std::uint8_t> Buffer;

constexpr std::uint64_t BLOCK = 4096, MOST_UNPACKED = 1 << 17;

inline Bytes view(const Buffer& data) { return {data.data(), data.size()}; }

template <class T>
void store(Buffer& made, std::uint64_t at, T value) {
    std::memcpy(made.data() + at, &value, sizeof value);
}

// Bytes filled up with zeros to whole blocks, at least one.
inline Buffer blocks_of(Bytes data) {
    Buffer made(std::max(BLOCK, host::align(data.size, BLOCK)));
    std::copy_n(data.data, data.size, made.begin());
    return made;
}

// `start` and behind it the parts of a file, u16 lengths and contents, each of which starts at a block.
inline Buffer unpack_blocks(Bytes data, Bytes start = {}) {
    std::uint64_t size = start.size;
    const auto parts = [&](auto part) {
        std::uint64_t at = 0, to = start.size;
        while (data.size - at >= 2 && to - start.size < MOST_UNPACKED) {
            const std::uint64_t said = data.get<std::uint16_t>(at), held = std::min(said, data.size - at - 2);
            part(data.part(at + 2, held), to);
            at += 2 + held;
            to += std::max(BLOCK, host::align(held, BLOCK));
        }
        size = to;
    };
    parts([](Bytes, std::uint64_t) {});
    Buffer made(size);
    std::copy_n(start.data, start.size, made.begin());
    parts([&](Bytes part, std::uint64_t to) { std::copy_n(part.data, part.size, made.data() + to); });
    return made;
}

// Checksums of a record at `offset`, of its table, and (`bodies`) of what the table lists.
inline void repair_record(Buffer& made, std::uint64_t offset, const Header* header, bool bodies) {
    std::memcpy(made.data() + offset + 40, made.data() + 32, 8);  // the salt
    const Bytes raw = view(made).part(offset, 64);
    Record r;
    r.type = raw.get<std::uint16_t>(4);
    r.payload_bytes = raw.get<std::uint64_t>(8);
    r.tokens = raw.get<std::uint32_t>(24);
    r.flags = raw.get<std::uint32_t>(36);
    const std::uint64_t payload = offset + 64;
    if (r.payload_bytes <= made.size() - payload) {
        const std::uint64_t end = payload + r.payload_bytes;
        std::uint64_t table_end = end;
        const auto crc = [&](std::uint64_t at, std::uint64_t size) { return host::crc32c(view(made).part(at, size)); };
        if (header && r.type == host::PAGES && !header->groups.empty() && r.tokens > 0 && r.tokens <= 1 << 16) {
            table_end = payload + host::page_table_bytes(r, *header);
            if (bodies && host::for_pages(r, *header, [](const host::PagePlace&) {}) == r.payload_bytes) {
                std::uint64_t entry = payload;
                host::for_pages(r, *header, [&](const host::PagePlace& p) {
                    store(made, entry, crc(payload + p.at, p.size));
                    entry += 4;
                });
            }
        } else if (header && r.type == host::ROWS) {
            const std::uint64_t blocks = 2 * host::rows_layers(r, *header).size();
            table_end = payload + host::align(16 * blocks, 64);
            std::uint64_t at = table_end;
            for (std::uint64_t entry = payload; table_end <= end && entry < payload + 16 * blocks; entry += 16) {
                const std::uint64_t size = view(made).get<std::uint64_t>(entry + 8);
                if (bodies && at <= end && size <= end - at) store(made, entry + 4, crc(at, size));
                at += host::align(std::min<std::uint64_t>(size, made.size()), 64);
            }
        } else if (r.type == host::INDEX && r.payload_bytes >= 64) {
            store(made, end - 4, crc(end - 64, 60));
        }
        if (table_end <= end) store(made, offset + 52, crc(payload, table_end - payload));
    }
    store(made, offset + 60, host::crc32c(view(made).part(offset, 60)));
}

// Checksums made right, as far as the structure can be followed; records before byte `first` are left as they are.
// Returns the header, where it was read for that and is sound.
inline std::optional<Header> repair(Buffer& made, bool header, bool records, bool bodies, const Header* known = nullptr,
                                    std::uint64_t first = BLOCK) {
    const std::uint64_t size = made.size() < 16 ? 0 : view(made).get<std::uint32_t>(12);
    if (header && size >= 128 && size <= made.size()) {
        const std::uint32_t before = host::crc32c(view(made).part(0, 124));
        store(made, 124, host::crc32c(view(made).part(128, size - 128), before));
    }
    std::optional<Header> read;
    if (!records || size % BLOCK || made.size() < 64) return read;
    if (!known) {
        try {
            read = host::HeaderReader::read(view(made));
            known = &*read;
        } catch (const host::Refused&) {
        }
    }
    for (std::uint64_t at = std::max(first, size); at + 64 <= made.size(); at += BLOCK)
        if (std::memcmp(made.data() + at, "DQKR", 4) == 0) repair_record(made, at, known, bodies);
    return read;
}

}  // namespace dquant::fuzz
