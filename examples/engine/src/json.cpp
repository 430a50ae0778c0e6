// SPDX-License-Identifier: Apache-2.0
#include "json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <utility>

namespace engine {

namespace {

constexpr int kMaxDepth = 64;

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Json document() {
    Json value = parse(0);
    skip_space();
    if (at_ != text_.size()) fail("the end");
    return value;
  }

 private:
  Json parse(int depth) {
    if (depth > kMaxDepth) fail("fewer values inside each other");
    skip_space();
    switch (peek()) {
      case '{': return Json(object(depth));
      case '[': return Json(array(depth));
      case '"': return Json(string());
      case 't': take_word("true"); return Json(true);
      case 'f': take_word("false"); return Json(false);
      case 'n': take_word("null"); return Json();
      default: return Json(number());
    }
  }

  Json::Object object(int depth) {
    Json::Object members;
    take('{');
    if (!try_take('}')) {
      do {
        skip_space();
        std::string key = string();
        take(':');
        members.insert_or_assign(std::move(key), parse(depth + 1));
      } while (try_take(','));
      take('}');
    }
    return members;
  }

  Json::Array array(int depth) {
    Json::Array items;
    take('[');
    if (!try_take(']')) {
      do {
        items.push_back(parse(depth + 1));
      } while (try_take(','));
      take(']');
    }
    return items;
  }

  std::string string() {
    if (peek() != '"') fail("\"");
    std::string value;
    for (++at_; peek() != '"'; ++at_) {
      if (text_[at_] != '\\') {
        value += text_[at_];
        continue;
      }
      ++at_;
      const std::size_t place = std::string_view("\"\\/bfnrt").find(peek());
      if (place != std::string_view::npos) {
        value += "\"\\/\b\f\n\r\t"[place];
      } else if (peek() == 'u') {
        append_utf8(&value, hex4());
      } else {
        fail("an escape");
      }
    }
    ++at_;
    return value;
  }

  /// Reads the code unit after \u, and leaves at_ on its last digit. Names of tensors and keys have
  /// no surrogate pairs, so each unit is encoded by itself.
  uint32_t hex4() {
    uint32_t unit = 0;
    const char* begin = text_.data() + at_ + 1;
    if (text_.size() - at_ < 5 || std::from_chars(begin, begin + 4, unit, 16).ptr != begin + 4) {
      fail("four hexadecimal digits");
    }
    at_ += 4;
    return unit;
  }

  static void append_utf8(std::string* text, uint32_t unit) {
    if (unit < 0x80) {
      *text += static_cast<char>(unit);
    } else if (unit < 0x800) {
      *text += static_cast<char>(0xc0 | (unit >> 6));
      *text += static_cast<char>(0x80 | (unit & 0x3f));
    } else {
      *text += static_cast<char>(0xe0 | (unit >> 12));
      *text += static_cast<char>(0x80 | ((unit >> 6) & 0x3f));
      *text += static_cast<char>(0x80 | (unit & 0x3f));
    }
  }

  double number() {
    double value = 0;
    const char* begin = text_.data() + at_;
    const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), value);
    if (error != std::errc() || !std::isfinite(value)) fail("a value");
    at_ += static_cast<std::size_t>(end - begin);
    return value;
  }

  void take_word(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) fail(std::string(word));
    at_ += word.size();
  }

  char peek() const {
    if (at_ == text_.size()) fail("more");
    return text_[at_];
  }

  void skip_space() { at_ = std::min(text_.find_first_not_of(" \t\r\n", at_), text_.size()); }

  bool try_take(char c) {
    skip_space();
    if (peek() != c) return false;
    ++at_;
    return true;
  }

  void take(char c) {
    if (!try_take(c)) fail(std::string(1, c));
  }

  [[noreturn]] void fail(const std::string& expected) const {
    throw std::invalid_argument("JSON: expected " + expected + " at byte " + std::to_string(at_) +
                                ", got " +
                                (at_ == text_.size() ? "the end" : std::string(1, text_[at_])));
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace

Json Json::parse(std::string_view text) { return Parser(text).document(); }

int64_t Json::integer() const {
  const double value = number();
  if (value != std::floor(value) || std::abs(value) > 0x1p53) fail("an integer");
  return static_cast<int64_t>(value);
}

const Json& Json::at(std::string_view key) const {
  const Json& value = find(key);
  if (value.is_null()) fail("the key " + std::string(key));
  return value;
}

const Json& Json::find(std::string_view key) const {
  static const Json kNull;
  const auto place = object().find(key);
  return place == object().end() ? kNull : place->second;
}

void Json::fail(const std::string& expected) {
  throw std::invalid_argument("JSON: expected " + expected + ", got something else");
}

}  // namespace engine
