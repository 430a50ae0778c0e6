// SPDX-License-Identifier: Apache-2.0
#include "plan/select_kernel.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "common/error.h"
#include "common/kv_layout.h"
#include "kernels/device/architecture.h"
#include "kernels/instances.h"

namespace flashplan {
namespace {

constexpr int32_t kMaxHeads = 1 << 16;
constexpr int32_t kMaxHeadDim = 4096;
constexpr int32_t kMaxCtas = 4096;

Status check_at_least(const char* name, int32_t value, int32_t minimum) {
  if (value >= minimum) return {};
  return error(StatusCode::kInvalidArgument, "%s: expected >= %d, got %d", name, minimum, value);
}

Status check_at_most(const char* name, int32_t value, int32_t maximum) {
  if (value <= maximum) return {};
  return error(StatusCode::kInvalidArgument, "%s: expected <= %d, got %d", name, maximum, value);
}

Status check_heads(const AttentionOptions& o) {
  FLASHPLAN_RETURN_IF_ERROR(check_at_least("num_qo_heads", o.num_qo_heads, 1));
  FLASHPLAN_RETURN_IF_ERROR(check_at_most("num_qo_heads", o.num_qo_heads, kMaxHeads));
  FLASHPLAN_RETURN_IF_ERROR(check_at_least("num_kv_heads", o.num_kv_heads, 1));
  if (o.num_qo_heads % o.num_kv_heads != 0) {
    return error(StatusCode::kInvalidArgument,
                 "num_qo_heads: expected a multiple of num_kv_heads (%d), got %d", o.num_kv_heads,
                 o.num_qo_heads);
  }
  FLASHPLAN_RETURN_IF_ERROR(check_at_least("head_dim_qk", o.head_dim_qk, 1));
  FLASHPLAN_RETURN_IF_ERROR(check_at_most("head_dim_qk", o.head_dim_qk, kMaxHeadDim));
  FLASHPLAN_RETURN_IF_ERROR(check_at_least("head_dim_vo", o.head_dim_vo, 1));
  return check_at_most("head_dim_vo", o.head_dim_vo, kMaxHeadDim);
}

Status check_device(Device device) {
  const bool exists =
      device.type == DeviceType::kCuda || (device.type == DeviceType::kCpu && device.index == 0);
  if (exists) return {};  // whether there is such a GPU is asked later
  return error(StatusCode::kInvalidArgument, "device: expected cpu or cuda:<index>, got %s",
               to_string(device).text);
}

Status check_ranges(const AttentionOptions& o) {
  FLASHPLAN_RETURN_IF_ERROR(check_kv_layout(o.kv_layout));
  FLASHPLAN_RETURN_IF_ERROR(check_device(o.device));
  FLASHPLAN_RETURN_IF_ERROR(check_at_least("page_size", o.page_size, 0));
  FLASHPLAN_RETURN_IF_ERROR(check_at_least("window_left", o.window_left, -1));
  FLASHPLAN_RETURN_IF_ERROR(check_at_least("max_batch_size", o.max_batch_size, 1));
  FLASHPLAN_RETURN_IF_ERROR(check_at_most("max_batch_size", o.max_batch_size, 1 << 20));
  FLASHPLAN_RETURN_IF_ERROR(check_at_least("max_qo_tokens", o.max_qo_tokens, 1));
  FLASHPLAN_RETURN_IF_ERROR(check_at_most("max_qo_tokens", o.max_qo_tokens, 1 << 24));
  FLASHPLAN_RETURN_IF_ERROR(check_at_least("num_ctas", o.num_ctas, 0));
  FLASHPLAN_RETURN_IF_ERROR(check_at_most("num_ctas", o.num_ctas, kMaxCtas));
  const int64_t max_rows = int64_t{o.max_qo_tokens} * (o.num_qo_heads / o.num_kv_heads);
  if (max_rows > INT32_MAX) {
    return error(StatusCode::kInvalidArgument,
                 "max_qo_tokens: expected max_qo_tokens * group_size <= %d, got %lld", INT32_MAX,
                 static_cast<long long>(max_rows));
  }
  // A subnormal number has few digits, and its inverse overflows.
  if (o.softmax_scale && !(std::isnormal(*o.softmax_scale) && *o.softmax_scale > 0.0F)) {
    return error(StatusCode::kInvalidArgument,
                 "softmax_scale: expected a normal float32 > 0, got %g",
                 static_cast<double>(*o.softmax_scale));
  }
  if (o.softcap != 0.0F && !(std::isnormal(o.softcap) && o.softcap > 0.0F)) {
    return error(StatusCode::kInvalidArgument,
                 "softcap: expected 0 or a normal float32 > 0, got %g",
                 static_cast<double>(o.softcap));
  }
  return {};
}

bool is_wide_float(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

bool is_narrow_float(DType dtype) {
  return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2;
}

Status check_dtypes(const AttentionOptions& o) {
  if (!is_wide_float(o.q_dtype)) {
    return error(StatusCode::kUnsupported, "q_dtype: expected float32, float16 or bfloat16, got %s",
                 to_string(o.q_dtype));
  }
  if (o.kv_dtype != o.q_dtype && !is_narrow_float(o.kv_dtype)) {
    return error(StatusCode::kUnsupported,
                 "kv_dtype: expected %s (as q), float8_e4m3fn or float8_e5m2, got %s",
                 to_string(o.q_dtype), to_string(o.kv_dtype));
  }
  if (!is_wide_float(o.o_dtype)) {
    return error(StatusCode::kUnsupported, "o_dtype: expected float32, float16 or bfloat16, got %s",
                 to_string(o.o_dtype));
  }
  return {};
}

KernelConfig cpu_config(const AttentionOptions& o, const DeviceLimits& device) {
  KernelConfig config;
  config.family = KernelFamily::kCpu;
  config.kv_dtype = o.kv_dtype;
  // A converted tile of 32 x 128 floats is 16 KB: it stays in the first-level cache while the rows
  // of a query tile pass over it. 128 rows against 64: 1 to 4 % faster prompts, planned in 3/4 of
  // the time.
  config.tile_q = kCpuTileQ;
  config.tile_kv = kCpuTileKv;
  // Several queues per thread, taken as threads become free, even out what other programs take.
  constexpr int32_t kQueuesPerThread = 4;
  config.num_ctas = o.num_ctas > 0 ? o.num_ctas : kQueuesPerThread * device.num_processors;
  config.chunk_kv = o.batch_invariant ? 1024 : 0;
  // Loading and converting a step of keys costs as much as about eight query rows over it.
  config.cost = {.tile = 8, .tile_row = 1, .step = 8, .step_row = 1, .split = 16};
  return config;
}

/// The architecture whose machine code a device runs, as 10 * major + minor; 0: none. Code for 8.6
/// also runs on 8.9; that for 9.0a on 9.0 alone, as that for 8.7, an embedded GPU; that for 8.0 not
/// on 8.6, which has less shared memory. CUDA takes the nearest that the device can run.
int32_t architecture_for(const char* architectures, int32_t major, int32_t minor) {
  constexpr int32_t kEmbedded = 87;
  const int32_t own = 10 * major + minor;
  int32_t nearest = 0;
  for (const char* next = architectures; *next != '\0';) {
    char* end = nullptr;
    const auto number = static_cast<int32_t>(std::strtol(next, &end, 10));
    const bool same_alone = *end == 'a' || number == kEmbedded || own == kEmbedded;
    if (number / 10 == major && (same_alone ? number == own : number <= own)) {
      nearest = std::max(nearest, number);
    }
    while (*end != '\0' && *end != ';') ++end;
    next = *end == ';' ? end + 1 : end;
  }
  const bool fits = device::smem_per_sm(nearest) <= device::smem_per_sm(own);
  return fits ? nearest : 0;
}

Status check_gpu(const AttentionOptions& o, const DeviceLimits& device, int32_t architecture) {
  const DeviceName name = to_string(o.device);
  if (device.instances.empty()) {
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
  if (architecture == 0) {
    return error(StatusCode::kUnsupported,
                 "device: expected a GPU of an architecture that was built for (%s), got %s of "
                 "compute capability %d.%d",
                 device.architectures, name.text, device.major, device.minor);
  }
  return {};
}

/// What an instance is compiled for, in the order in which it is asked for.
enum class Axis : int32_t { kQDType, kKvDType, kHeadDim, kSoftcap, kNone };

/// The first axis along which `instance` does not serve the options.
Axis first_unserved(const KernelInstance& instance, const AttentionOptions& o) {
  if (instance.q_dtype != o.q_dtype) return Axis::kQDType;
  if (instance.kv_dtype != o.kv_dtype) return Axis::kKvDType;
  if (instance.head_dim_qk < o.head_dim_qk || instance.head_dim_vo < o.head_dim_vo) {
    return Axis::kHeadDim;
  }
  return instance.softcap == (o.softcap > 0.0F) ? Axis::kNone : Axis::kSoftcap;
}

struct Text {
  char text[128] = {};
};

Text offer(const KernelInstance& instance, Axis axis) {
  Text offer;
  const auto print = [&offer](const char* format, auto... values) {
    std::snprintf(offer.text, sizeof(offer.text), format, values...);
  };
  switch (axis) {
    case Axis::kQDType: print("%s", to_string(instance.q_dtype)); break;
    case Axis::kKvDType: print("%s", to_string(instance.kv_dtype)); break;
    case Axis::kHeadDim: print("(%d, %d)", instance.head_dim_qk, instance.head_dim_vo); break;
    default: print("%s", instance.softcap ? "> 0" : "0"); break;
  }
  return offer;
}

/// The instances that come nearest fail at `axis`: an error that says what they offer there.
Status unserved(const AttentionOptions& o, std::span<const KernelInstance> instances, Axis axis) {
  Text offers;
  Text last;
  std::size_t used = 0;
  for (const KernelInstance& instance : instances) {
    if (first_unserved(instance, o) != axis) continue;
    // Instances that are the same up to an axis stand together.
    const Text next = offer(instance, axis);
    if (std::strcmp(next.text, last.text) == 0) continue;
    last = next;
    const int length = std::snprintf(offers.text + used, sizeof(offers.text) - used, "%s%s",
                                     used > 0 ? ", " : "", next.text);
    used = std::min(used + static_cast<std::size_t>(length), sizeof(offers.text) - 1);
  }
  const auto refuse = [&](const char* argument, const char* got) {
    return error(StatusCode::kUnsupported, "%s: expected %s%s (compiled in for cuda), got %s",
                 argument, axis == Axis::kHeadDim ? "up to " : "", offers.text, got);
  };
  if (axis == Axis::kQDType) return refuse("q_dtype", to_string(o.q_dtype));
  if (axis == Axis::kKvDType) return refuse("kv_dtype", to_string(o.kv_dtype));
  Text got;
  if (axis == Axis::kHeadDim) {
    std::snprintf(got.text, sizeof(got.text), "(%d, %d)", o.head_dim_qk, o.head_dim_vo);
    return refuse("head_dim_qk, head_dim_vo", got.text);
  }
  std::snprintf(got.text, sizeof(got.text), "%g", static_cast<double>(o.softcap));
  return refuse("softcap", got.text);
}

/// The smallest instance that serves the options.
Status find_instance(const AttentionOptions& o, std::span<const KernelInstance> instances,
                     const KernelInstance** found) {
  const KernelInstance* best = nullptr;
  Axis nearest = Axis::kQDType;
  const auto size = [](const KernelInstance& i) { return i.head_dim_qk + i.head_dim_vo; };
  for (const KernelInstance& instance : instances) {
    const Axis axis = first_unserved(instance, o);
    nearest = std::max(nearest, axis);
    if (axis != Axis::kNone) continue;
    if (best == nullptr || size(instance) < size(*best)) best = &instance;
  }
  *found = best;
  return best != nullptr ? Status() : unserved(o, instances, nearest);
}

const KernelTiling& tiling_for(const KernelInstance& instance, int32_t architecture) {
  const int32_t smem = device::smem_per_sm(architecture);
  return *std::ranges::find(instance.tilings, smem, &KernelTiling::smem_per_sm);
}

Status cuda_config(const AttentionOptions& o, const DeviceLimits& device, KernelConfig* config) {
  const int32_t architecture = architecture_for(device.architectures, device.major, device.minor);
  FLASHPLAN_RETURN_IF_ERROR(check_gpu(o, device, architecture));
  const KernelInstance* instance = nullptr;
  FLASHPLAN_RETURN_IF_ERROR(find_instance(o, device.instances, &instance));
  const KernelTiling& tiling = tiling_for(*instance, architecture);
  config->family = instance->family;
  config->kv_dtype = o.kv_dtype;
  config->instance = instance;
  config->tiling = &tiling;
  config->tile_q = tiling.tile_q;
  config->few_rows = tiling.few_rows;
  config->tile_kv = tiling.tile_kv;
  // One queue for each CTA that can be there at once: none waits for another's end.
  config->num_ctas =
      o.num_ctas > 0 ? o.num_ctas : std::min(device.num_sms * tiling.ctas_per_sm, kMaxCtas);
  config->chunk_kv = o.batch_invariant ? 4096 : 0;
  // In units of what one query row adds to a step. Loading the keys of a step costs as much as 200
  // rows over it, starting a tile as much as 300, and writing and merging a partial result 400, of
  // steps of 64 keys; in shorter ones the unit is smaller.
  const int32_t shorter = std::max(64 / tiling.tile_kv, 1);
  config->item_steps = 32 * shorter;
  config->cost = {.tile = 300 * shorter,
                  .tile_row = 0,
                  .step = 200,
                  .step_row = 1,
                  .split = 400 * shorter,
                  .split_row = 12 * shorter};
  return {};
}

}  // namespace

Status select_kernel(const AttentionOptions& options, const DeviceLimits& device,
                     KernelConfig* config) noexcept {
  FLASHPLAN_RETURN_IF_ERROR(check_heads(options));
  FLASHPLAN_RETURN_IF_ERROR(check_ranges(options));
  FLASHPLAN_RETURN_IF_ERROR(check_dtypes(options));
  if (options.device.type != DeviceType::kCpu) return cuda_config(options, device, config);
  *config = cpu_config(options, device);
  return {};
}

}  // namespace flashplan
