// SPDX-License-Identifier: Apache-2.0
// A batch for an emulated attention kernel: tensors, a schedule, parameters, and the error of what
// the kernel wrote against double arithmetic. Memory that nobody has written is NaN.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <vector>

#include "abi/params.h"
#include "flashplan/plan.h"
#include "owning_scheduler.h"
#include "rows.h"

namespace flashplan::test {

constexpr float kVScale = 0.75F;
constexpr float kSink = 0.5F;

/// What a batch is made of.
struct BatchNumbers {
  std::vector<int32_t> qo_lens;
  std::vector<int32_t> kv_lens;
  std::vector<int32_t> planned_lens = {};  // if longer than kv_lens
  int32_t num_kv_heads = 1;
  int32_t group_size = 1;
  int32_t page_size = 0;  // 0: ragged
  int32_t num_pages = 0;  // of the cache; 0: those of the requests, and one more
  int32_t prefix = 0;     // keys in pages that all requests share
  bool is_csr = false;    // page ids
  int32_t num_ctas = 1;
  int32_t head_dim_qk = 0;
  int32_t head_dim_vo = 0;
  int32_t q_tail_dims = 0;  // the last dims, in a tensor of their own
  int32_t k_tail_dims = 0;
  bool shared_kv = false;  // values are the first dims of keys
  bool aligned = true;     // rows begin at multiples of 16 bytes
  DType q_dtype = DType::kBFloat16;
  DType kv_dtype = DType::kBFloat16;
  DType o_dtype = DType::kBFloat16;
  Mask mask = {.causal = true};
  bool has_mask = false;  // of random bits
  bool has_sinks = false;
  float logits_scale = 1.0F;
  float softcap = 0.0F;  // 0: off
  std::vector<float> k_scales = {};
  std::vector<float> q_scales = {};
  int32_t chunk_kv = 0;  // see ScheduleShape
};

/// Where the keys of requests are among the rows of a cache: in pages in a random order, or one
/// request after the other, with rows between them that belong to no request.
class KeyPlaces {
 public:
  KeyPlaces() = default;
  KeyPlaces(const BatchNumbers& numbers, std::mt19937& random);

  int64_t row(int32_t request, int32_t key) const;
  bool has_key(int32_t request, int32_t key) const;
  int64_t num_rows() const { return num_rows_; }
  int32_t num_pages() const { return num_pages_; }
  /// The most pages that a request has.
  int32_t most_pages() const { return most_pages_; }
  int32_t& id(int32_t request, int32_t page) {
    return ids_[static_cast<size_t>(request * most_pages_ + page)];
  }
  PageTable table(bool is_csr) const;
  const int32_t* kv_indptr() const { return page_size_ > 0 ? nullptr : first_rows_.data(); }

 private:
  int32_t page_size_ = 0;
  int32_t most_pages_ = 1;
  int32_t num_pages_ = 1;
  int64_t num_rows_ = 0;
  std::vector<int32_t> ids_;
  std::vector<int32_t> indptr_;
  std::vector<int32_t> first_rows_;
};

class AttentionBatch {
 public:
  AttentionBatch(const AttentionBatch&) = delete;
  AttentionBatch& operator=(const AttentionBatch&) = delete;

  /// The largest error of o and lse, in units of the largest value of a row.
  double error() const;
  /// For each row what was written to o, and lse.
  std::vector<float> results() const;
  const Schedule& schedule() const { return scheduler_->schedule(); }

 protected:
  /// Places the keys, and makes tensors without numbers.
  explicit AttentionBatch(BatchNumbers numbers);
  virtual ~AttentionBatch() = default;

  /// Fills q, k and v with normal numbers. `gain` tells by what those of a key are multiplied.
  void fill(float q_gain, const std::function<float(int32_t key)>& gain);
  /// Replaces the page ids behind the keys of each request by ids that are none.
  void drop_pages_behind_keys();
  /// What is the same for all kernels.
  ScheduleShape shape(int32_t tile_q, int32_t tile_kv) const;
  /// `row_floats` are those of a partial row.
  void make_schedule(const ScheduleShape& shape, int32_t row_floats);
  /// Sets all parameters but the maps, the scratch memory and prepared keys.
  void make_params();
  /// Encodes the maps as the library does for a GPU, for a kernel of so many dims. by_rows: as if
  /// it had refused all of them.
  void make_maps(const ScheduleShape& shape, int32_t most_qk, int32_t most_vo, bool by_rows);

  /// Before a run: poisons what it writes.
  void begin_run();
  /// Whether counters are zero again, and nothing was written outside of o's rows.
  bool leaves_no_trace() const;

  /// The rows of the cache with the keys that a query sees.
  virtual std::vector<int64_t> keys_of(int32_t request, int32_t query) const;

  int32_t batch_size() const { return static_cast<int32_t>(n_.kv_lens.size()); }
  int32_t num_heads() const { return n_.num_kv_heads * n_.group_size; }
  int32_t num_tokens() const { return first_tokens_.back(); }
  int32_t kv_len(int32_t request) const { return n_.kv_lens[static_cast<size_t>(request)]; }

  const BatchNumbers n_;
  std::mt19937 random_{5};
  std::vector<int32_t> first_tokens_ = {0};
  KeyPlaces places_;
  Rows q_, q_tail_, k_, k_tail_, v_, o_;
  std::vector<float> lse_;
  Batch batch_;
  std::vector<QueueStart> starts_;
  AttentionParams params_;

 private:
  double error_of_row(int32_t request, int32_t query, int32_t head) const;

  std::vector<uint32_t> mask_;
  int64_t mask_words_ = 0;  // of a token
  std::vector<int32_t> mask_begins_;
  std::vector<float> sinks_;
  std::vector<int32_t> prefixes_;
  std::optional<OwningScheduler> scheduler_;
  std::vector<Merge> merges_;
  std::vector<Arrivals> arrivals_;
  std::vector<float> partial_o_, partial_lse_;
};

}  // namespace flashplan::test
