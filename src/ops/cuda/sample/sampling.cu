// SPDX-License-Identifier: Apache-2.0
// sample() on CUDA: chooses the way to draw. Without filters, a cluster of CTAs reads a row and
// keeps nothing of it. With filters, a cluster keeps the row in its shared memory or, if there are
// many rows, one CTA reads each row without keeping it.
#include <algorithm>
#include <cstdint>

#include "ops/cuda/sample/list.h"
#include "ops/cuda/sample/ways.h"

namespace flashplan::cuda {
namespace {

/// If an SM has at most this many elements, clusters that keep a row are faster than
/// counted_kernel().
constexpr int64_t kFewElementsOfSm = 8192;
/// The same where one CTA of counted_kernel() must find the threshold of a filter.
constexpr int64_t kFewWithThreshold = 4 * kFewElementsOfSm;

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
  if (!has_room_for_entries(p.vocab)) return false;
  if (is_greedy(p))
    return !p.from_probs && (!has_clusters(device) || p.num_rows >= num_sms(device) / 3);
  return !has_filters_of_rows(p) &&
         !sampling::has_filters(p.top_k.all, p.top_p.all, p.min_p.all, p.vocab);
}

/// Whether counted_kernel() is to draw from all rows. If rows are many, it is faster than clusters
/// that keep a row. But in counted_kernel() one CTA alone finds the threshold of a filter, so where
/// thresholds may be needed, it is faster only with more rows. Log-probabilities and top-k need
/// them, and so does a top-p that is too small for tries, which an array of top-p may contain.
bool is_counted(const SampleParams& p, Device device) {
  if (is_greedy(p) || !is_countable(p) || p.joint) return false;
  if (p.from_probs && (p.temperature.each != nullptr || p.temperature.all == 0.0F)) return false;
  if (p.top_k.each != nullptr || p.min_p.each != nullptr || p.min_p.all > 0.0F) return false;
  const bool has_each = p.top_p.each != nullptr;
  const bool has_top_k = p.top_k.all < p.vocab;
  if (has_top_k && (has_each || p.top_p.all < 1.0F || p.top_k.all <= kMostStreamedTopK))
    return false;
  const bool is_tried =
      has_each || sampling::is_tried(p.top_k.all, p.top_p.all, p.min_p.all, p.vocab);
  // A row has at most kMaxCluster CTAs, so each SM of a long row has many elements.
  const int64_t elements_of_sm = std::max(int64_t{p.num_rows} * p.vocab / num_sms(device),
                                          has_each ? 0 : int64_t{p.vocab} / kMaxCluster);
  if (has_top_k || p.logprobs != nullptr || !is_tried) {
    const int readings = has_top_k ? 2 : 1;  // of most rows, by counted_kernel()
    return p.vocab > kMaxHeld &&
           (!has_clusters(device) || (p.num_rows > readings * num_sms(device) / 2 &&
                                      elements_of_sm > readings * kFewWithThreshold));
  }
  return p.vocab > kLeastOfCta && elements_of_sm > (has_each ? 2 : 1) * kFewElementsOfSm;
}

/// Whether stream_kernel() is to draw from all rows. It is faster than a cluster for each row if
/// there is at least one row per SM. If filters may keep more than its lists hold, clusters draw.
bool is_streamed(const SampleParams& p, Device device) {
  if (p.from_probs || p.joint || p.vocab <= kMaxHeld || !has_room_for_entries(p.vocab))
    return false;
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
