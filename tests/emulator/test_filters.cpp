// SPDX-License-Identifier: Apache-2.0
// The CUDA kernel of filtered_probs(), top_k_mask() and log-probabilities, run by an emulator of
// clusters: what it writes must be the CPU's, bit for bit but for logarithms.
#include "cuda_builtins.h"
#include "dynamic_memory.h"
#include "flashplan/sampling.h"
#include "ops/cpu/kernels.h"
#include "ops/operators.h"
// The library defines these functions, too, so the emulated ones get other names.
#define filter_rows emulated_filter_rows
#define list_logprobs emulated_list_logprobs
#include "ops/cuda/sample/filter_rows.cu"
#undef filter_rows
#undef list_logprobs

#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "logit_rows.h"

namespace flashplan::test {
namespace {

struct Settings {
  const char* name;
  float temperature = 1.0F;
  int32_t top_k = INT32_MAX;
  float top_p = 1.0F;
  float min_p = 0.0F;
  bool joint = false;
};

constexpr Settings kSettings[] = {
    {"plain"},
    {"greedy", 0.0F},
    {"cold", 1e-30F},
    {"hot", 1e30F},
    {"k 1", 1.0F, 1},
    {"k 50", 1.0F, 50},
    {"k 3000", 0.7F, 3000},
    {"p 0.3", 1.0F, INT32_MAX, 0.3F},
    {"p 0.9", 1.0F, INT32_MAX, 0.9F},
    {"min-p 0.1", 1.0F, INT32_MAX, 1.0F, 0.1F},
    {"min-p 1", 1.0F, INT32_MAX, 1.0F, 1.0F},
    {"all", 0.8F, 50, 0.95F, 0.01F},
    {"joint", 1.3F, 200, 0.8F, 1e-3F, true},
};

/// Rows of one length in memory, in a dtype.
struct Memory {
  std::vector<float4> words;
  int64_t stride;  // bytes

