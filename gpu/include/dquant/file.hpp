// Reading `.dqkv` files in C++17, header-only: no CUDA, no library but the standard one.
//
//     dquant::host::File file("cache.dqkv");
//     std::vector<float> keys = file.read(/*layer*/ 0, dquant::host::KEY, /*first*/ 300, /*last*/ 400);   // [token][head][value]
//
// Everything is checked before it is used; what does not hold raises `Refused` with the reason code of the
// specification (formats/dqkv.md, clause 9.4).  Exact rows may be compressed: define DQUANT_ZSTD and link libzstd to
// read those, otherwise they are refused as `rows-zstd`.  FP32 numbers are the same bits as those of every other reader;
// compile without -ffast-math.
#pragma once

#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "host/bytes.hpp"
#include "host/decode.hpp"
#include "host/header.hpp"
#include "host/records.hpp"

#if defined(__unix__) || defined(__APPLE__)
#define DQUANT_MAP 1
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace dquant::host {

enum Kind { KEY = 0, VALUE = 1 };

// The bytes of a file: mapped where that is possible, else read.
class Mapped {
public:
    explicit Mapped(const std::string& path) {
#ifdef DQUANT_MAP
        const int handle = ::open(path.c_str(), O_RDONLY);
        struct stat status {};
        if (handle < 0 || ::fstat(handle, &status) != 0) {
            if (handle >= 0) ::close(handle);
            throw std::runtime_error("cannot open " + path);
        }
        size_ = static_cast<std::uint64_t>(status.st_size);
        void* data = size_ ? ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, handle, 0) : nullptr;
        ::close(handle);
        if (size_ && data == MAP_FAILED) throw std::runtime_error("cannot map " + path);
        data_ = static_cast<const std::uint8_t*>(data);
#else
        std::ifstream in(path, std::ios::binary);
        if (!in) throw std::runtime_error("cannot open " + path);
        copy_.assign(std::istreambuf_iterator<char>(in), {});
        data_ = reinterpret_cast<const std::uint8_t*>(copy_.data());
        size_ = copy_.size();
#endif
    }
    ~Mapped() {
#ifdef DQUANT_MAP
        if (size_) ::munmap(const_cast<std::uint8_t*>(data_), size_);
#endif
    }
    Mapped(const Mapped&) = delete;
    Mapped& operator=(const Mapped&) = delete;
    Bytes bytes() const { return {data_, size_}; }

private:
    const std::uint8_t* data_ = nullptr;
    std::uint64_t size_ = 0;
    std::vector<char> copy_;
};

class File {
public:
    // Opens and checks header, record log and sequences (clause 9.1).
    explicit File(const std::string& path) : mapped_(std::make_unique<Mapped>(path)), data_(mapped_->bytes()) { open(); }

    // Of bytes that outlive the object.
    explicit File(Bytes data) : data_(data) { open(); }

    // Of bytes that outlive the object, whose header block the caller has read: a file that grows is opened again and again.
    File(Bytes data, Header header) : data_(data), header_(std::move(header)) { read_log(); }

    const Header& header() const { return header_; }
    const std::vector<Record>& records() const { return records_; }
    bool torn() const { return torn_; }
    std::uint64_t tokens(std::uint32_t sequence = 0) const { return sequences_.at(sequence).tokens; }

    // Tokens `first` to before `last` of a layer (by place in the file), FP32 [token][head][value].
    std::vector<float> read(std::uint32_t layer, Kind kind, std::uint64_t first, std::uint64_t last,
                            std::uint32_t sequence = 0) const {
        const Layer& spec = header_.layers.at(layer);
        const Sequence& log = sequences_.at(sequence);
        if (first > last || last > log.tokens || spec.storage == ABSENT)
            throw std::out_of_range("tokens or a layer that the file does not hold");
        std::vector<float> out((last - first) * spec.values());
        for (const Stretch& stretch : spec.storage == CODED ? log.coded : log.exact) {
            const std::uint64_t a = std::max(first, stretch.first), b = std::min(last, stretch.last);
            if (a >= b) continue;
            const Record& record = records_[stretch.record];
            float* to = out.data() + (a - first) * spec.values();
            if (record.type == PAGES)
                read_pages(record, layer, kind, a - record.first, b - record.first, to);
            else
                read_rows(record, layer, kind, a - record.first, b - record.first, to);
        }
        return out;
    }

    // Coded tokens that follow one another: pages as kernels take them, each of `page_bytes`, the last filled up with zeros.
    struct PageRun {
        std::uint64_t first = 0, tokens = 0;
        std::vector<std::uint8_t> pages;
    };

