// Prints what dquant/attend_plan.hpp makes of a file's first head group, for tests to compare with Python:
//
//     attend_plan FILE QUERY_HEADS_OF_A_KV_HEAD
//
// One line for every option, one for every array that is laid into the device's memory, its address the number of the
// line, and one for the parameters; bytes in hexadecimal digits.
#include "dquant/attend_plan.hpp"

#include <cstdio>

#include "dquant/file.hpp"

using namespace dquant::host;

static void print(const char* name, const void* data, std::size_t bytes) {
    std::printf("%s ", name);
    for (std::size_t i = 0; i < bytes; ++i) std::printf("%02x", static_cast<const std::uint8_t*>(data)[i]);
    std::printf("\n");
}

int main(int, char** arguments) try {
    const File file{std::string(arguments[1])};
    const AttendPlan plan(*file.header().groups.at(0).profile, std::stoi(arguments[2]));
    for (const std::string& option : plan.options) std::printf("option %s\n", option.c_str());
    std::uint64_t arrays = 0;
    dquant::AttendParams p = {};
    const std::vector<std::uint8_t> behind = plan.place(p, [&](const auto& array) {
        print("array", array.data(), array.size() * sizeof array[0]);
        return ++arrays;
    });
    std::vector<std::uint8_t> params(sizeof p);
    std::memcpy(params.data(), &p, sizeof p);
    params.insert(params.end(), behind.begin(), behind.end());
    print("params", params.data(), params.size());
    return 0;
} catch (const Refused& refused) {
    std::printf("refused %s\n", refused.code.c_str());
    return 1;
}