  Memory(const Rows& all, int32_t vocab, DType dtype, bool are_probabilities)
      : words(all.rows.size() * static_cast<size_t>(vocab) + 1), stride(vocab * item_size(dtype)) {
    for (size_t r = 0; r < all.rows.size(); ++r) {
      double largest = -kInfinity;
      double sum = 0;
      for (const float x : all.rows[r]) largest = std::max<double>(largest, x);
      for (const float x : all.rows[r]) sum += std::exp(x - largest);
      for (int32_t i = 0; i < vocab; ++i) {
        float value = all.rows[r][static_cast<size_t>(i)];
        if (are_probabilities) value = static_cast<float>(std::exp(value - largest) / sum);
        const uint16_t bits = dtype == DType::kFloat16
                                  ? std::bit_cast<uint16_t>(static_cast<_Float16>(value))
                                  : __float2bfloat16_rn(value).bits;
        char* to = data() + static_cast<int64_t>(r) * stride + i * item_size(dtype);
        std::memcpy(to, dtype == DType::kFloat32 ? static_cast<const void*>(&value) : &bits,
                    static_cast<size_t>(item_size(dtype)));
      }
    }
  }
  char* data() { return reinterpret_cast<char*>(words.data()); }
};

FilterParams make_params(const Rows& rows, Memory& memory, const Settings& settings, int32_t vocab,
                         DType dtype, bool from_probs) {
  FilterParams p;
  p.logits = memory.data();
  p.row_stride = memory.stride;
  p.dtype = dtype;
  p.num_rows = p.num_logit_rows = static_cast<int32_t>(rows.rows.size());
  p.vocab = vocab;
  p.from_probs = from_probs;
  p.joint = settings.joint;
  p.temperature.all = settings.temperature;
  p.top_k.all = settings.top_k;
  p.top_p.all = settings.top_p;
  p.min_p.all = settings.min_p;
  return p;
}

void expect(bool same, const Rows& rows, size_t row, const Settings& settings, int32_t vocab,
            const std::string& what) {
  if (same) return;
  check::fail(__FILE__, __LINE__,
              rows.names[row] + ", " + settings.name + ", vocabulary " + std::to_string(vocab) +
                  ": other " + what);
}

/// `is_in_place`: over the logits, where dtypes are alike.
void compare_rows(const Rows& rows, const Settings& settings, int32_t vocab, DType dtype,
                  bool from_probs, bool is_mask, bool is_in_place) {
  Memory memory(rows, vocab, dtype, from_probs);
  FilterParams p = make_params(rows, memory, settings, vocab, dtype, from_probs);
  const int64_t out_stride = vocab * (is_mask ? item_size(dtype) : 4);
  const auto num_rows = static_cast<size_t>(p.num_rows);
  std::vector<char> out(num_rows * static_cast<size_t>(out_stride), 'x');
  std::vector<char> wanted = out;
  std::vector<int32_t> status(num_rows, -7);
  p.is_mask = is_mask;
  p.out_stride = out_stride;
  p.status = status.data();
  std::vector<cpu::FilterResult> results;
  for (int32_t r = 0; r < p.num_rows; ++r) {
    p.out = wanted.data();
    results.push_back(cpu::baseline::find_filter(p, r));
    if (results.back().error != SampleError::kNone) continue;
    cpu::baseline::write_filtered(p, r, results.back());
  }
  p.out = is_in_place ? memory.data() : out.data();
  CHECK(cuda::emulated_filter_rows(p, Device{DeviceType::kCuda, 0}, nullptr).ok());
  for (size_t r = 0; r < num_rows; ++r) {
    const auto error = static_cast<int32_t>(results[r].error);
    expect(status[r] == error, rows, r, settings, vocab, "status " + std::to_string(status[r]));
    const char* row = p.out + static_cast<int64_t>(r) * out_stride;
    const char* wanted_row = wanted.data() + static_cast<int64_t>(r) * out_stride;
    if (error == 0) {
      expect(std::memcmp(row, wanted_row, static_cast<size_t>(out_stride)) == 0, rows, r, settings,
             vocab, is_mask ? "mask" : "probabilities");
    } else if (!is_mask || dtype == DType::kFloat32) {
      float first, last;
      std::memcpy(&first, row, 4);
      std::memcpy(&last, row + out_stride - 4, 4);
      expect(std::isnan(first) && std::isnan(last), rows, r, settings, vocab, "filling");
    }
  }
}

void compare_logprobs(const Rows& rows, const Settings& settings, int32_t vocab, DType dtype,
                      bool from_probs, int32_t num_top) {
  Memory memory(rows, vocab, dtype, from_probs);
  FilterParams p = make_params(rows, memory, settings, vocab, dtype, from_probs);
  const auto num_rows = static_cast<size_t>(p.num_rows);
  const auto top = static_cast<size_t>(num_top);
  struct Lists {
    std::vector<float> logprobs, top_logprobs;
    std::vector<int32_t> top_ids;
  } lists[2];
  std::vector<int32_t> ids(num_rows, -1);
  for (int32_t r = 0; r < p.num_rows; ++r) {
    if (cpu::baseline::find_filter(p, r).error == SampleError::kNone) {
      ids[static_cast<size_t>(r)] = (r * 37 + 5) % vocab;
    }
  }
  p.ids = ids.data();
  p.num_top = num_top;
  p.top_id_stride = p.top_logprob_stride = num_top;
  for (Lists& list : lists) {
    list.logprobs.assign(num_rows, NAN);
    list.top_logprobs.assign(num_rows * top, NAN);
    list.top_ids.assign(num_rows * top, -1);
    p.logprobs = list.logprobs.data();
    p.top_ids = list.top_ids.data();
    p.top_logprobs = list.top_logprobs.data();
    if (&list == &lists[0]) {
      CHECK(cuda::emulated_list_logprobs(p, Device{DeviceType::kCuda, 0}, nullptr).ok());
      continue;
    }
    for (int32_t r = 0; r < p.num_rows; ++r) {
      if (ids[static_cast<size_t>(r)] >= 0) cpu::baseline::list_logprobs(p, r);
    }
  }
  const auto same = [](float a, float b) {
    return std::isnan(a) ? std::isnan(b) : a == b || std::fabs(a - b) <= 1e-6F * std::fabs(b);
  };
  for (size_t r = 0; r < num_rows; ++r) {
    expect(same(lists[0].logprobs[r], lists[1].logprobs[r]), rows, r, settings, vocab,
           "logprob " + std::to_string(lists[0].logprobs[r]) + ", not " +
               std::to_string(lists[1].logprobs[r]));
    for (size_t i = r * top; i < (r + 1) * top; ++i) {
      expect(lists[0].top_ids[i] == lists[1].top_ids[i] &&
                 same(lists[0].top_logprobs[i], lists[1].top_logprobs[i]),
             rows, r, settings, vocab,
             "entry " + std::to_string(i - r * top) +
                 " of the list: " + std::to_string(lists[0].top_ids[i]) + ", not " +
                 std::to_string(lists[1].top_ids[i]));
    }
  }
}

void compare(int32_t vocab, DType dtype = DType::kFloat32) {
  const Rows rows = hard_rows(vocab, static_cast<uint32_t>(vocab));
  for (const Settings& settings : kSettings) {
    for (const bool from_probs : {false, true}) {
      if (from_probs && settings.temperature != 0.0F && settings.temperature != 1.0F) continue;
      compare_rows(rows, settings, vocab, dtype, from_probs, false, false);
      for (const int32_t num_top : {0, 20, 256}) {
        compare_logprobs(rows, settings, vocab, dtype, from_probs, std::min(num_top, vocab));
      }
    }
    compare_rows(rows, settings, vocab, dtype, false, true, false);
    compare_rows(rows, settings, vocab, dtype, false, true, true);
    if (dtype == DType::kFloat32) compare_rows(rows, settings, vocab, dtype, false, false, true);
  }
}

TEST(rows_of_one_cta) {
  for (const int32_t vocab : {1, 7, 300, 5003}) compare(vocab);
}

TEST(rows_of_clusters) { compare(17'003); }

TEST(rows_of_16_bits) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) compare(9'005, dtype);
}

/// A GPU below compute capability 9.0 has no clusters: one CTA processes a row, and reads it
/// several times because its shared memory does not hold it.
TEST(rows_that_are_not_held) {
  cuda::emulated_facts.major = 8;
  compare(11'003);
  cuda::emulated_facts.major = 9;
}

/// A request may name a row that is none, for which sample() has drawn no token.
TEST(rows_that_do_not_exist) {
  const Rows rows = hard_rows(100, 1);
  Memory memory(rows, 100, DType::kFloat32, false);
  FilterParams p = make_params(rows, memory, {"plain"}, 100, DType::kFloat32, false);
  const std::vector<int32_t> chosen{-1, 1};
  std::vector<int32_t> ids{3, 4}, top_ids(6, -7);
  std::vector<float> logprobs(2), top_logprobs(6);
  p.num_rows = 2;
  p.rows = chosen.data();
  p.ids = ids.data();
  p.logprobs = logprobs.data();
  p.num_top = 3;
  p.top_ids = top_ids.data();
  p.top_logprobs = top_logprobs.data();
  p.top_id_stride = p.top_logprob_stride = 3;
  CHECK(cuda::emulated_list_logprobs(p, Device{DeviceType::kCuda, 0}, nullptr).ok());
  for (size_t i = 0; i < 3; ++i) CHECK(top_ids[i] == -1 && std::isnan(top_logprobs[i]));
  CHECK(std::isnan(logprobs[0]) && logprobs[1] < 0);
  for (size_t i = 3; i < 6; ++i) CHECK(top_ids[i] >= 0 && top_logprobs[i] < 0);
}

}  // namespace
}  // namespace flashplan::test
