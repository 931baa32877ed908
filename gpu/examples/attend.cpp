// Decode attention on a GPU over a layer of a `.dqkv` file, with nothing but the headers in gpu/include, and the result
// beside a stored one.
//
//     g++ -std=c++17 -O2 -Igpu/include gpu/examples/attend.cpp -ldl -o attend
//     ./attend gpu/examples/attend.dqkv gpu/examples/attend.bin --headers gpu/include
//     ./attend gpu/examples/attend_fitted.dqkv gpu/examples/attend_fitted.bin --headers gpu/include
//
// The first file's plan rotates; the second's is fitted to its layer and has variance classes, as files usually do.
// Results hold 32-bit words, little-endian: how many query heads Q, head size D and tokens of a second, shorter
// sequence, then FP32 queries [Q][D] and, of the whole sequence and of its first tokens, outputs [2][Q][D] and natural
// log-sum-exps [2][Q] (tools/attend_example.py makes all four).
//
// NVRTC, the run-time compiler, is found in the system's folders and in LD_LIBRARY_PATH.  --compile ARCHITECTURE stops
// after compiling, which takes no GPU; --driver names another driver's library, which is how the example is tested without
// one.  Files whose exact rows are compressed need -DDQUANT_ZSTD and -lzstd.
//
// What an engine does once a layer: read the plan from the file, make of it what kernels need (AttendPlan), compile them,
// lay tables and pages into the device's memory.  And once a step: fill in AttendParams and launch two kernels.

#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>

#include "attend_kernels.hpp"
#include "device.hpp"
#include "dquant/attend_plan.hpp"
#include "dquant/file.hpp"

using namespace dquant::host;

struct Numbers {
    int threads, shared_bytes, groups, quads, partial_floats, state_floats;
};

static void require(bool holds, const char* what) {
    if (!holds) throw std::runtime_error(what);
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
    require(layer.dtype == BFLOAT16, "the example takes layers of BF16");
    const Stored stored(stored_path);
    require(stored.dim == plan.dim && stored.heads % plan.heads == 0, "queries of another geometry");
    const AttendPlan attention(plan, static_cast<int>(stored.heads / plan.heads));

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
        std::vector<std::string> options = attention.options;
        // Nothing that attention computes is promised to the bit, so products and sums may be fused.
        for (const std::string& option :
             {"-DDQ_GROUPED=" + std::to_string(attention.grouped), "-DDQ_BLOCK_SHARED_BYTES=" + std::to_string(shared_bytes),
              std::string("--std=c++17"), std::string("--ftz=false"), "--gpu-architecture=" + architecture, "-I" + headers})
            options.push_back(option);
        return device::compile(KERNELS, options);
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
    const std::vector<std::uint8_t> behind = attention.place(p, [&](const auto& array) { return gpu.put(array); });
    const auto at = [](auto& field, device::Address address) { std::memcpy(&field, &address, sizeof address); };
    at(p.pages, gpu.put(pool));
    p.page_stride = static_cast<dquant::i64>(page_bytes);
    at(p.block_table, gpu.put(block_table));
    p.table_stride = static_cast<dquant::i32>(pages);
    at(p.lengths, gpu.put(std::vector<dquant::i32>{dquant::i32(coded.tokens), dquant::i32(stored.tokens - sinks)}));
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

    std::vector<std::uint8_t> params(sizeof p);
    std::memcpy(params.data(), &p, sizeof p);
    params.insert(params.end(), behind.begin(), behind.end());
    gpu.launch(attend_pages, p.blocks, n.threads, n.shared_bytes, params);
    gpu.launch(attend_finish, static_cast<int>(plan.heads) * n.quads * batch, 256, 0, params);
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
        std::fprintf(stderr, "refused: %s\n", refused.what());
    } catch (const std::exception& error) {
        std::fprintf(stderr, "failed: %s\n", error.what());
    }
    return 1;
}
