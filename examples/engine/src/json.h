// SPDX-License-Identifier: Apache-2.0
// Reads JSON, as far as configurations of models and headers of safetensors need it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace engine {

/// A value. Functions throw std::invalid_argument if it has another type than they return, or if a
/// key is missing.
class Json {
 public:
  using Array = std::vector<Json>;
  using Object = std::map<std::string, Json, std::less<>>;

  Json() = default;  // makes a null value
  template <class T>
  explicit Json(T value) : value_(std::move(value)) {}

  static Json parse(std::string_view text);

  bool is_null() const { return std::holds_alternative<std::monostate>(value_); }
  bool is_array() const { return std::holds_alternative<Array>(value_); }
  bool boolean() const { return get<bool>("true or false"); }
  double number() const { return get<double>("a number"); }
  int64_t integer() const;
  const std::string& string() const { return get<std::string>("a string"); }
  const Array& array() const { return get<Array>("an array"); }
  const Object& object() const { return get<Object>("an object"); }

  /// The value of a key; errors name the key.
  const Json& at(std::string_view key) const;
  /// The value of a key, or a null value if there is no such key.
  const Json& find(std::string_view key) const;

 private:
  template <class T>
  const T& get(const char* expected) const;
  [[noreturn]] static void fail(const std::string& expected);

  std::variant<std::monostate, bool, double, std::string, Array, Object> value_;
};

template <class T>
const T& Json::get(const char* expected) const {
  const T* value = std::get_if<T>(&value_);
  if (value == nullptr) fail(expected);
  return *value;
}

}  // namespace engine
