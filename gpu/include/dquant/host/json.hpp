// The header's JSON (specification, clause 3.6): whether it is what the format allows, and what it says of the model.
#pragma once

#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "bytes.hpp"

namespace dquant::host {

struct Info {
    std::string model, revision, writer;
    std::uint64_t positions_start = 0;
    std::string shard_part = "0", shard_parts = "1";
};

class Json {
public:
    // Raises `header-json` for anything that clause 3.6 does not allow.
    static Info read(Bytes text) {
        need(utf8(text), "header-json", "not UTF-8");
        Json json(text);
        json.space();
        json.member_names(1);
        json.space();
        need(json.at_ == json.text_.size, "header-json", "something behind the object");
        return json.info_;
    }

private:
    enum class Kind { object, array, string, integer, real, word };
    struct Value {
        Kind kind;
        std::string text;
        std::vector<Value> items;
    };

    explicit Json(Bytes text) : text_(text) {}

    char peek() const { return at_ < text_.size ? static_cast<char>(text_.data[at_]) : '\0'; }
    char next() {
        need(at_ < text_.size, "header-json", "ends too early");
        return static_cast<char>(text_.data[at_++]);
    }
    void space() {
        while (peek() == ' ' || peek() == '\t' || peek() == '\n' || peek() == '\r') ++at_;
    }
    void take(char c) {
        if (next() != c) throw Refused("header-json", std::string("expected ") + c);
    }

    // The outermost object, whose known members are looked at.
    void member_names(int depth) { object(depth, true); }

    void object(int depth, bool outermost) {
        need(depth <= 16, "header-json", "nested too deep");
        std::set<std::string> names;
        take('{');
        space();
        if (peek() == '}') return void(next());
        for (;;) {
            space();
            const std::string name = string();
            need(names.insert(name).second, "header-json", "a member twice");
            space();
            take(':');
            const Value found = value(depth);
            if (outermost) known(name, found);
            space();
            const char c = next();
            if (c == '}') return;
            need(c == ',', "header-json", "expected , or }");
        }
    }

    void known(const std::string& name, const Value& v) {
        const bool text = v.kind == Kind::string;
        if (name == "model" || name == "revision" || name == "writer") {
            need(text, "header-json", name);
            (name == "model" ? info_.model : name == "revision" ? info_.revision : info_.writer) = v.text;
        } else if (name == "metadata") {
            need(v.kind == Kind::object, "header-json", name);
        } else if (name == "positions_start") {
            need(v.kind == Kind::integer && whole(v.text) && digits(v.text).size() <= 16, "header-json", name);
            info_.positions_start = std::strtoull(digits(v.text).c_str(), nullptr, 10);
            need(info_.positions_start < 1ull << 53, "header-json", name);
        } else if (name == "shard") {
            need(v.kind == Kind::array && v.items.size() == 2, "header-json", name);
            for (const Value& item : v.items) need(item.kind == Kind::integer && whole(item.text), "header-json", name);
            const std::string part = digits(v.items[0].text), parts = digits(v.items[1].text);
            need(part.size() < parts.size() || (part.size() == parts.size() && part < parts), "header-json", name);
            info_.shard_part = part;
            info_.shard_parts = parts;
        }
    }

    // An integer that is not below zero, and its digits without sign.
    static bool whole(const std::string& text) { return text[0] != '-' || text == "-0"; }
    static std::string digits(const std::string& text) { return text[0] == '-' ? text.substr(1) : text; }

    Value value(int depth) {
        space();
        const char c = peek();
        if (c == '{') {
            object(depth + 1, false);
            return {Kind::object, {}, {}};
        }
        if (c == '[') return array(depth + 1);
        if (c == '"') return {Kind::string, string(), {}};
        if (c == '-' || (c >= '0' && c <= '9')) return number();
        for (const char* word : {"true", "false", "null"}) {
            const std::uint64_t size = std::strlen(word);
            if (text_.size - at_ >= size && std::memcmp(text_.data + at_, word, size) == 0) {
                at_ += size;
                return {Kind::word, word, {}};
            }
        }
        throw Refused("header-json", "no value");
    }

