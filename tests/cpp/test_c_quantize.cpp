// SPDX-License-Identifier: Apache-2.0
// Functions of the C interface that write 8-bit queries and keys do what those of the C++ one do,
// and refuse what it refuses.
#include "c_operators.h"
#include "c_structs.h"
#include "check.h"
#include "flashplan/flashplan.h"
#include "flashplan/flashplan_c_ops.h"
#include "host_tensor.h"
#include "refusal.h"

namespace flashplan::test {
namespace {

const auto kInvalid = StatusCode::kInvalidArgument;

TEST(quantized_heads) {
  const HostTensor x = random_tensor(6, DType::kBFloat16, {3, 2, 40});
  CTensors owner;
  Message message;
  const HostTensor wanted(DType::kFloat8E5M2, {3, 2, 40}), out(DType::kFloat8E5M2, {3, 2, 40});
  const HostTensor wanted_scale = float_tensor({0, 0}), scale = float_tensor({0, 0});
  const flashplan_tensor* c_x = owner.add(x.view());
  const flashplan_tensor* c_out = owner.add(out.view());
  const flashplan_tensor* c_scale = owner.add(scale.view());
  for (const int32_t source :
       {FLASHPLAN_SCALE_OF_VALUES, FLASHPLAN_SCALE_OF_TENSOR, FLASHPLAN_SCALE_OF_NUMBER}) {
    CHECK(quantize_fp8(x.view(), wanted.view(), wanted_scale.view(),
                       static_cast<ScaleSource>(source), 0.5F)
              .ok());
    check_ok(flashplan_quantize_fp8(c_x, c_out, c_scale, source, 0.5F, nullptr, message), message);
    CHECK(out.bytes() == wanted.bytes());
    CHECK(scale.bytes() == wanted_scale.bytes());
  }
  CHECK(scale.bytes() == float_tensor({0.5, 0.5}).bytes());
  flashplan_status status = flashplan_quantize_fp8(c_x, c_out, c_scale, 3, 1.0F, nullptr, message);
  check_refused(as_status(status, message), kInvalid, "source");
  status = flashplan_quantize_fp8(c_x, c_out, nullptr, FLASHPLAN_SCALE_OF_VALUES, 1.0F, nullptr,
                                  message);
  check_refused(as_status(status, message), kInvalid, "scale");
  status =
      flashplan_quantize_fp8(c_x, c_x, c_scale, FLASHPLAN_SCALE_OF_VALUES, 1.0F, nullptr, message);
  check_refused(as_status(status, message), StatusCode::kInvalidType, "out");
}

TEST(rotations_to_8_bits) {
  const HostTensor q = random_tensor(6, DType::kFloat16, {3, 4, 16});
  const HostTensor k = random_tensor(7, DType::kFloat16, {3, 2, 16});
  const HostTensor table = random_tensor(8, DType::kFloat32, {31, 12});
  const HostTensor positions = int_tensor({9, 30, 7});
  const HostTensor q_scales = float_tensor({0.5, 2}), k_scales = float_tensor({3});
  const auto narrow = [](int64_t heads) { return HostTensor(DType::kFloat8E4M3, {3, heads, 16}); };
  const HostTensor wanted_q = narrow(4), wanted_k = narrow(2), out_q = narrow(4), out_k = narrow(2);
  CTensors owner;
  Message message;
  auto tensors = started(flashplan_rope_tensors_init);
  CHECK_EQ(tensors.q_scale, 1.0F);
  CHECK_EQ(tensors.k_scale, 1.0F);
  tensors.q = owner.add(q.view());
  tensors.k = owner.add(k.view());
  tensors.positions = owner.add(positions.view());
  tensors.out_q = owner.add(out_q.view());
  tensors.out_k = owner.add(out_k.view());
  tensors.q_scales = owner.add(q_scales.view());
  tensors.k_scales = owner.add(k_scales.view());
  tensors.q_scale = 0.25F;
  tensors.k_scale = 0.75F;
  const RopeScales scales = {0.25F, 0.75F, q_scales.view(), k_scales.view()};
  const auto check_equal = [&](const flashplan_rope* rope) {
    check_ok(flashplan_apply_rope_scaled(&tensors, rope, nullptr, message), message);
    CHECK(out_q.bytes() == wanted_q.bytes());
    CHECK(out_k.bytes() == wanted_k.bytes());
    CHECK(out_q.bytes() != narrow(4).bytes());
  };
  const auto rope = started(flashplan_rope_init);
  CHECK(apply_rope(q.view(), k.view(), positions.view(), Rope(), wanted_q.view(), wanted_k.view(),
                   nullptr, scales)
            .ok());
  check_equal(&rope);
  tensors.cos_sin_cache = owner.add(table.view());
  tensors.interleaved = 1;
  CHECK(apply_rope(q.view(), k.view(), positions.view(), table.view(), true, wanted_q.view(),
                   wanted_k.view(), nullptr, scales)
            .ok());
  check_equal(nullptr);

  const auto refused = [&](const flashplan_rope_tensors* given, const flashplan_rope* turns,
                           const char* argument) {
    check_refused(as_status(flashplan_apply_rope_scaled(given, turns, nullptr, message), message),
                  kInvalid, argument);
  };
  refused(nullptr, nullptr, "tensors");
  refused(&tensors, &rope, "rope");
  flashplan_rope_tensors wrong = tensors;
  wrong.reserved = 1;
  refused(&wrong, nullptr, "tensors.reserved");
  wrong = tensors;
  wrong.struct_size = 80;
  refused(&wrong, nullptr, "tensors.struct_size");
  wrong = tensors;
  wrong.k_scale = 0.0F;
  refused(&wrong, nullptr, "k_scale");
}

}  // namespace
}  // namespace flashplan::test
