// SPDX-License-Identifier: Apache-2.0
// Batches in which each query has a list of keys of its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "flashplan/plan.h"

namespace flashplan {

/// Makes a batch in which each token is a request of its own, since tokens have different keys.
class KeyListBatch {
 public:
  void reserve(int32_t max_tokens) {
    indptr_.reserve(static_cast<std::size_t>(max_tokens) + 1);
    lens_.reserve(static_cast<std::size_t>(max_tokens));
  }

  /// The batch in which each token is a request. It is valid until the next call.
  Batch batch_of_tokens(const Batch& batch, int32_t topk) {
    indptr_.assign(1, 0);
    lens_.clear();
    for (int32_t r = 0; r < batch.batch_size; ++r) {
      for (int32_t token = batch.qo_indptr[r]; token < batch.qo_indptr[r + 1]; ++token) {
        indptr_.push_back(token + 1);
        lens_.push_back(std::min(topk, batch.kv_lens[r]));
      }
    }
    Batch tokens;
    tokens.qo_indptr = indptr_.data();
    tokens.kv_lens = lens_.data();
    tokens.batch_size = static_cast<int32_t>(lens_.size());
    return tokens;
  }

 private:
  std::vector<int32_t> indptr_, lens_;
};

}  // namespace flashplan
