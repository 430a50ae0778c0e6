# SPDX-License-Identifier: Apache-2.0
"""Code for FlashInfer on flashplan."""

# --8<-- [start:decode]
import torch

import flashplan.flashinfer as flashinfer

workspace = torch.empty(128 << 20, dtype=torch.uint8)  # on the device of the tensors
wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")

kv_indptr = torch.tensor([0, 2, 3], dtype=torch.int32)  # two requests, of two pages and of one
kv_indices = torch.tensor([3, 7, 12], dtype=torch.int32)
last_page_len = torch.tensor([5, 16], dtype=torch.int32)  # 16 + 5 and 16 keys
wrapper.plan(kv_indptr, kv_indices, last_page_len, 8, 2, 64, 16, q_data_type=torch.bfloat16)

q = torch.randn(2, 8, 64, dtype=torch.bfloat16)
kv_cache = torch.randn(40, 2, 16, 2, 64, dtype=torch.bfloat16)  # 40 pages of 16 tokens
o, lse = wrapper.run(q, kv_cache, return_lse=True)  # lse to base 2
# --8<-- [end:decode]
assert o.shape == q.shape
assert lse.shape == (2, 8)