    Value array(int depth) {
        need(depth <= 16, "header-json", "nested too deep");
        Value found{Kind::array, {}, {}};
        take('[');
        space();
        if (peek() == ']') {
            next();
            return found;
        }
        for (;;) {
            found.items.push_back(value(depth));
            space();
            const char c = next();
            if (c == ']') return found;
            need(c == ',', "header-json", "expected , or ]");
        }
    }

    Value number() {
        const std::uint64_t start = at_;
        bool real = false;
        const auto run = [&] {
            need(peek() >= '0' && peek() <= '9', "header-json", "a number");
            while (peek() >= '0' && peek() <= '9') ++at_;
        };
        if (peek() == '-') ++at_;
        if (peek() == '0')
            ++at_;
        else
            run();
        if (peek() == '.') {
            real = true;
            ++at_;
            run();
        }
        if (peek() == 'e' || peek() == 'E') {
            real = true;
            ++at_;
            if (peek() == '+' || peek() == '-') ++at_;
            run();
        }
        const std::string text(reinterpret_cast<const char*>(text_.data + start), at_ - start);
        need(text.size() <= 400, "header-json", "a number");
        need(!real || std::isfinite(std::strtod(text.c_str(), nullptr)), "header-json", "a number");
        return {real ? Kind::real : Kind::integer, text, {}};
    }

    std::string string() {
        std::string out;
        take('"');
        for (;;) {
            const char c = next();
            if (c == '"') return out;
            need(static_cast<unsigned char>(c) >= 0x20, "header-json", "a control character");
            if (c != '\\') {
                out += c;
                continue;
            }
            const char e = next();
            static const std::string plain = "\"\\/bfnrt", meant = "\"\\/\b\f\n\r\t";
            if (const auto place = plain.find(e); place != std::string::npos) {
                out += meant[place];
                continue;
            }
            need(e == 'u', "header-json", "an escape");
            std::uint32_t point = four();
            if (point >= 0xD800 && point < 0xDC00) {
                need(next() == '\\' && next() == 'u', "header-json", "a lone surrogate");
                const std::uint32_t low = four();
                need(low >= 0xDC00 && low < 0xE000, "header-json", "a lone surrogate");
                point = 0x10000 + ((point - 0xD800) << 10 | (low - 0xDC00));
            } else {
                need(point < 0xDC00 || point >= 0xE000, "header-json", "a lone surrogate");
            }
            encode(out, point);
        }
    }

    std::uint32_t four() {
        std::uint32_t point = 0;
        for (int i = 0; i < 4; ++i) {
            const char c = next();
            const int digit = c >= '0' && c <= '9'   ? c - '0'
                              : c >= 'a' && c <= 'f' ? c - 'a' + 10
                              : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                                     : -1;
            need(digit >= 0, "header-json", "an escape");
            point = point << 4 | static_cast<std::uint32_t>(digit);
        }
        return point;
    }

    static void encode(std::string& out, std::uint32_t point) {
        const auto tail = [&](int shift) { out += static_cast<char>(0x80 | (point >> shift & 0x3F)); };
        if (point < 0x80) {
            out += static_cast<char>(point);
        } else if (point < 0x800) {
            out += static_cast<char>(0xC0 | point >> 6);
            tail(0);
        } else if (point < 0x10000) {
            out += static_cast<char>(0xE0 | point >> 12);
            tail(6), tail(0);
        } else {
            out += static_cast<char>(0xF0 | point >> 18);
            tail(12), tail(6), tail(0);
        }
    }

    Bytes text_;
    std::uint64_t at_ = 0;
    Info info_;
};

}  // namespace dquant::host
