// Reads `.dqkv` files: what they hold, what is wrong with them, and a checksum of every decoded layer.
//
//     g++ -std=c++17 -O2 -Igpu/include gpu/examples/read.cpp -o read        (-DDQUANT_ZSTD ... -lzstd for compressed rows)
//     ./read FILE ...
//
// One line for a file that is refused: its name and the reason code.  Otherwise one line for the file, one for every
// sequence, layer and kind with the CRC32C of its FP32 numbers, and one for all findings.  The exit status is 1 if anything is wrong.

#include <cstdio>

#include "dquant/file.hpp"

using namespace dquant::host;

static bool report(const char* path) {
    const File file{std::string(path)};
    const Header& header = file.header();
    std::printf("file %s layers %zu sequences %u torn %d model %s\n", path, header.layers.size(), header.sequences,
                file.torn(), header.info.model.c_str());
    bool sound = true;
    for (std::uint32_t sequence = 0; sequence < header.sequences; ++sequence) {
        const std::uint64_t tokens = file.tokens(sequence);
        for (std::uint32_t layer = 0; tokens && layer < header.layers.size(); ++layer)
            for (const Kind kind : {KEY, VALUE}) {
                if (header.layers[layer].storage == ABSENT) continue;
                const char* name = kind == KEY ? "key" : "value";
                try {
                    const std::vector<float> rows = file.read(layer, kind, 0, tokens, sequence);
                    const Bytes bytes{reinterpret_cast<const std::uint8_t*>(rows.data()), 4 * rows.size()};
                    std::printf("values %u/%u/%s tokens %llu crc32c %08x\n", sequence, layer, name,
                                static_cast<unsigned long long>(tokens), crc32c(bytes));
                } catch (const Refused& refused) {
                    std::printf("unread %u/%u/%s %s\n", sequence, layer, name, refused.code.c_str());
                    sound = false;
                }
            }
    }
    std::printf("findings");
    for (const std::string& code : file.verify()) {
        std::printf(" %s", code.c_str());
        sound = false;
    }
    std::printf("\n");
    return sound;
}

int main(int count, char** paths) {
    int status = 0;
    for (int i = 1; i < count; ++i) {
        try {
            if (!report(paths[i])) status = 1;
        } catch (const Refused& refused) {
            std::printf("refused %s %s\n", paths[i], refused.code.c_str());
            status = 1;
        } catch (const std::exception& error) {
            std::printf("failed %s %s\n", paths[i], error.what());
            status = 1;
        }
    }
    return status;
}
