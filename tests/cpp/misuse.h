// SPDX-License-Identifier: Apache-2.0
// Makes a valid call wrong in one place, and checks its refusal.
#pragma once

#include <climits>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "flashplan/flashplan.h"
#include "random_batch.h"

namespace flashplan::test {

inline uint64_t seed = 1;
inline long long current = 0;
inline std::string about;  // what the current case does
inline void print_case() {
  std::fprintf(stderr, "adversary: %s\nagain: adversary --seed %llu --case %lld\n", about.c_str(),
               static_cast<unsigned long long>(seed), current);
}

inline void on_signal(int number) {
  print_case();
  std::signal(number, SIG_DFL);
  std::raise(number);
}

[[noreturn]] inline void found(const std::string& what) {
  std::fprintf(stderr, "adversary: %s\n", what.c_str());
  print_case();
  std::_Exit(1);
}

/// The refusal reads "<argument>[...]: expected ..., got ...", where `names` lists the arguments
/// that it may name, with a space before and behind each.
inline void check_refusal(const Status& status, const std::string& names) {
  const std::string text = status.message;
  const std::string name = text.substr(0, text.find_first_of("[:"));
  const size_t from = text.find(" apart from ");
  const std::string second =
      from == std::string::npos ? name : text.substr(from + 12, text.find(',', from) - from - 12);
  const bool known = names.find(' ' + name + ' ') != std::string::npos ||
                     names.find(' ' + second + ' ') != std::string::npos;
  const bool form =
      text.find(": expected ") != std::string::npos && text.find(", got ") != std::string::npos;
  if (!known || !form) found("a refusal that does not name" + names + ": " + text);
  const StatusCode code = status.code;
  if (code != StatusCode::kInvalidArgument && code != StatusCode::kInvalidType &&
      code != StatusCode::kUnsupported && code != StatusCode::kNotReady &&
      code != StatusCode::kOutOfMemory) {
    found("a refusal with code " + std::to_string(static_cast<int>(code)) + ": " + text);
  }
}

enum class Verdict { kRefuse, kEither };

inline bool has_elements(const TensorView& view) {
  for (int32_t d = 0; d < view.rank; ++d) {
    if (view.shape[d] == 0) return false;
  }
  return true;
}

constexpr int64_t kMax64 = std::numeric_limits<int64_t>::max();

/// Makes one field of a view wrong. `planned`: no other dtype would do.
inline Verdict spoil(Random& random, TensorView& view, bool written, bool planned = true) {
  const bool some = has_elements(view);
  const auto d = static_cast<size_t>(random.between(0, view.rank - 1));
  const auto refuse_if = [](bool wrong) { return wrong ? Verdict::kRefuse : Verdict::kEither; };
  switch (random.between(0, 8)) {
    case 0:
      view.data = nullptr;
      about += " null data";
      return refuse_if(some);
    case 1: {
      if (item_size(view.dtype) == 1) break;
      view.data = static_cast<char*>(view.data) + 1;
      about += " unaligned data";
      return refuse_if(some);
    }
    case 2:
      view.rank =
          random.pick({0, -1, -7, 5, 6, 100, INT_MAX, INT_MIN, view.rank - 1, view.rank + 1});
      about += " rank " + std::to_string(view.rank);
      return Verdict::kRefuse;
    case 3: {
      const int64_t was = view.shape[d];
      view.shape[d] =
          random.pick({int64_t{-1}, int64_t{INT_MIN}, -kMax64, -kMax64 - 1, was - 1, was + 1,
                       int64_t{INT_MAX}, int64_t{1} << 31, int64_t{1} << 32, kMax64});
      about += " shape[" + std::to_string(d) + "] = " + std::to_string(view.shape[d]);
      // The library can not know how many rows there really are; other sizes it knows.
      return refuse_if(view.shape[d] < 0);
    }
    case 4: {
      if (!some || view.shape[d] < 2) {
        if (view.shape[d] > 1) break;
        view.stride[d] = random.pick({int64_t{-1}, int64_t{0}, kMax64, -kMax64 - 1});
        about += " a stride that does not matter";
        return Verdict::kEither;
      }
      view.stride[d] = random.pick({int64_t{-1}, -view.stride[d], -kMax64 - 1, kMax64});
      about += " stride[" + std::to_string(d) + "] = " + std::to_string(view.stride[d]);
      return Verdict::kRefuse;
    }
    case 5: {
      if (!written || !some || d + 1 == static_cast<size_t>(view.rank) || view.shape[d] < 2) break;
      view.stride[d] = view.shape[view.rank - 1] > 1 ? random.pick({0, 1}) : 0;
      about += " elements that overlap";
      return Verdict::kRefuse;
    }
    case 6: {
      const DType was = view.dtype;
      view.dtype =
          static_cast<DType>(random.pick({0, 1, 2, 3, 4, 5, 6, 7, -1, 99, INT_MAX, INT_MIN}));
      const bool could_be = static_cast<int>(view.dtype) >= 0 && view.dtype <= DType::kFloat8E5M2;
      if (view.dtype == was || (could_be && !planned)) {
        view.dtype = was;
        break;
      }
      about += " dtype " + std::to_string(static_cast<int>(view.dtype));
      return Verdict::kRefuse;
    }
    case 7: {
      view.device.type = static_cast<DeviceType>(random.pick({0, 1, 2, -1, 99, INT_MAX}));
      view.device.index = random.pick({1, -1, 7, INT_MAX, INT_MIN});
      about += " device " + std::to_string(static_cast<int>(view.device.type)) + ":" +
               std::to_string(view.device.index);
      return refuse_if(view.device.type != DeviceType::kCpu);
    }
    default:
      view.read_only = true;
      about += " read-only";
      return refuse_if(written && some);
  }
  about += " nothing";
  return Verdict::kEither;
}

/// An argument of a call by its name.
struct Named {
  const char* name;
  TensorView* view;
  bool written;
};

inline std::string names_of(const std::vector<Named>& arguments) {
  std::string names = " ";
  for (const Named& argument : arguments) names += std::string(argument.name) + ' ';
  return names;
}

/// Lets a written argument begin where another one does. False if one of them has no elements.
inline bool overlap(Random& random, const std::vector<Named>& arguments, std::string* names) {
  const auto last = static_cast<int32_t>(arguments.size()) - 1;
  const Named& to = arguments[static_cast<size_t>(random.between(0, last))];
  const Named& from = arguments[static_cast<size_t>(random.between(0, last))];
  if (to.view == from.view || !(to.written || from.written)) return false;
  if (!has_elements(*to.view) || !has_elements(*from.view)) return false;
  if (reinterpret_cast<uintptr_t>(from.view->data) %
          static_cast<uintptr_t>(item_size(to.view->dtype)) !=
      0) {
    return false;
  }
  to.view->data = from.view->data;
  // The values of an index are then other ones, which any argument may be refused for.
  const bool has_index = to.view->dtype == DType::kInt32 || from.view->dtype == DType::kInt32;
  *names = has_index ? names_of(arguments) : std::string(" ") + to.name + ' ' + from.name + ' ';
  about += std::string(": ") + to.name + " over " + from.name;
  return true;
}

}  // namespace flashplan::test
