// SPDX-License-Identifier: Apache-2.0
// Describes a plan's schedule as a text and as a picture.
#include <algorithm>
#include <cstdarg>
#include <cstdio>

#include "api/plan_impl.h"
#include "flashplan/plan.h"
#include "plan/kernel/batch_kind.h"

namespace flashplan {
namespace {

[[gnu::format(printf, 2, 3)]] void append(std::string& text, const char* format, ...) {
  char line[256];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof(line), format, arguments);
  va_end(arguments);
  text += line;
}

/// The cost of the longest queue divided by the mean; 1 is a perfect balance.
double imbalance(const Schedule& schedule) {
  int64_t total = 0;
  int64_t largest = 0;
  for (const int64_t cost : schedule.cta_cost) {
    total += cost;
    largest = std::max(largest, cost);
  }
  if (total == 0) return 1.0;
  return static_cast<double>(largest) * schedule.num_ctas() / static_cast<double>(total);
}

/// Why no prefix is computed once for all requests that share it.
const char* reason_not_to_share(const Plan::Impl& plan) {
  if (plan.options.batch_invariant) return "batch_invariant";
  if (plan.options.window_left >= 0) return "window_left";
  if (!plan.options.variant.empty()) return "variant";
  if (plan.options.rope) return "rope";
  if (!plan.kernel().choice.kernel.family->shares_prefixes) return "not by this kernel";
  return "it would take no less time, or more memory than the workspace has";
}

/// Lists which of the given prefixes are computed once.
void append_prefixes(std::string& text, const Plan::Impl& plan) {
  constexpr size_t kMostPrefixes = 16;
  const Schedule& schedule = plan.schedule();
  const size_t count = schedule.prefixes.size();
  append(text, "%d shared prefixes given, ", plan.num_shared_prefixes);
  if (count == 0) {
    append(text, "none computed once: %s\n", reason_not_to_share(plan));
    return;
  }
  append(text, "%zu row tiles of them computed once: %.0f %% of the work without\n", count,
         100.0 * static_cast<double>(schedule.total_cost) /
             static_cast<double>(schedule.total_cost + schedule.saved_cost));
  for (size_t i = 0; i < std::min(count, kMostPrefixes); ++i) {
    const SharedPrefix& prefix = schedule.prefixes[i];
    append(text, "  p%zu: keys [%d, %d) of requests %d to %d\n", i, prefix.keys.begin,
           prefix.keys.end, prefix.first_request, prefix.first_request + prefix.num_requests - 1);
  }
  if (count > kMostPrefixes) append(text, "  ... and %zu more\n", count - kMostPrefixes);
}

/// Why the batch runs on its kernel and not on the plan's other one.
const char* reason_for_kernel(const Plan::Impl& plan) {
  switch (plan.reason) {
    case KernelReason::kCaptured: return "a captured graph has only the kernel above";
    case KernelReason::kPrefixes: return "the kernel above is faster for so many shared keys";
    case KernelReason::kRows: break;
  }
  const bool has_few = plan.kind_of_kernel(plan.current) == BatchKind::kFewRows;
  if (plan.divides_batches()) {
    return has_few ? "no request has many query rows" : "no request has few query rows";
  }
  return has_few ? "requests have few query rows" : "a request has many query rows";
}

/// For each other kernel family that has kernels for the device, says why it does not run the
/// batch.
void append_other_families(std::string& text, const Plan::Impl& plan) {
  for (const FamilyAnswer& answer : ask_families(plan.options, plan.device)) {
    const auto is_its = [&](const PlanKernel& k) {
      return k.choice.kernel.family == answer.family;
    };
    if (plan.takes_two ? std::ranges::any_of(plan.kernels, is_its) : is_its(plan.kernel()))
      continue;
    const char* reason = "slower for these options";
    if (!answer.status.ok()) {
      reason = answer.status.message;
    } else if (std::ranges::any_of(plan.kernels, is_its)) {
      reason = reason_for_kernel(plan);
    }
    append(text, "not %s: %s\n", answer.family->name, reason);
  }
}

void append_work_tiles(std::string& text, const PlanKernel& with) {
  const Schedule& schedule = with.scheduler.schedule();
  append(
      text, "%zu work tiles, %d heads split, %d of %lld partial rows\n", schedule.tiles.size(),
      schedule.num_cut, schedule.num_partial_rows,
      static_cast<long long>(with.layout.max_partial_slots) * with.choice.kernel.geometry.tile_q);
}

/// Describes what the second kernel does, where a batch takes two.
void append_second_kernel(std::string& text, const Plan::Impl& plan) {
  const PlanKernel& with = plan.other_kernel();
  append(text, "requests of up to %d query rows for each kv head: kernel %s, %d queues\n",
         most_few_rows(plan.options), with.choice.kernel.name.data(), with.choice.num_ctas);
  text.append(to_string(with.choice.kernel.geometry)).append("\n");
  append_work_tiles(text, with);
  append(text, "largest queue %.3f of the mean\n", imbalance(with.scheduler.schedule()));
}

void append_summary(std::string& text, const Plan::Impl& plan) {
  const Schedule& schedule = plan.schedule();
  int64_t num_keys = 0;
  for (const int32_t kv_len : plan.kv_lens) num_keys += kv_len;
  const KernelChoice& choice = plan.kernel().choice;
  const Kernel& kernel = choice.kernel;
  append(text, "kernel %s, %d queues\n", kernel.name.data(), choice.num_ctas);
  append_other_families(text, plan);
  text.append(to_string(kernel.geometry)).append("\n");
  append(text,
         plan.options.topk > 0 ? "%d lists of keys, %d query tokens, %lld keys\n"
                               : "%d requests, %d query tokens, %lld keys\n",
         plan.batch_size, plan.num_tokens, static_cast<long long>(num_keys));
  append_work_tiles(text, plan.kernel());
  if (plan.num_prepared_tiles > 0) {
    const bool has_values = kernel.geometry.prepared_value_bytes > 0;
    append(text, "%s prepared, in %d tiles\n", has_values ? "keys and values" : "keys",
           plan.num_prepared_tiles);
  }
  append(text, "largest queue %.3f of the mean\n", imbalance(schedule));
  if (plan.num_shared_prefixes > 0) append_prefixes(text, plan);
  if (plan.takes_two) append_second_kernel(text, plan);
}

void append_queue(std::string& text, const Schedule& schedule, int32_t batch_size, int32_t cta) {
  constexpr int32_t kMostTiles = 6;
  const int32_t begin = schedule.cta_indptr[static_cast<size_t>(cta)];
  const int32_t end = schedule.cta_indptr[static_cast<size_t>(cta) + 1];
  append(text, "%5d %10lld %6d ", cta,
         static_cast<long long>(schedule.cta_cost[static_cast<size_t>(cta)]), end - begin);
  for (int32_t i = begin; i < std::min(end, begin + kMostTiles); ++i) {
    const WorkTile& tile = schedule.tiles[static_cast<size_t>(i)];
    const bool is_prefix = tile.segment >= batch_size;
    append(text, " %c%d.%d h%d-%d [%d, %d)%s", is_prefix ? 'p' : 'r',
           is_prefix ? tile.segment - batch_size : tile.segment, tile.row_tile, tile.kv_head,
           tile.kv_head + tile.num_kv_heads - 1, tile.kv_begin, tile.kv_end,
           tile.merge >= 0 ? "*" : "");
  }
  text += end - begin > kMostTiles ? " ...\n" : "\n";
}

// The picture has one line per queue, an axis of predicted time, and a legend. Sizes are in pixels.
constexpr int32_t kWidth = 640;
constexpr int32_t kTextHeight = 16;
constexpr int32_t kMostQueues = 64;
constexpr int32_t kMostNames = 8;  // the most names in the legend

std::string name_of(int32_t segment, int32_t batch_size) {
  const bool is_prefix = segment >= batch_size;
  return (is_prefix ? "prefix " : "request ") +
         std::to_string(is_prefix ? segment - batch_size : segment);
}

void append_box(std::string& svg, double x, int32_t y, double width, int32_t height,
                int32_t segment, bool is_merged) {
  append(svg, "<rect x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"%d\" fill=\"hsl(%d,60%%,%d%%)\">",
         x, y, width, height, segment * 47 % 360, is_merged ? 70 : 50);
}

/// Writes a text element. It sets no fill, so that it inherits the fill `currentColor` of <svg>.
/// This is the text colour of the web page that shows the picture, and so the text can be read on
/// light and on dark pages. `anchor` is start, middle or end.
void append_label(std::string& svg, int32_t x, int32_t y, const char* anchor,
                  const std::string& text) {
  append(svg, "<text x=\"%d\" y=\"%d\" text-anchor=\"%s\">", x, y, anchor);
  svg.append(text).append("</text>\n");
}

/// Draws a box for each work tile of a queue. The widths divide the queue's predicted time in
/// proportion to the keys of the tiles.
void append_boxes(std::string& svg, const Schedule& schedule, int32_t batch_size, int32_t cta,
                  int32_t line, int64_t largest) {
  const auto weight_of = [](const WorkTile& tile) {
    return int64_t{tile.num_kv_heads} * (int64_t{tile.kv_end} - tile.kv_begin + 1);
  };
  const int32_t begin = schedule.cta_indptr[static_cast<size_t>(cta)];
  const int32_t end = schedule.cta_indptr[static_cast<size_t>(cta) + 1];
  int64_t weight = 0;
  for (int32_t i = begin; i < end; ++i) weight += weight_of(schedule.tiles[static_cast<size_t>(i)]);
  const double scale = static_cast<double>(kWidth) *
                       static_cast<double>(schedule.cta_cost[static_cast<size_t>(cta)]) /
                       static_cast<double>(largest) /
                       static_cast<double>(std::max<int64_t>(weight, 1));
  double x = 0;
  for (int32_t i = begin; i < end; ++i) {
    const WorkTile& tile = schedule.tiles[static_cast<size_t>(i)];
    const double width = scale * static_cast<double>(weight_of(tile));
    append_box(svg, x, cta * line, std::max(width - 0.5, 0.5), line - 1, tile.segment,
               tile.merge >= 0);
    append(svg, "<title>queue %d: %s, keys %d to %d</title></rect>\n", cta,
           name_of(tile.segment, batch_size).c_str(), tile.kv_begin, tile.kv_end);
    x += width;
  }
}

void append_axis(std::string& svg, const Schedule& schedule, int32_t num_queues, int32_t y) {
  const double longest = imbalance(schedule);
  const auto mean = static_cast<int32_t>(kWidth / longest);
  append(svg, "<path d=\"M0 %dH%dM%d 0V%d\" stroke=\"currentColor\" fill=\"none\"/>\n", y, kWidth,
         mean, y);
  append_label(svg, 0, y + kTextHeight, "start",
               std::to_string(num_queues) + " of " + std::to_string(schedule.num_ctas()) +
                   " queues, predicted time to the right");
  std::string text;
  append(text, "line: the mean; longest queue: %.2f of it", longest);
  append_label(svg, kWidth, y + kTextHeight, "end", text);
}

void append_legend(std::string& svg, const Schedule& schedule, int32_t batch_size, int32_t y) {
  const auto num_segments = static_cast<int32_t>(schedule.segments.size());
  constexpr int32_t kStep = kWidth / kMostNames;
  for (int32_t i = 0; i < std::min(num_segments, kMostNames); ++i) {
    append_box(svg, i * kStep, y, 10, 10, i, false);
    svg += "</rect>\n";
    append_label(svg, i * kStep + 13, y + 9, "start", name_of(i, batch_size));
  }
  std::string text = "pale: partial results, which are merged";
  if (num_segments > kMostNames) {
    text += "; " + std::to_string(num_segments - kMostNames) + " more requests and prefixes";
  }
  append_label(svg, 0, y + kTextHeight + 9, "start", text);
}

}  // namespace

