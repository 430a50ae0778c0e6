// SPDX-License-Identifier: Apache-2.0
#include "plan/kernel/select_kernel.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <tuple>

#include "common/error.h"
#include "plan/check_options.h"
#include "plan/kernel/batch_kind.h"

namespace flashplan {
namespace {

/// Whether a device can run the code of a kernel. Code for 8.6 also runs on 8.9. Code for 9.0a runs
/// on 9.0 alone, and code for 8.7, an embedded GPU, on 8.7 alone. Code for 8.0 does not run on 8.6,
/// which has less shared memory than the kernel was compiled for.
bool can_run(const Kernel& kernel, const DeviceLimits& device) {
  constexpr int32_t kEmbedded = 87;
  const Architecture code = kernel.architecture;
  if (code.number == 0) return true;
  const int32_t own = 10 * device.major + device.minor;
  if (code.number / 10 != device.major) return false;
  const bool same_alone = code.suffix == 'a' || code.number == kEmbedded || own == kEmbedded;
  if (same_alone ? code.number != own : code.number > own) return false;
  return smem_per_sm(code.number) <= smem_per_sm(own);
}

bool is_candidate(const Kernel& kernel, const DeviceLimits& device) {
  return (device.family.empty() || kernel.family->name == device.family) && can_run(kernel, device);
}

/// A list for a message: "a, b, c". What does not fit is cut off.
class List {
 public:
  /// Equal items must be added one after the other, and are listed once.
  void add(const char* item) {
    if (std::strcmp(item, last_) == 0) return;
    std::snprintf(last_, sizeof(last_), "%s", item);
    const int length =
        std::snprintf(text_ + used_, sizeof(text_) - used_, "%s%s", used_ > 0 ? ", " : "", item);
    used_ = std::min(used_ + static_cast<std::size_t>(length), sizeof(text_) - 1);
  }
  const char* text() const { return text_; }

