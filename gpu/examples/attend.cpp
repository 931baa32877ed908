// Decode attention on a GPU over a layer of a `.dqkv` file, with nothing but the headers in gpu/include, and the result
// beside a stored one.
//
//     g++ -std=c++17 -O2 -Igpu/include gpu/examples/attend.cpp -ldl -o attend
//     ./attend gpu/examples/attend.dqkv gpu/examples/attend.bin --headers gpu/include
//
// `attend.bin` holds 32-bit words, little-endian: how many query heads Q, head size D and tokens of a second, shorter
// sequence, then FP32 queries [Q][D] and, of the whole sequence and of its first tokens, outputs [2][Q][D] and natural
// log-sum-exps [2][Q] (tools/attend_example.py makes both files).  NVRTC, the run-time compiler,
// is found in the system's folders and in LD_LIBRARY_PATH.  --compile ARCHITECTURE stops after compiling, which takes no
// GPU; --driver names another driver's library, which is how the example is tested without one.  Files whose exact rows are compressed need -DDQUANT_ZSTD and -lzstd.
//
// What an engine does once a layer: read the plan from the file, compile for its numbers, make the tables, lay pages into a
// pool.  And once a step: fill in AttendParams and launch two kernels.  Plans that rotate are taken, whose kernels need
// the least data beside pages; for plans with variance classes see dquantcodec/cuda/group_attend.py.

#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <sstream>

#include "device.hpp"
#include "dquant/attend_params.cuh"
#include "dquant/file.hpp"

using namespace dquant::host;

// The kernels for a plan's numbers, which come as -D options.  A block gets as many warps as fit into shared memory, and the
// host learns what follows from that by reading `attend_numbers`.
static const char* const KERNELS = R"(
#include "dquant/attend_finish.cuh"
#include "dquant/attend_pages.cuh"

template <int WARPS> struct Constants {
    static constexpr int heads = DQ_HEADS, head_dim = DQ_HEAD_DIM, window = DQ_WINDOW, substreams = DQ_SUBSTREAMS;
    static constexpr int group = DQ_GROUP, positions = 1, warps = WARPS, element = 0, out_element = 0;
    static constexpr int finish_threads = 256;
    static constexpr bool masked = false, soft_cap = false, grouped = false;
    typedef dquant::AttendParams Params;
    struct Key {
        static constexpr int levels = DQ_KEY_LEVELS, letter = DQ_KEY_LETTER, precision = DQ_KEY_PRECISION, words = DQ_KEY_WORDS;
        static constexpr bool rans = DQ_KEY_RANS, mean = DQ_KEY_MEAN, mid_tread = DQ_KEY_MID_TREAD;
    };
    struct Value {
        static constexpr int levels = DQ_VALUE_LEVELS, letter = DQ_VALUE_LETTER, precision = DQ_VALUE_PRECISION, words = DQ_VALUE_WORDS;
        static constexpr bool rans = DQ_VALUE_RANS, mean = false, mid_tread = DQ_VALUE_MID_TREAD;
    };
};

template <int WARPS> DQ_CONSTANT int fitting() {
    if constexpr (WARPS == 1 || dquant::AttendShape<Constants<WARPS>>::shared_bytes <= DQ_SHARED_BYTES)
        return WARPS;
    else
        return fitting<WARPS / 2>();
}
typedef Constants<fitting<8>()> C;
typedef dquant::AttendShape<C> Shape;
static_assert(Shape::page_bytes == DQ_PAGE_BYTES, "pages as the file has them");

extern "C" __device__ int attend_numbers[6] = {
    Shape::threads, Shape::shared_bytes, Shape::groups, Shape::passes * Shape::rows / 4,
    Shape::partial_floats, Shape::state_floats
};

extern "C" __global__ void __launch_bounds__(Shape::threads, 1)
    attend_pages(const __grid_constant__ dquant::AttendParams p) { dquant::attend_pages<C>(p); }
extern "C" __global__ void __launch_bounds__(256)
    attend_finish(const __grid_constant__ dquant::AttendParams p) { dquant::attend_finish<C>(p); }
)";

struct Numbers {
    int threads, shared_bytes, groups, quads, partial_floats, state_floats;
};

static void require(bool holds, const char* what) {
    if (!holds) throw std::runtime_error(what);
}

static int bits_of(int levels) {
    int bits = 0;
    for (int most = levels - 1; most > 0; most /= 2) ++bits;
    return bits;
}

