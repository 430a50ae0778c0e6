# SPDX-License-Identifier: Apache-2.0
"""Code for FlashAttention on flashplan."""

# --8<-- [start:flash]
import torch

from flashplan.flash_attn import flash_attn_with_kvcache

q = torch.randn(2, 1, 8, 64)  # one new token of two sequences
k, v = torch.randn(2, 2, 1, 2, 64)  # its keys and values
k_cache, v_cache = torch.zeros(2, 40, 16, 2, 64)  # 40 pages of 16 tokens
block_table = torch.tensor([[3, 7, -1], [12, -1, -1]], dtype=torch.int32)
cache_seqlens = torch.tensor([20, 5], dtype=torch.int32)  # without the new token

with torch.no_grad():
    o = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, block_table=block_table, causal=True
    )
# --8<-- [end:flash]
assert o.shape == q.shape
assert torch.equal(k_cache[7, 4], k[0, 0])
