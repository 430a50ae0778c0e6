# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention over lists of keys, on DeepSeek V3.2's cache."""

import torch

import flashplan as fp

torch.manual_seed(0)
heads, scale = 16, 192**-0.5
cache = torch.zeros(4, 64, 656, dtype=torch.uint8)
kv_c, k_pe = torch.randn(200, 512).bfloat16(), torch.randn(200, 64).bfloat16()
fp.append_mla(kv_c, k_pe, cache, slot_mapping=torch.arange(200))
q = torch.randn(3, heads, 576).bfloat16()
indices = torch.full((3, 2048), -1, dtype=torch.int32)
indices[:, :198] = torch.randperm(198)

# --8<-- [start:sparse]
attn = fp.Attention(
    heads,
    1,
    (576, 512),
    shared_kv=True,
    topk=2048,
    kv_dtype="fp8_ds_mla",
    softmax_scale=scale,
    page_size=64,
    device="cpu",
)
attn.plan([0, 3], [200])
o = attn.run(q, cache, topk_indices=indices)
# --8<-- [end:sparse]

keys = torch.cat([kv_c, k_pe], dim=1)[:198].float()
weights = torch.softmax(q.float() @ keys.T * scale, dim=-1)
assert (o.float() - weights @ keys[:, :512]).abs().max() < 0.25  # of 8-bit floats