static std::vector<std::string> options(const Profile& plan, int group, int shared_bytes) {
    std::vector<std::string> found;
    const auto define = [&](const std::string& name, std::uint64_t value) {
        found.push_back("-DDQ_" + name + "=" + std::to_string(value));
    };
    define("HEADS", plan.heads);
    define("HEAD_DIM", plan.dim);
    define("WINDOW", plan.window);
    define("SUBSTREAMS", plan.streams[0].substreams);
    define("GROUP", group);
    define("SHARED_BYTES", shared_bytes);
    define("PAGE_BYTES", plan.page_bytes(plan.window));
    for (int kind = 0; kind < 2; ++kind) {
        const Stream& s = plan.streams[kind];
        const std::string name = kind == KEY ? "KEY_" : "VALUE_";
        define(name + "LEVELS", s.levels);
        define(name + "LETTER", s.k);
        define(name + "PRECISION", s.precision);
        define(name + "WORDS", s.words);
        define(name + "RANS", s.coder == RANS);
        define(name + "MEAN", s.mean != 0);
        define(name + "MID_TREAD", s.mid_tread);
    }
    return found;
}

// A letter's symbols side by side.
static std::uint32_t fields_of(std::uint32_t letter, const Stream& s) {
    std::uint32_t fields = 0;
    for (int i = 0; i < s.k; ++i, letter /= s.levels) fields |= letter % s.levels << (i * bits_of(s.levels));
    return fields;
}

// The table that kernels look the next bits (or slots) up in, as `Letters` in attend.cuh has it.
static std::vector<std::uint16_t> table_of(const Stream& s) {
    const int field_bits = bits_of(s.levels) * s.k;
    const std::uint32_t size = 1u << s.precision;
    if (s.coder == RANS) {
        require(field_bits <= 10, "kernels take rANS letters of at most 10 bits");
        std::vector<std::uint16_t> table(2 * size);
        for (std::uint32_t slot = 0; slot < size; ++slot) {
            const std::uint32_t letter = s.table->letter_of_slot[slot], frequency = s.table->frequencies[letter];
            require(frequency < 1024, "kernels take rANS letters with frequencies below 1024");
            const std::uint32_t entry = frequency << 22 | (slot - s.table->starts[letter]) << 12 |
                                        fields_of(letter, s) << (12 - field_bits);
            std::memcpy(&table[2 * slot], &entry, 4);
        }
        return table;
    }
    // Codes stand in their words from the lowest bit on, a code's first bit lowest.
    std::vector<std::uint16_t> table(size);
    const PrefixCode& code = s.table->code;
    const int first_field = field_bits > 10 ? 4 : 6;
    std::uint32_t value = 0, number = 0;
    for (std::uint32_t length = 1; length < code.count.size(); ++length) {
        value <<= 1;
        for (std::uint32_t i = 0; i < code.count[length]; ++i, ++value, ++number) {
            std::uint32_t reversed = 0;
            for (std::uint32_t bit = 0; bit < length; ++bit) reversed |= (value >> bit & 1) << (length - 1 - bit);
            const auto entry = static_cast<std::uint16_t>(fields_of(code.letters[number], s) << first_field | length);
            for (std::uint32_t rest = 0; rest < size >> length; ++rest) table[rest << length | reversed] = entry;
        }
    }
    return table;
}

// Exact tokens as BF16: what a BF16 layer's rows are.
static std::vector<std::uint16_t> exact_rows(const File& file, Kind kind, std::uint64_t first, std::uint64_t last) {
    std::vector<std::uint16_t> rows;
    for (const float x : file.read(0, kind, first, last)) {
        std::uint32_t bits;
        std::memcpy(&bits, &x, 4);
        rows.push_back(static_cast<std::uint16_t>(bits >> 16));
    }
    return rows;
}

struct Stored {
    std::uint32_t heads, dim, tokens;
    std::vector<float> query, out, lse;

    explicit Stored(const std::string& path) {
        std::ifstream in(path, std::ios::binary);
        in.read(reinterpret_cast<char*>(&heads), 12);
        require(bool(in), "the stored results cannot be read");
        const auto read = [&](std::vector<float>& to, std::size_t count) {
            to.resize(count);
            in.read(reinterpret_cast<char*>(to.data()), std::streamsize(4 * count));
            require(bool(in), "the stored results end too early");
        };
        read(query, std::size_t{heads} * dim);
        read(out, 2 * query.size());
        read(lse, 2 * std::size_t{heads});
    }
};

