// SPDX-License-Identifier: Apache-2.0
// sample() on CUDA: chooses the way to draw. Without filters, a cluster of CTAs reads a row and
// keeps nothing of it. With filters, a cluster keeps the row in its shared memory or, if there are
// many rows, one CTA reads each row without keeping it.
#include <cstdint>

#include "ops/cuda/sample/list.h"
#include "ops/cuda/sample/ways.h"

namespace flashplan::cuda {
namespace {

int32_t num_sms(Device device) { return device_facts(device.index).num_sms; }

/// Whether the options give all rows one temperature, which is 0.
bool is_greedy(const SampleParams& p) {
  return p.temperature.each == nullptr && p.temperature.all == 0.0F;
}
/// Whether each row may have filters of its own.
bool has_filters_of_rows(const SampleParams& p) {
  return p.top_k.each != nullptr || p.top_p.each != nullptr || p.min_p.each != nullptr;
}

/// Whether plain_kernel() is to draw from all rows: the options say that none has a filter, or that
/// each takes its largest logit. For the largest logits of few rows, sample_kernel() is faster.
bool is_plain(const SampleParams& p, Device device) {
  if (p.vocab > kMostEntries * sampling::kBlock) return false;
  if (is_greedy(p))
    return !p.from_probs && (!has_clusters(device) || p.num_rows >= num_sms(device) / 3);
  return !has_filters_of_rows(p) &&
         !sampling::has_filters(p.top_k.all, p.top_p.all, p.min_p.all, p.vocab);
}

/// Whether counted_kernel() is to draw from all rows. There one CTA alone finds the threshold of a
/// row. If thresholds are needed and rows are few, clusters that keep a row are faster.
bool is_counted(const SampleParams& p, Device device) {
  if (is_greedy(p) || !is_countable(p) || p.joint) return false;
  if (p.from_probs && (p.temperature.each != nullptr || p.temperature.all == 0.0F)) return false;
  if (p.top_k.each != nullptr || p.min_p.each != nullptr || p.min_p.all > 0.0F) return false;
  const bool is_tried =
      p.top_p.each == nullptr && sampling::is_tried(p.top_k.all, p.top_p.all, p.min_p.all, p.vocab);
  if (is_tried && p.logprobs == nullptr) return true;
  const bool has_top_p = p.top_p.each != nullptr || p.top_p.all < 1.0F;
  const bool has_top_k = p.top_k.all < p.vocab;
  if (has_top_k && (has_top_p || p.top_k.all <= kMostStreamedTopK)) return false;
  return p.vocab > kMaxHeld && (!has_clusters(device) || p.num_rows > num_sms(device) / 2);
}

/// Whether stream_kernel() is to draw from all rows. It is faster than a cluster for each row if
/// there is at least one row per SM. If filters may keep more than its lists hold, clusters draw.
bool is_streamed(const SampleParams& p, Device device) {
  if (p.from_probs || p.joint || p.vocab <= kMaxHeld) return false;
  constexpr float kLargeMinP = 0.02F;  // a min-p that keeps few tokens
  const bool has_few = p.top_k.each != nullptr || p.top_k.all <= kMostStreamedTopK ||
                       p.min_p.each != nullptr || p.min_p.all >= kLargeMinP;
  return has_few && (!has_clusters(device) || p.num_rows >= num_sms(device));
}

}  // namespace

Status sample(const SampleParams& p, Device device, Stream stream) noexcept {
  return with_float(p.dtype, [&](auto dtype) {
    constexpr DType kDType = decltype(dtype)::value;
    if (is_plain(p, device)) return sample_plain<kDType>(p, device, stream);
    if (is_counted(p, device)) return sample_counted<kDType>(p, device, stream);
    if (is_streamed(p, device)) return sample_stream<kDType>(p, device, stream);
    return sample_cluster<kDType>(p, device, stream);
  });
}

}  // namespace flashplan::cuda
