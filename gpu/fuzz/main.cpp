// One target of the reader in C++, the one DQ_TARGET names, as a libFuzzer program or, without clang, over given files.
//
//     clang++ -std=c++17 -O1 -g -fsanitize=fuzzer,address,undefined -DDQ_FUZZER -Igpu/include gpu/fuzz/main.cpp -o fuzz
//     DQ_BASES=bases DQ_TARGET=file ./fuzz corpus
//
// Over files it prints one line each: the code the input is refused for, or `ok`.
#include "targets.hpp"

using namespace dquant;

#ifdef DQ_FUZZER
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static const fuzz::Target target = fuzz::target(std::getenv("DQ_TARGET") ? std::getenv("DQ_TARGET") : "");
    target({data, size});
    return 0;
}
#else
int main(int count, char** paths) {
    const fuzz::Target target = fuzz::target(std::getenv("DQ_TARGET") ? std::getenv("DQ_TARGET") : "");
    for (int i = 1; i < count; ++i) {
        std::ifstream in(paths[i], std::ios::binary);
        fuzz::require(in.good(), paths[i]);
        const fuzz::Buffer data(std::istreambuf_iterator<char>(in), {});
        // Exactly its size, so that a byte read behind it is one outside of the memory.
        const std::string code = target(fuzz::view(data));
        std::printf("%s\n", code.empty() ? "ok" : code.c_str());
    }
    return 0;
}
#endif