    // All coded tokens of one of the header's head groups.  A run ends where an exact token follows or a page that is not
    // full.
    std::vector<PageRun> page_runs(std::uint32_t group, std::uint32_t sequence = 0) const {
        const std::uint64_t page_bytes = header_.groups.at(group).profile->page_bytes(header_.window);
        std::vector<PageRun> runs;
        std::uint64_t end = 0;
        for (const Stretch& stretch : sequences_.at(sequence).coded) {
            const Record& record = records_[stretch.record];
            if (record.type != PAGES) continue;
            const std::uint64_t tokens = stretch.last - stretch.first;
            if (runs.empty() || stretch.first != end || runs.back().tokens % header_.window)
                runs.push_back({stretch.first, 0, {}});
            PageRun& run = runs.back();
            const Bytes crcs = page_table(record);
            std::uint64_t number = 0;
            for_pages(record, header_, [&](const PagePlace& p) {
                const std::uint32_t crc = crcs.get<std::uint32_t>(4 * number++);
                if (p.group != group || std::uint64_t{p.window} * header_.window >= tokens) return;
                const Bytes page = payload(record).part(p.at, p.size);
                need(crc32c(page) == crc, "page-crc");
                run.pages.insert(run.pages.end(), page.data, page.data + page.size);
                run.pages.resize(run.pages.size() + page_bytes - page.size);
            });
            run.tokens += tokens;
            end = stretch.last;
        }
        return runs;
    }

    // Clause 9.3: the reason codes of everything that is wrong.
    std::vector<std::string> verify() const {
        std::vector<std::string> codes;
        std::vector<Record> records;
        bool torn = torn_;
        try {
            torn = walk(records);
            sequences_of(records, torn);
        } catch (const Refused& refused) {
            codes.push_back(refused.code);
            records = records_;
        }
        if (torn) codes.push_back("log-torn");
        for (const Record& record : records) verify_record(record, records, codes);
        return codes;
    }

private:
    void open() {
        header_ = HeaderReader::read(data_);
        read_log();
    }

    void read_log() {
        need(data_.size >= header_.block_bytes, "header-truncated");
        if (!read_index()) torn_ = walk(records_);
        sequences_ = sequences_of(records_, torn_);
    }

    Bytes payload(const Record& r) const { return data_.part(r.payload(), r.payload_bytes); }

    std::optional<Record> at(std::uint64_t offset) const {
        if (offset > data_.size || data_.size - offset < 64) return {};
        return record_at(data_.part(offset, 64), offset, header_.salt);
    }

    bool fits(const Record& r) const {
        return r.payload_bytes <= data_.size - r.payload() && r.end() <= align(data_.size, 4096) && r.end() <= data_.size;
    }

    // Clause 9.1, point 2: all records by trailer and INDEX; false if anything about them is not as it should be.
    bool read_index() {
        const Bytes t = data_.part(data_.size - 64, 64);
        if (std::memcmp(t.data, "DQKT", 4) != 0 || t.get<std::uint16_t>(4) != 1 || t.get<std::uint16_t>(6) != 0) return false;
        if (crc32c(t.part(0, 60)) != t.get<std::uint32_t>(60) || t.part(40, 20).any()) return false;
        const std::uint64_t offset = t.get<std::uint64_t>(8), count = t.get<std::uint32_t>(36);
        if (std::memcmp(t.data + 24, header_.salt, 8) != 0 || t.get<std::uint64_t>(16) != data_.size || offset % 4096)
            return false;
        if (offset < header_.block_bytes || data_.size < 128 + 64 * count || offset > data_.size - 128 - 64 * count)
            return false;
        const std::optional<Record> index = at(offset);
        if (!index || index->type != INDEX || index->version != 1 || index->payload_bytes != data_.size - offset - 64 ||
            index->epoch != t.get<std::uint32_t>(32) || 64 * count > 256ull << 20 || damage(*index))
            return false;
        std::vector<Record> records;
        std::uint64_t next = header_.block_bytes;
        try {
            for (std::uint64_t i = 0; i < count; ++i) {
                const auto record = record_at(data_.part(index->payload() + 64 * i, 64), next, header_.salt);
                if (!record || !fits(*record)) return false;
                check_record(*record, header_, records.size(), records.empty() ? 0 : records.back().epoch);
                records.push_back(*record);
                next = record->end();
            }
            check_record(*index, header_, records.size(), records.empty() ? 0 : records.back().epoch);
        } catch (const Refused&) {
            return false;
        }
        if (next != offset) return false;
        records.push_back(*index);
        records_ = std::move(records);
        torn_ = false;
        return true;
    }

