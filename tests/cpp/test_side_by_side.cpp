// SPDX-License-Identifier: Apache-2.0
// How many processors the kernel for many rows gets beside the one for few.
#include <cstdint>

#include "check.h"
#include "fake_devices.h"
#include "plan/kernel/side_by_side.h"
#include "problem.h"

namespace flashplan::test {
namespace {

constexpr int32_t kTileQ = 128;
constexpr int32_t kProcessors = 132;

/// 32 query heads for 8 kv heads of 128 dims.
AttentionOptions options() {
  AttentionOptions o = llama_on_gpu();
  o.num_kv_heads = 8;
  o.num_qo_heads = 32;
  o.batch_invariant = true;
  return o;
}

int32_t share(const AttentionOptions& options, const HostBatch& batch) {
  return processors_for_many_rows(batch.view(), options, kTileQ, kProcessors);
}

HostBatch chunk_and_decodes(int32_t chunk, int32_t keys, int32_t decodes, int32_t keys_of_decode) {
  HostBatch batch;
  batch.add(chunk, keys);
  for (int32_t i = 0; i < decodes; ++i) batch.add(1, keys_of_decode);
  return batch;
}

TEST(both_kernels_end_at_about_the_same_time) {
  // For each kv head and dim: 8192 rows x 7168 keys, at 1450 products of pairs a clock, take 40,500
  // clocks; 64 x 4096 keys of 2 bytes, at 29 bytes a clock, 18,100.
  AttentionOptions o = options();
  const HostBatch batch = chunk_and_decodes(2048, 8192, 64, 4096);
  CHECK_EQ(share(o, batch), 91);
  o.kv_dtype = DType::kFloat8E4M3;  // half of the bytes, at 23 bytes a clock
  CHECK_EQ(share(o, batch), 103);
  o.causal = false;
  CHECK(share(o, batch) > 103);
  o.window_left = 127;  // each query sees 128 keys, so that both kinds have less to do
  CHECK_EQ(share(o, batch), share(o, chunk_and_decodes(2048, 128, 64, 128)));
}

TEST(rows_are_padded_to_tiles) {
  const AttentionOptions o = options();
  CHECK_EQ(share(o, chunk_and_decodes(17, 9000, 64, 4096)),
           share(o, chunk_and_decodes(32, 9000 + 7, 64, 4096)));
}

TEST(each_kernel_gets_a_processor) {
  const AttentionOptions o = options();
  CHECK_EQ(share(o, chunk_and_decodes(20, 20, 1000, 100000)), 1);
  CHECK_EQ(share(o, chunk_and_decodes(8192, 100000, 1, 1)), kProcessors - 1);
  CHECK_EQ(share(o, chunk_and_decodes(8192, 100000, 1, 0)), kProcessors - 1);
  CHECK_EQ(share(o, chunk_and_decodes(17, 0, 1, 0)), 1);
}

}  // namespace
}  // namespace flashplan::test
