# SPDX-License-Identifier: Apache-2.0
"""A cache of 8-bit floats: written with scales, read with the same ones."""

import numpy as np
import torch

import flashplan as fp

torch.manual_seed(0)
block_table = torch.arange(4, dtype=torch.int32)[None]
indptr, kv_lens = torch.tensor([0, 50], dtype=torch.int32), torch.tensor([50], dtype=torch.int32)
q, k, v = (torch.randn(50, heads, 64, dtype=torch.bfloat16) for heads in (8, 2, 2))

# --8<-- [start:fp8]
k_cache, v_cache = torch.zeros(2, 4, 16, 2, 64, dtype=torch.float8_e4m3fn)
scales = {"k_scale": 0.02, "v_scale": 0.02}  # real value = scale * stored value

fp.append_paged_kv(k, v, k_cache, v_cache, indptr, kv_lens, block_table=block_table, **scales)

attn = fp.Attention(8, 2, 64, q_dtype="bfloat16", kv_dtype="float8_e4m3fn", device="cpu")
attn.plan(indptr, kv_lens)
o = attn.run(q, k_cache, v_cache, block_table=block_table, **scales)
# --8<-- [end:fp8]

plain = fp.Attention(8, 2, 64, page_size=None, device="cpu")
plain.plan(indptr, kv_lens)
exact = plain.run(q, k, v)
assert np.abs((o - exact).float().numpy()).max() < 0.2
