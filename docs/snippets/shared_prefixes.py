# SPDX-License-Identifier: Apache-2.0
"""Requests that begin with the same pages: found in the page table, read once."""

import numpy as np

import flashplan as fp

rng = np.random.default_rng(0)
k_cache, v_cache = rng.standard_normal((2, 256, 16, 2, 64), np.float32)
q = rng.standard_normal((16, 8, 64), np.float32)

# --8<-- [start:prefixes]
# 16 decodes. A system prompt of 100 pages begins all of them, two pages each are their own.
system = np.arange(100)
block_table = np.stack([[*system, 100 + 2 * r, 101 + 2 * r] for r in range(16)]).astype(np.int32)
qo_indptr, kv_lens = list(range(17)), [100 * 16 + 20] * 16

groups = fp.find_shared_prefixes(qo_indptr, kv_lens, 16, block_table=block_table)
print(groups)  # [[0, 16, 1600]]: requests 0 to 15 begin with the same 1600 tokens

attn = fp.Attention(8, 2, 64, q_dtype="float32", device="cpu")
plan = attn.plan(qo_indptr, kv_lens, shared_prefixes=groups)
o = attn.run(q, k_cache, v_cache, block_table=block_table)
print(plan.describe())  # what was made of the groups
# --8<-- [end:prefixes]

attn.plan(qo_indptr, kv_lens)
assert np.allclose(o, attn.run(q, k_cache, v_cache, block_table=block_table), atol=1e-5)
assert groups.tolist() == [[0, 16, 1600]]