 private:
  char text_[128] = {};
  char last_[32] = {};
  std::size_t used_ = 0;
};

Status check_gpu(const AttentionOptions& o, const DeviceLimits& device) {
  const DeviceName name = to_string(o.device);
  if (device.kernels.empty()) {
    return error(StatusCode::kUnsupported, "device: expected cpu (built without CUDA), got %s",
                 name.text);
  }
  if (device.num_gpus == 0) {
    return error(StatusCode::kUnsupported, "device: expected cpu (no GPU was found), got %s",
                 name.text);
  }
  if (o.device.index < 0 || o.device.index >= device.num_gpus) {
    return error(StatusCode::kInvalidArgument, "device: expected an index < %d, got %s",
                 device.num_gpus, name.text);
  }
  const auto runs = [&](const Kernel& kernel) { return can_run(kernel, device); };
  if (std::ranges::none_of(device.kernels, runs)) {
    return error(StatusCode::kUnsupported,
                 "device: expected a GPU of an architecture that was built for (%s), got %s of "
                 "compute capability %d.%d",
                 architectures_of(device.kernels).text, name.text, device.major, device.minor);
  }
  const auto is_of_family = [&](const Kernel& kernel) { return is_candidate(kernel, device); };
  if (std::ranges::none_of(device.kernels, is_of_family)) {
    List families;
    for (const Kernel& kernel : device.kernels) {
      if (runs(kernel)) families.add(kernel.family->name);
    }
    return error(StatusCode::kUnsupported, "FLASHPLAN_KERNEL_FAMILY: expected %s, got %.*s",
                 families.text(), static_cast<int>(device.family.size()), device.family.data());
  }
  return {};
}

const char* name_of(KernelGroup group) {
  return group == KernelGroup::kHopper ? "hopper" : "general";
}

struct Text {
  char text[32] = {};
};

/// The value of `kernel` at `axis`, as text for a message.
Text offer(const Kernel& kernel, Axis axis) {
  Text offer;
  const auto print = [&offer](const char* format, auto... values) {
    std::snprintf(offer.text, sizeof(offer.text), format, values...);
  };
  switch (axis) {
    case Axis::kKernels: print("%s", name_of(kernel.family->group)); break;
    case Axis::kSharedKv: print("%s", kernel.family->shared_kv ? "true" : "false"); break;
    case Axis::kQDType: print("%s", to_string(kernel.q_dtype)); break;
    case Axis::kKvDType: print("%s", to_string(kernel.kv_dtype)); break;
    case Axis::kHeadDim: print("(%d, %d)", kernel.head_dim_qk, kernel.head_dim_vo); break;
    case Axis::kSoftcap: print("%s", kernel.softcap ? "> 0" : "0"); break;
    case Axis::kBatchInvariant: print("%s", "false"); break;
    case Axis::kVariant: print("%s", "none"); break;
    case Axis::kRope: print("%s", "none"); break;
    case Axis::kNone: break;
  }
  return offer;
}

/// The value of the options at `axis`, as text for a message. Sets `argument` to the name of the
/// option.
Text asked(const AttentionOptions& o, Axis axis, const char** argument) {
  Text asked;
  const auto print = [&](const char* name, const char* format, auto... values) {
    *argument = name;
    std::snprintf(asked.text, sizeof(asked.text), format, values...);
  };
  switch (axis) {
    case Axis::kKernels: print("kernels", "%s", name_of(o.kernels)); break;
    case Axis::kSharedKv: print("shared_kv", "%s", o.shared_kv ? "true" : "false"); break;
    case Axis::kQDType: print("q_dtype", "%s", to_string(o.q_dtype)); break;
    case Axis::kKvDType: print("kv_dtype", "%s", to_string(o.kv_dtype)); break;
    case Axis::kHeadDim:
      print("head_dim_qk, head_dim_vo", "(%d, %d)", o.head_dim_qk, o.head_dim_vo);
      break;
    case Axis::kSoftcap: print("softcap", "%g", static_cast<double>(o.softcap)); break;
    case Axis::kBatchInvariant: print("batch_invariant", "%s", "true"); break;
    case Axis::kVariant: print("variant", "%.31s", o.variant.name()); break;
    case Axis::kRope: print("rope", "theta %g", o.rope->theta); break;
    case Axis::kNone: break;
  }
  return asked;
}

/// The error for options that no kernel serves. `axis`: the last axis at which a kernel fails. The
/// kernels that fail there match the options at all earlier axes, and the message lists their
/// values at `axis`.
Status unserved(const AttentionOptions& o, const DeviceLimits& device, Axis axis) {
  List offers;
  for (const Kernel& kernel : device.kernels) {
    if (!is_candidate(kernel, device) || kernel.first_unserved(o) != axis) continue;
    offers.add(offer(kernel, axis).text);
  }
  const char* argument = "";
  const Text got = asked(o, axis, &argument);
  return error(StatusCode::kUnsupported, "%s: expected %s%s (compiled in for %s), got %s", argument,
               axis == Axis::kHeadDim && !o.shared_kv ? "up to " : "", offers.text(),
               o.device.type == DeviceType::kCpu ? "cpu" : "cuda", got.text);
}

/// Whether `a` is chosen rather than `b` if both serve the options: the kernel with smaller head
/// dims, then the one whose family has the higher preference, then the one for the newer
/// architecture. CUDA too runs the code of the newest architecture that the GPU can run.
bool is_better(const Kernel& a, const Kernel& b, const AttentionOptions& options, BatchKind kind) {
  const auto key = [&](const Kernel& kernel) {
    return std::tuple(kernel.head_dim_qk + kernel.head_dim_vo,
                      -kernel.family->preference(options, kind), -kernel.architecture.number);
  };
  return key(a) < key(b);
}

/// Chooses the kernel for a kind of batches.
Status select_for(BatchKind kind, const AttentionOptions& options, const DeviceLimits& device,
                  KernelChoice* choice) {
  const Kernel* best = nullptr;
  Axis nearest = Axis::kKernels;
  for (const Kernel& kernel : device.kernels) {
    if (!is_candidate(kernel, device)) continue;
    const Axis axis = kernel.first_unserved(options);
    nearest = std::max(nearest, axis);
    if (axis != Axis::kNone) continue;
    if (best == nullptr || is_better(kernel, *best, options, kind)) best = &kernel;
  }
  if (best == nullptr) return unserved(options, device, nearest);
  choice->kernel = *best;
  if (options.rope && best->rotating_geometry) choice->kernel.geometry = *best->rotating_geometry;
  if (needs_compiler(options) && kind == BatchKind::kFewRows && best->few_rows_geometry) {
    choice->kernel.geometry = *best->few_rows_geometry;
  }
  KernelCode& code = choice->kernel.code;
  if (pairs_heads(*best, options) && code.short_rows_first != nullptr) {
    code.few_rows_first = code.many_rows_first = code.short_rows_first;
  }
  // There is one queue for each CTA, or for each pair of CTAs, that a GPU holds at once, so that no
  // CTA waits for another one to end.
  choice->num_ctas = options.num_ctas;
  if (options.num_ctas == 0) {
    const int32_t num_queues =
        device.num_processors * best->geometry.queues_per_processor / best->geometry.ctas_of_queue;
    choice->num_ctas = std::clamp(num_queues, 1, kMaxCtas);
  }
  if (options.batch_invariant) {
    const KernelTuning& tuning = best->tuning;
    const bool is_shorter = kind == BatchKind::kFewRows && tuning.few_rows_chunk_kv > 0;
    choice->chunk_kv = is_shorter ? tuning.few_rows_chunk_kv : tuning.chunk_kv;
  }
  return {};
}

}  // namespace

Status select_kernel(const AttentionOptions& options, const DeviceLimits& device,
                     KernelChoices* choices) noexcept {
  FLASHPLAN_RETURN_IF_ERROR(check_options(options));
  if (options.device.type != DeviceType::kCpu) {
    FLASHPLAN_RETURN_IF_ERROR(check_gpu(options, device));
  }
  const BatchKind kind = kind_of_bounds(options);
  FLASHPLAN_RETURN_IF_ERROR(select_for(kind, options, device, &choices->first));
  choices->second.reset();
  if (!allows_both_kinds(options)) return {};
  KernelChoice other;
  FLASHPLAN_RETURN_IF_ERROR(select_for(other_kind(kind), options, device, &other));
  // A kernel that is compiled at run time costs seconds when the plan is made. A second kernel of
  // the same family is not worth this time: it would be the first one without some sizes of tiles.
  const bool is_same = needs_compiler(options) ? other.kernel.family == choices->first.kernel.family
                                               : other == choices->first;
  if (!is_same) choices->second = other;
  return {};
}

std::vector<FamilyAnswer> ask_families(const AttentionOptions& options,
                                       const DeviceLimits& device) {
  std::vector<FamilyAnswer> answers;
  for (const Kernel& kernel : device.kernels) {
    const auto is_same = [&](const FamilyAnswer& a) { return a.family == kernel.family; };
    if (!is_candidate(kernel, device) || std::ranges::any_of(answers, is_same)) continue;
    DeviceLimits alone = device;
    alone.family = kernel.family->name;
    KernelChoice choice;
    answers.push_back(
        {kernel.family, select_for(kind_of_bounds(options), options, alone, &choice)});
  }
  return answers;
}

}  // namespace flashplan