std::string Plan::describe() const noexcept try {
  if (!impl_ || !impl_->planned) return "no plan yet\n";
  std::string text;
  append_summary(text, *impl_);
  const Schedule& schedule = impl_->schedule();
  text += "queue       cost  tiles  request.rowtile heads [keys)   p = prefix, * = merged later\n";
  constexpr int32_t kMostLines = 16;
  for (int32_t c = 0; c < std::min(schedule.num_ctas(), kMostLines); ++c) {
    append_queue(text, schedule, impl_->batch_size, c);
  }
  if (schedule.num_ctas() > kMostLines) {
    append(text, "  ... and %d more queues\n", schedule.num_ctas() - kMostLines);
  }
  return text;
} catch (...) {
  return {};
}

std::string Plan::timeline_svg() const noexcept try {
  if (!impl_ || !impl_->planned) return {};
  const Schedule& schedule = impl_->schedule();
  const int32_t num_queues = std::min(schedule.num_ctas(), kMostQueues);
  const int32_t line = num_queues > 24 ? 5 : 10;
  const int32_t height = num_queues * line;
  const int64_t largest =
      std::max<int64_t>(1, *std::max_element(schedule.cta_cost.begin(), schedule.cta_cost.end()));

  std::string svg;
  append(svg,
         "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
         "font-family=\"sans-serif\" font-size=\"11\" fill=\"currentColor\">\n",
         kWidth, height + 4 * kTextHeight);
  for (int32_t c = 0; c < num_queues; ++c) {
    append_boxes(svg, schedule, impl_->batch_size, c, line, largest);
  }
  append_axis(svg, schedule, num_queues, height);
  append_legend(svg, schedule, impl_->batch_size, height + 2 * kTextHeight - 8);
  svg += "</svg>\n";
  return svg;
} catch (...) {
  return {};
}

}  // namespace flashplan
