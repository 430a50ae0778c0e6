# SPDX-License-Identifier: Apache-2.0
"""Attention inside a compiled module of PyTorch."""

# --8<-- [start:compile]
import torch

import flashplan as fp
import flashplan.torch


class Layer(torch.nn.Module):
    def __init__(self, attn):
        super().__init__()
        self.attn = attn
        self.norm = torch.nn.Parameter(torch.ones(256))
        self.qkv = torch.nn.Linear(256, (4 + 2 * 2) * 64)
        self.rope = fp.Rope()

    def forward(self, x, k_cache, v_cache, indptr, kv_lens, block_table):
        x = flashplan.torch.rmsnorm(x, self.norm)
        q, k, v = self.qkv(x).view(-1, 8, 64).split([4, 2, 2], dim=1)
        q = flashplan.torch.rope_append_paged_kv(
            q, k, v, k_cache, v_cache, indptr, kv_lens, self.rope, block_table=block_table
        )
        o = flashplan.torch.run(self.attn, q, k_cache, v_cache, block_table=block_table)
        return o.flatten(1)


attn = fp.Attention(4, 2, 64, q_dtype="float32", device="cpu")
layer = Layer(attn)
# "aot_eager" compiles no kernels, so that this example starts quickly. Omit `backend` in your code.
compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")


def step(module, new_tokens, lens):
    indptr = torch.tensor([0, *new_tokens]).cumsum(0).int()
    kv_lens = torch.tensor(lens, dtype=torch.int32)
    attn.plan(indptr, kv_lens)  # outside of what is compiled
    x = torch.ones(int(indptr[-1]), 256)
    cache = torch.zeros(2, 16, 16, 2, 64)
    block_table = torch.arange(8, dtype=torch.int32).view(2, 4)
    with torch.no_grad():
        return module(x, *cache, indptr, kv_lens, block_table)


step(compiled, [1, 7], [30, 7])
# --8<-- [end:compile]
o = step(compiled, [2, 3], [31, 10])
assert torch.allclose(o, step(layer, [2, 3], [31, 10]))