    // Clause 9.1, points 3 and 4: the records by their headers; returns whether the log is torn.
    bool walk(std::vector<Record>& records) const {
        std::uint64_t next = header_.block_bytes;
        while (next < data_.size) {
            const std::optional<Record> record = at(next);
            if (!record) {
                for (std::uint64_t later = align(next + 1, 4096); later < data_.size; later += 4096) {
                    const auto behind = at(later);
                    need(!behind || behind->number < records.size(), "record-header");
                }
                break;
            }
            check_record(*record, header_, records.size(), records.empty() ? 0 : records.back().epoch);
            if (!fits(*record)) break;
            records.push_back(*record);
            next = record->end();
        }
        if (!records.empty() && damage(records.back())) {
            next = records.back().offset;
            records.pop_back();
        }
        return records.empty() || records.back().type != INDEX || next != data_.size;
    }

    std::vector<Sequence> sequences_of(const std::vector<Record>& records, bool torn) const {
        std::vector<Sequence> found(header_.sequences, Sequence(header_));
        for (std::size_t i = 0; i < records.size(); ++i)
            if (records[i].says_tokens()) found[records[i].sequence].add(records[i], i);
        for (Sequence& sequence : found) sequence.finish(torn);
        return found;
    }

    // The table a payload begins with: `used` of its `size` bytes.
    Bytes table(const Record& r, std::uint64_t size, std::uint64_t used) const {
        const Bytes whole = payload(r).part(0, size);
        need(crc32c(whole) == r.table_crc, "record-table");
        need(!whole.part(used, size - used).any(), "table-padding");
        return whole;
    }
    Bytes page_table(const Record& r) const {
        return table(r, page_table_bytes(r, header_), 4 * header_.groups.size() * windows_of(r, header_));
    }

    // Clause 4.4.
    std::vector<Block> blocks(const Record& r) const {
        const auto& layers = rows_layers(r, header_);
        std::uint64_t at = align(32 * layers.size(), 64);
        const Bytes entries = table(r, at, 32 * layers.size());
        std::vector<Block> found;
        for (std::size_t i = 0; i < 2 * layers.size(); ++i) {
            const Bytes entry = entries.part(16 * i, 16);
            Block block{layers[i / 2], static_cast<int>(i % 2), entry.get<std::uint8_t>(0), entry.get<std::uint32_t>(4), at,
                        entry.get<std::uint64_t>(8)};
            need(!entry.part(1, 3).any(), "record-reserved");
            need(block.size >= 1 && block.size <= r.tokens * header_.layers[block.layer].row_bytes(), "rows-length");
            need(at <= r.payload_bytes && block.size <= r.payload_bytes - at, "rows-length");
            found.push_back(block);
            at += align(block.size, 64);
        }
        need(at == r.payload_bytes, "record-length");
        return found;
    }

    struct Part {
        std::uint64_t at, size;
        std::uint32_t crc;
        const char* code;
    };
    // Everything behind a record's table, with the code of damage to it.
    std::vector<Part> parts(const Record& r) const {
        std::vector<Part> found;
        if (r.type == PAGES) {
            const Bytes crcs = page_table(r);
            for_pages(r, header_, [&](const PagePlace& p) {
                found.push_back({p.at, p.size, crcs.get<std::uint32_t>(4 * found.size()), "page-crc"});
            });
        } else if (r.type == ROWS) {
            for (const Block& block : blocks(r)) found.push_back({block.at, block.size, block.crc, "rows-crc"});
        } else {
            found.push_back({0, r.payload_bytes, r.table_crc, "payload-crc"});
        }
        return found;
    }
    bool damage(const Record& r) const {
        try {
            for (const Part& part : parts(r))
                if (crc32c(payload(r).part(part.at, part.size)) != part.crc) return true;
        } catch (const Refused&) {
            return true;
        }
        return false;
    }

    void read_pages(const Record& r, std::uint32_t layer, Kind kind, std::uint64_t first, std::uint64_t last,
                    float* out) const {
        const Bytes crcs = page_table(r);
        const std::uint64_t values = header_.layers[layer].values();
        std::uint64_t number = 0;
        std::vector<float> rows;
        for_pages(r, header_, [&](const PagePlace& p) {
            const std::uint32_t crc = crcs.get<std::uint32_t>(4 * number++);
            const Group& group = header_.groups[p.group];
            const std::uint64_t begin = std::uint64_t{p.window} * header_.window;
            const std::uint64_t a = std::max(first, begin), b = std::min(last, begin + p.tokens);
            if (group.layer != layer || a >= b) return;
            const Bytes page = payload(r).part(p.at, p.size);
            need(crc32c(page) == crc, "page-crc");
            const std::uint64_t n = std::uint64_t{group.profile->heads} * group.profile->dim;
            rows.resize(p.tokens * n);
            Page(page, *group.profile).decode(kind, p.tokens, rows.data(), n, false);
            for (std::uint64_t token = a; token < b; ++token)
                std::copy_n(rows.data() + (token - begin) * n, n,
                            out + (token - first) * values + std::uint64_t{group.first_head} * group.profile->dim);
        });
    }

