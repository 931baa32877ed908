// The fuzz targets of the reader in C++.  Each takes any bytes, returns the code they are refused for ("" if they are not),
// and ends the program if the reader did something it must not.
//
// The same inputs mean the same as to the targets of `dquantcodec.testing`; files that inputs are put into are read
// from the folder that DQ_BASES names; `dquantcodec.testing.targets.bases` makes them.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#include "packed.hpp"

namespace dquant::fuzz {

using host::File;
using host::Refused;

inline void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "%s\n", what);
    std::abort();
}

// A file that inputs are put into, its header, and where its last record begins.
struct Base {
    Buffer data;
    Header header;
    std::uint64_t last = 0;

    explicit Base(const char* name) {
        const char* folder = std::getenv("DQ_BASES");
        require(folder, "DQ_BASES names no folder");
        std::ifstream in(std::string(folder) + "/" + name + ".dqkv", std::ios::binary);
        require(in.good(), name);
        data.assign(std::istreambuf_iterator<char>(in), {});
        const File file{view(data)};
        header = file.header();
        last = file.records().empty() ? data.size() : file.records().back().offset;
    }
    // The first bytes of the file with others behind them.
    Buffer with(std::uint64_t bytes, const Buffer& rest) const {
        Buffer made(data.begin(), data.begin() + std::ptrdiff_t(bytes));
        made.insert(made.end(), rest.begin(), rest.end());
        return made;
    }
};

inline std::string header(Bytes data) {
    Buffer block = blocks_of(data);
    if (data.size < 1 || data.data[0] == 0x89) {
        static const std::uint8_t start[] = {0x89, 'D', 'Q', 'K', '\r', '\n', 0x1A, '\n', 1, 0, 0, 0};
        std::copy_n(start, 12, block.begin());
        store(block, 12, static_cast<std::uint32_t>(block.size()));
    }
    repair(block, true, false, false);
    try {
        host::HeaderReader::read(view(block));
    } catch (const Refused& refused) {
        return refused.code;
    }
    return "";
}

inline void require_records_in_a_row(const File& file, std::uint64_t bytes) {
    std::uint64_t next = file.header().block_bytes;
    for (const Record& record : file.records()) {
        require(record.offset == next && record.end() > next && record.end() <= bytes, "records leave gaps or the file");
        next = record.end();
    }
}

// Reads the last `most` tokens of everything, whose `findings` must not be none if anything is refused.
inline void read(const File& file, std::uint64_t most, const std::vector<std::string>& findings) {
    for (std::uint32_t sequence = 0; sequence < file.header().sequences; ++sequence)
        for (std::uint32_t layer = 0; layer < file.header().layers.size(); ++layer)
            for (const host::Kind kind : {host::KEY, host::VALUE}) {
                if (file.header().layers[layer].storage == host::ABSENT) continue;
                const std::uint64_t tokens = file.tokens(sequence);
                try {
                    file.read(layer, kind, tokens - std::min(tokens, most), tokens, sequence);
                } catch (const Refused&) {
                    require(!findings.empty(), "verification finds nothing, reading does");
                }
            }
}

inline std::string records(Bytes data) {
    static const Base base("rotated-exact");
    Buffer whole = unpack_blocks(data, view(base.data).part(0, base.header.block_bytes));
    repair(whole, false, true, true, &base.header);
    try {
        const File file{view(whole), base.header};
        require_records_in_a_row(file, whole.size());
        read(file, 3, {"not verified here"});
    } catch (const Refused& refused) {
        return refused.code;
    }
    return "";
}

inline std::string index(Bytes data) {
    static const Base base("exact-exact");
    static const std::uint64_t tokens = File{view(base.data)}.tokens();
    Buffer body = blocks_of(data);
    if (data.size > 64) {
        std::fill(body.end() - 64, body.end(), 0);
        std::copy_n(data.data + data.size - 64, 64, body.end() - 64);
    }
    Buffer whole = base.with(base.last, body);
    repair(whole, false, true, true, &base.header, base.last);
    try {
        const File file{view(whole), base.header};
        const auto findings = file.verify();
        if (file.tokens() != tokens || file.torn())
            require(!findings.empty(), "the index hides tokens and verification finds nothing");
    } catch (const Refused& refused) {
        return refused.code;
    }
    return "";
}

// The layer that the first byte chooses: its keys' container, alone in a page of one token.
inline std::string container(Bytes data) {
    static const Base base("containers");
    const host::Group& group = base.header.groups[data.size ? data.data[0] % base.header.groups.size() : 0];
    const host::Profile& profile = *group.profile;
    const host::Stream& stream = profile.streams[host::KEY];
    Buffer page(profile.page_bytes(1));
    const std::uint64_t size = stream.word_bytes();
    for (std::uint64_t i = 0; i + 1 < data.size && i < size * stream.words; ++i)
        page[profile.head_bytes + stream.words_at + i / size * size * 32 + i % size] = data.data[1 + i];
    std::vector<float> row(std::size_t{profile.heads} * profile.dim);
    std::string code;
    for (const bool strict : {false, true}) {
        try {
            host::Page(view(page), profile).decode(host::KEY, 1, row.data(), row.size(), strict);
        } catch (const Refused& refused) {
            code = refused.code;
            require(strict || code != "container-padding", "padding is checked without being asked");
        }
    }
    return code;
}

// The first byte says which checksums are made right.
inline std::string file(Bytes data) {
    const int flags = data.size ? data.data[0] : 0;
    Buffer whole = unpack_blocks(data.size ? data.part(1, data.size - 1) : data);
    std::optional<Header> header = repair(whole, flags & 1, flags & 2, flags & 4);
    try {
        const File opened = header ? File{view(whole), std::move(*header)} : File{view(whole)};
        require_records_in_a_row(opened, whole.size());
        read(opened, whole.size(), opened.verify());
    } catch (const Refused& refused) {
        return refused.code;
    }
    return "";
}

typedef std::string (*Target)(Bytes);

inline Target target(const std::string& name) {
    const std::pair<const char*, Target> targets[] = {
        {"header", header}, {"records", records}, {"index", index}, {"container", container}, {"file", file}};
    for (const auto& [known, function] : targets)
        if (name == known) return function;
    require(false, "DQ_TARGET is one of header, records, index, container, file");
    return nullptr;
}

}  // namespace dquant::fuzz
