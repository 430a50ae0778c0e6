# SPDX-License-Identifier: Apache-2.0
"""Nonsense: mypy and pyright refuse each line that says so. Not to be run."""

import numpy as np

import flashplan as fp

attn = fp.Attention(4, 2, 8, page_size=None)
x = np.ones((1, 4, 8), np.float32)

fp.Attention("4", 2, 8)
fp.Attention(4, 2)
fp.Attention(4, 2, 8.0)
fp.Attention(4, 2, 8, page_size="16")
fp.Attention(4, 2, 8, q_dtype="float8_e4m3fn")
fp.Attention(4, 2, 8, kv_dtype="int8")
fp.Attention(4, 2, 8, kv_layout="HDN")
fp.Attention(4, 2, 8, causal=None)
fp.Attention(4, 2, 8, sliding_window=7)
fp.Attention(4, 2, 8, workspace=1 << 20)
fp.Attention(4, 2, 8, device=0)
fp.is_supported(4, 2, 8, typo=1)
fp.workspace_bytes(4, 2, 8, softcap="no")
attn.plan(3, [1])
attn.plan([0.5], [1])
attn.plan(["0"], [1])
attn.run(x, x, [1.0])
attn.run("q", x, x)
attn.run(x, x, x, return_lse="yes")
attn.run(x, x, x, stream="s")
attn.run(x, x, x, k_scale="1")
attn.run(x, x, x, slopes="1")
fp.Variant("v", logits=1)
fp.Variant("v", logits="return x;", tensors={"t": "float16"})
fp.Variant("v", logits="return x;", scalars={"s": "1"})
fp.Attention(4, 2, 8, variant="alibi")
attn.run(x, x, x).nonsense()
attn.run(x, x, x, return_lse=True).sum()
print(attn.block_table)
fp.merge_states(x, x, 1, 2)
fp.append_paged_kv(x, x, x, x, [0], x)
fp.append_paged_kv(x, x, x, x, x, x, kv_layout="hnd")
fp.append_paged_kv(x, x, x, x, slot_mapping=[0])