    void read_rows(const Record& r, std::uint32_t layer, Kind kind, std::uint64_t first, std::uint64_t last,
                   float* out) const {
        const std::uint64_t values = header_.layers[layer].values();
        for (const Block& block : blocks(r)) {
            if (block.layer != layer || block.kind != kind) continue;
            const Bytes stored = payload(r).part(block.at, block.size);
            need(crc32c(stored) == block.crc, "rows-crc");
            const std::vector<float> rows = decode_rows(stored, block.encoding, r.tokens, header_.layers[layer]);
            std::copy(rows.begin() + std::ptrdiff_t(first * values), rows.begin() + std::ptrdiff_t(last * values), out);
        }
    }

    // Runs `f` and notes the code of a refusal.
    template <class F>
    static void noting(std::vector<std::string>& codes, F f) {
        try {
            f();
        } catch (const Refused& refused) {
            codes.push_back(refused.code);
        }
    }

    void verify_record(const Record& r, const std::vector<Record>& records, std::vector<std::string>& codes) const {
        std::vector<Part> found;
        try {
            found = parts(r);
        } catch (const Refused& refused) {
            codes.push_back(refused.code);
            return;
        }
        std::uint64_t end = found.empty() ? 0 : found[0].at;
        for (const Part& part : found) {
            if (payload(r).part(end, part.at - end).any()) codes.push_back("padding-nonzero");
            if (crc32c(payload(r).part(part.at, part.size)) != part.crc) codes.push_back(part.code);
            end = part.at + part.size;
        }
        if (data_.part(r.payload() + end, r.end() - r.payload() - end).any()) codes.push_back("padding-nonzero");
        if (r.type == PAGES) {
            std::size_t number = 0;
            for_pages(r, header_, [&](const PagePlace& p) {
                const Bytes bytes = payload(r).part(p.at, p.size);
                if (crc32c(bytes) != found[number++].crc) return;  // what is damaged is told once
                const Profile& profile = *header_.groups[p.group].profile;
                const Page page(bytes, profile);
                noting(codes, [&] { need(!page.unused(p.tokens), "page-unused"); });
                std::vector<float> rows(std::uint64_t{p.tokens} * profile.heads * profile.dim);
                for (int kind = 0; kind < 2; ++kind)
                    noting(codes, [&] {
                        page.decode(kind, p.tokens, rows.data(), std::uint64_t{profile.heads} * profile.dim, true);
                    });
            });
        } else if (r.type == ROWS) {
            for (const Block& block : blocks(r))
                noting(codes, [&] {
                    decode_rows(payload(r).part(block.at, block.size), block.encoding, r.tokens, header_.layers[block.layer]);
                });
        } else if (r.type == FILL) {
            if (payload(r).any()) codes.push_back("padding-nonzero");
        } else if (r.type == INDEX && !index_is(r, records)) {
            codes.push_back("index-mismatch");
        }
    }

    // Whether an INDEX record is, byte for byte, what the records before it make of it.
    bool index_is(const Record& r, const std::vector<Record>& records) const {
        const std::uint64_t rows = 64 * std::uint64_t{r.number};
        const std::uint64_t end = align(r.payload() + rows + 64, 4096);
        if (r.end() != end || r.payload_bytes != end - r.payload()) return false;
        if (r.version != 1 || r.first || r.tokens || r.sequence || r.flags) return false;
        for (std::uint32_t i = 0; i < r.number; ++i)
            if (std::memcmp(data_.part(r.payload() + 64ull * i, 64).data, data_.part(records[i].offset, 64).data, 64) != 0)
                return false;
        const Bytes t = data_.part(end - 64, 64);
        return !data_.part(r.payload() + rows, end - 64 - r.payload() - rows).any() && std::memcmp(t.data, "DQKT", 4) == 0 &&
               t.get<std::uint16_t>(4) == 1 && t.get<std::uint16_t>(6) == 0 && t.get<std::uint64_t>(8) == r.offset &&
               t.get<std::uint64_t>(16) == end && std::memcmp(t.data + 24, header_.salt, 8) == 0 &&
               t.get<std::uint32_t>(32) == r.epoch && t.get<std::uint32_t>(36) == r.number && !t.part(40, 20).any() &&
               t.get<std::uint32_t>(60) == crc32c(t.part(0, 60));
    }

    std::unique_ptr<Mapped> mapped_;
    Bytes data_;
    Header header_;
    std::vector<Record> records_;
    std::vector<Sequence> sequences_;
    bool torn_ = true;
};

}  // namespace dquant::host
