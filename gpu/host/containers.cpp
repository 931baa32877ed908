// Containers of one plan decoded one by one, for sanitizers and fuzzers: the readers of device code need no warp.
//
// Standard input, little-endian: u32 entries [2^p], u32 advance [2^p], then containers, each `DQ_WORDS` words of one
// sub-stream one after another.  Standard output: for each its symbols, a byte each, and a byte of status.
//
// With clang, -fsanitize=fuzzer -DDQ_FUZZER makes a fuzz target of it; the file DQ_TABLES names holds the tables.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "dquant/prefix.cuh"
#include "dquant/rans.cuh"

#include "../kernels/plan.cuh"

using namespace dquant;

template <bool R, class C> struct Kind {
    typedef PrefixReader<C> Reader;
    typedef u32 Word;
};
template <class C> struct Kind<true, C> {
    typedef RansReader<C> Reader;
    typedef u16 Word;
};
typedef Kind<Plan::rans, Plan>::Word Word;

static std::vector<u32> entries(1 << Plan::precision), advance(1 << Plan::precision);

// Symbols of all letters, and the status behind them.
static std::vector<u8> decode(const Word* container) {
    // The last lane of a tile: a read one word too far leaves the memory.
    std::vector<Word> tile(Plan::words * LANES);
    for (int i = 0; i < Plan::words; ++i) tile[i * LANES + LANES - 1] = container[i];
    Kind<Plan::rans, Plan>::Reader reader(tile.data() + LANES - 1);
    const LetterTables tables{entries.data(), advance.data()};
    std::vector<u8> found;
    for (int head = 0; head < Shape<Plan>::heads; ++head) {
        for (int i = 0; i < Shape<Plan>::per_head; ++i) {
            const u32 entry = reader.letter(tables);
            for (int k = 0; k < Plan::letter; ++k)
                if (i * Plan::letter + k < Plan::head_dim) found.push_back((u8)symbol<Plan>(entry, k));
        }
    }
    found.push_back(reader.status(1, 2));
    return found;
}

static bool read_tables(std::FILE* from) {
    return std::fread(entries.data(), 4, entries.size(), from) == entries.size() &&
           std::fread(advance.data(), 4, advance.size(), from) == advance.size();
}

#ifdef DQ_FUZZER
extern "C" int LLVMFuzzerInitialize(int*, char***) {
    std::FILE* from = std::fopen(std::getenv("DQ_TABLES"), "rb");
    if (!from || !read_tables(from)) std::abort();
    std::fclose(from);
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const u8* data, size_t size) {
    std::vector<Word> words(Plan::words);
    for (size_t i = 0; i < size && i < words.size() * sizeof(Word); ++i)
        words[i / sizeof(Word)] |= (Word)((u32)data[i] << (8 * (i % sizeof(Word))));
    const std::vector<u8> found = decode(words.data());
    for (size_t i = 0; i + 1 < found.size(); ++i)
        if (found[i] >= Plan::levels) std::abort();
    return 0;
}
#else
int main() {
    if (!read_tables(stdin)) return 1;
    std::vector<Word> words(Plan::words);
    while (std::fread(words.data(), sizeof(Word), words.size(), stdin) == words.size()) {
        const std::vector<u8> found = decode(words.data());
        std::fwrite(found.data(), 1, found.size(), stdout);
    }
    return 0;
}
#endif
