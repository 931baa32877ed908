// Reading bytes that nobody vouches for: refusals with the format's reason codes, CRC32C, FP16, views with bounds.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the format is little-endian, and this reader copies numbers as they are"
#endif

namespace dquant::host {

// What a file is refused for; `code` is a reason code of the specification, clause 9.4.
struct Refused : std::runtime_error {
    Refused(const std::string& reason, const std::string& message)
        : std::runtime_error(message.empty() ? reason : reason + ": " + message), code(reason) {}
    std::string code;
};

// A condition and what breaking it means; the message is made only then, as most conditions are asked for every byte.
inline void need(bool holds, const char* code, const char* message = "") {
    if (!holds) throw Refused(code, message);
}
inline void need(bool holds, const char* code, const std::string& message) {
    if (!holds) throw Refused(code, message);
}

inline std::uint64_t align(std::uint64_t x, std::uint64_t k) { return (x + k - 1) / k * k; }

template <class T>
T load(const std::uint8_t* at) {
    static_assert(std::is_trivially_copyable_v<T>);
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

// A stretch of bytes.  Asking for what lies outside is a fault of the caller, never of the file: callers check sizes
// first and refuse with a code of their own.
struct Bytes {
    const std::uint8_t* data = nullptr;
    std::uint64_t size = 0;

    Bytes part(std::uint64_t at, std::uint64_t count) const {
        if (at > size || count > size - at) throw std::out_of_range("bytes outside a file");
        return {data + at, count};
    }
    template <class T>
    T get(std::uint64_t at) const {
        return load<T>(part(at, sizeof(T)).data);
    }
    // Whether a byte is other than zero.
    bool any() const {
        std::uint64_t found = 0, i = 0;
        for (; i + 8 <= size; i += 8) found |= load<std::uint64_t>(data + i);
        for (; i < size; ++i) found |= data[i];
        return found != 0;
    }
};

inline std::uint32_t crc32c(Bytes bytes, std::uint32_t before = 0) {
    static const auto tables = [] {
        std::array<std::array<std::uint32_t, 256>, 8> t{};
        for (std::uint32_t byte = 0; byte < 256; ++byte) {
            std::uint32_t crc = byte;
            for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78u : 0u);
            t[0][byte] = crc;
        }
        for (int k = 1; k < 8; ++k)
            for (int byte = 0; byte < 256; ++byte) t[k][byte] = t[k - 1][byte] >> 8 ^ t[0][t[k - 1][byte] & 255];
        return t;
    }();
    std::uint32_t crc = ~before;
    std::uint64_t i = 0;
    for (; i + 8 <= bytes.size; i += 8) {  // eight bytes at a time
        const std::uint64_t word = load<std::uint64_t>(bytes.data + i) ^ crc;
        crc = 0;
        for (int k = 0; k < 8; ++k) crc ^= tables[7 - k][word >> (8 * k) & 255];
    }
    for (; i < bytes.size; ++i) crc = crc >> 8 ^ tables[0][(crc ^ bytes.data[i]) & 255];
    return ~crc;
}

inline float half_to_float(std::uint16_t bits) {
    const int exponent = bits >> 10 & 31;
    const int mantissa = bits & 1023;
    float value;
    if (exponent == 31)
        value = mantissa ? NAN : INFINITY;
    else
        value = std::ldexp(static_cast<float>(exponent ? mantissa + 1024 : mantissa), (exponent ? exponent : 1) - 25);
    return bits >> 15 ? -value : value;
}

inline float bfloat_to_float(std::uint16_t bits) {
    const std::uint32_t wide = std::uint32_t{bits} << 16;
    return load<float>(reinterpret_cast<const std::uint8_t*>(&wide));
}

// Whether bytes are UTF-8: no overlong forms, no surrogates, nothing above U+10FFFF.
inline bool utf8(Bytes text) {
    for (std::uint64_t i = 0; i < text.size;) {
        const unsigned lead = text.data[i];
        const int more = lead < 0x80 ? 0 : lead >= 0xC2 && lead < 0xE0 ? 1 : lead >= 0xE0 && lead < 0xF0 ? 2
                         : lead >= 0xF0 && lead < 0xF5                                        ? 3
                                                                                              : -1;
        if (more < 0 || i + more >= text.size) return false;
        std::uint32_t point = more ? lead & (0x3Fu >> more) : lead;
        for (int k = 1; k <= more; ++k) {
            if ((text.data[i + k] & 0xC0) != 0x80) return false;
            point = point << 6 | (text.data[i + k] & 0x3Fu);
        }
        if ((more == 2 && point < 0x800) || (more == 3 && (point < 0x10000 || point > 0x10FFFF)) ||
            (point >= 0xD800 && point < 0xE000))
            return false;
        i += more + 1;
    }
    return true;
}

}  // namespace dquant::host
