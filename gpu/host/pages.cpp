// The reader in C++ as a library for tests: pages of the first layer of a file, decoded one by one.
#include <cstring>

#include "dquant/file.hpp"

using namespace dquant::host;

extern "C" {

// FP32 keys (`kind` 0) or values of `tokens` tokens of a page to `out`, by the header of the file `header`.  Returns whether
// the page decodes; if not, its reason code stands in `code`, which has room for 64 bytes.
int decode_page(const std::uint8_t* header, std::uint64_t header_bytes, const std::uint8_t* page, std::uint64_t page_bytes,
                int kind, std::uint32_t tokens, float* out, char* code) {
    try {
        const Header found = HeaderReader::read({header, header_bytes});
        const Profile& profile = *found.groups.at(0).profile;
        Page({page, page_bytes}, profile).decode(kind, tokens, out, std::uint64_t{profile.heads} * profile.dim, false);
    } catch (const Refused& refused) {
        std::strncpy(code, refused.code.c_str(), 63);
        return 0;
    }
    return 1;
}
}