// Of all numbers together, relative to their size.
static double relative_error(const std::vector<float>& found, const std::vector<float>& wanted) {
    double error = 0, size = 0;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
        error += std::pow(double{found[i]} - wanted[i], 2);
        size += std::pow(double{wanted[i]}, 2);
    }
    return std::sqrt(error / size);
}

static double largest_error(const std::vector<float>& found, const std::vector<float>& wanted) {
    double error = 0;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
        const double difference = std::fabs(double{found[i]} - wanted[i]);
        error = difference <= error ? error : difference;  // a NaN stays
    }
    return error;
}

static int run(const std::string& path, const std::string& stored_path, const std::string& headers,
               const std::string& only_compile, const std::string& driver) {
    const File file(path);
    const Header& header = file.header();
    require(header.layers.size() == 1 && header.groups.size() == 1, "the example takes one layer of one head group");
    const Layer& layer = header.layers[0];
    const Profile& plan = *header.groups[0].profile;
    for (const Stream& s : plan.streams) require(!s.grouping && s.rotated, "the example takes plans that rotate");
    require(!plan.streams[VALUE].mean && layer.dtype == BFLOAT16 && (plan.dim & (plan.dim - 1)) == 0,
            "the example takes BF16 layers, values without means, head sizes that are powers of two");
    const Stored stored(stored_path);
    require(stored.dim == plan.dim && stored.heads % plan.heads == 0, "queries of another geometry");
    const int group = static_cast<int>(stored.heads / plan.heads);

    // Pages and the tokens around them.
    const std::vector<File::PageRun> runs = file.page_runs(0);
    require(runs.size() == 1, "the example takes pages that follow one another");
    const File::PageRun& coded = runs[0];
    const std::uint64_t page_bytes = plan.page_bytes(plan.window), pages = coded.pages.size() / page_bytes;
    const std::uint64_t sinks = coded.first, end = coded.first + coded.tokens, recent = file.tokens() - end;
    require(stored.tokens >= sinks && stored.tokens <= end, "the second sequence ends in the pages");
    std::printf("%s: %llu tokens, of them %llu in %llu pages\n", path.c_str(), (unsigned long long)file.tokens(),
                (unsigned long long)coded.tokens, (unsigned long long)pages);

    const auto compile = [&](const std::string& architecture, int shared_bytes) {
        std::vector<std::string> all = options(plan, group, shared_bytes);
        // Nothing that attention computes is promised to the bit, so products and sums may be fused.
        for (const std::string& option :
             {std::string("--std=c++17"), std::string("--ftz=false"), "--gpu-architecture=" + architecture, "-I" + headers})
            all.push_back(option);
        return device::compile(KERNELS, all);
    };
    if (!only_compile.empty()) {
        std::printf("%zu bytes of machine code for %s\n", compile(only_compile, 227 * 1024).size(), only_compile.c_str());
        return 0;
    }
    const device::Device gpu(driver);
    void* module = gpu.load(compile(gpu.architecture, gpu.block_shared_bytes));
    Numbers n;
    const std::vector<int> numbers = gpu.get<int>(gpu.global(module, "attend_numbers"), 6);
    std::memcpy(&n, numbers.data(), sizeof n);
    void* attend_pages = gpu.function(module, "attend_pages", n.shared_bytes);
    void* attend_finish = gpu.function(module, "attend_finish", 0);

    // The pool holds pages in any order, here backwards, and other pages' bytes are never read.  Both sequences share
    // their pages: a block table says which page holds which window.
    std::vector<std::uint8_t> pool((pages + 1) * page_bytes, 0xA5);
    std::vector<dquant::i32> block_table;
    for (std::uint64_t i = 0; i < pages; ++i) {
        std::memcpy(&pool[(pages - i) * page_bytes], &coded.pages[i * page_bytes], page_bytes);
        block_table.push_back(static_cast<dquant::i32>(pages - i));
    }
    block_table.insert(block_table.end(), block_table.begin(), block_table.end());

    std::vector<float> factors(plan.heads * std::size_t{plan.dim});
    for (std::size_t i = 0; i < factors.size(); ++i)
        factors[i] = (*plan.signs)[i] * static_cast<float>(1 / std::sqrt(double(plan.dim)));
    std::vector<float> queries(stored.query);
    queries.insert(queries.end(), stored.query.begin(), stored.query.end());
    const auto twice = [](std::vector<std::uint16_t> rows) {
        rows.insert(rows.end(), rows.begin(), rows.end());
        return rows;
    };

    const int batch = 2;
    const std::size_t slots = std::size_t(gpu.multiprocessors) + std::size_t(batch) * n.groups;
    const std::size_t outputs = std::size_t(batch) * stored.heads * plan.dim, sums = std::size_t(batch) * stored.heads;
    dquant::AttendParams p = {};
    const auto at = [](auto& field, device::Address address) { std::memcpy(&field, &address, sizeof address); };
    at(p.pages, gpu.put(pool));
    p.page_stride = static_cast<dquant::i64>(page_bytes);
    at(p.block_table, gpu.put(block_table));
    p.table_stride = static_cast<dquant::i32>(pages);
    at(p.lengths, gpu.put(std::vector<dquant::i32>{dquant::i32(coded.tokens), dquant::i32(stored.tokens - sinks)}));
    at(p.key_table, gpu.put(table_of(plan.streams[KEY])));
    at(p.value_table, gpu.put(table_of(plan.streams[VALUE])));
    at(p.factors, gpu.put(factors));
    at(p.query, gpu.put(queries));
    at(p.sink_keys, gpu.put(twice(exact_rows(file, KEY, 0, sinks))));
    at(p.sink_values, gpu.put(twice(exact_rows(file, VALUE, 0, sinks))));
    at(p.sink_lengths, gpu.put(std::vector<dquant::i32>(2, dquant::i32(sinks))));
    p.sink_stride = static_cast<dquant::i64>(sinks);
    at(p.tail_keys, gpu.put(twice(exact_rows(file, KEY, end, file.tokens()))));
    at(p.tail_values, gpu.put(twice(exact_rows(file, VALUE, end, file.tokens()))));
    at(p.tail_lengths, gpu.put(std::vector<dquant::i32>{dquant::i32(recent), 0}));
    p.tail_stride = static_cast<dquant::i64>(recent);
    // Nothing in the workspace is read before it is written.
    at(p.partial, gpu.allocate(4 * slots * n.partial_floats));
    at(p.state, gpu.allocate(4 * slots * n.state_floats));
    const device::Address out = gpu.put(std::vector<float>(outputs, std::numeric_limits<float>::quiet_NaN()));
    const device::Address lse = gpu.put(std::vector<float>(sums, std::numeric_limits<float>::quiet_NaN()));
    at(p.out, out);
    at(p.lse, lse);
    p.batch = batch;
    p.blocks = gpu.multiprocessors;
    p.causal = 1;
    p.scale = static_cast<float>(1 / std::sqrt(double(plan.dim)));
    p.lse_factor = std::log(2.0f);

    gpu.launch(attend_pages, p.blocks, n.threads, n.shared_bytes, p);
    gpu.launch(attend_finish, static_cast<int>(plan.heads) * n.quads * batch, 256, 0, p);
    gpu.wait();

    const double error = relative_error(gpu.get<float>(out, outputs), stored.out);
    const double lse_error = largest_error(gpu.get<float>(lse, sums), stored.lse);
    const bool good = error < 2e-3 && lse_error < 1e-2;
    std::printf("relative error of outputs %.1e, largest of log-sum-exps %.1e: %s\n", error, lse_error, good ? "good" : "WRONG");
    return good ? 0 : 1;
}

int main(int count, char** arguments) {
    std::vector<std::string> names;
    std::string headers = "gpu/include", only_compile, driver = "libcuda.so.1";
    for (int i = 1; i < count; ++i) {
        const std::string word = arguments[i];
        std::string* to = word == "--headers"   ? &headers
                          : word == "--compile" ? &only_compile
                          : word == "--driver"  ? &driver
                                                : nullptr;
        if (to && i + 1 < count)
            *to = arguments[++i];
        else
            names.push_back(word);
    }
    if (names.size() != 2) {
        std::fprintf(stderr, "usage: attend FILE RESULTS [--headers FOLDER] [--compile ARCHITECTURE] [--driver LIBRARY]\n");
        return 2;
    }
    try {
        return run(names[0], names[1], headers, only_compile, driver);
    } catch (const Refused& refused) {
        std::fprintf(stderr, "refused: %s\n", refused.code.c_str());
    } catch (const std::exception& error) {
        std::fprintf(stderr, "failed: %s\n", error.what());
    }
    return 1;
}
