# SPDX-License-Identifier: Apache-2.0
"""Decode steps on a GPU with PyTorch: a CUDA graph that is captured once and serves every batch."""

try:
    import torch
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: pip install torch") from None

import flashplan as fp

device = torch.device("cuda:0")
k_cache, v_cache = torch.randn((2, 64, 16, 8, 128), dtype=torch.bfloat16, device=device)
block_table = torch.arange(64, dtype=torch.int32, device=device).view(4, 16)
q = torch.randn((4, 32, 128), dtype=torch.bfloat16, device=device)
out = torch.empty_like(q)

# --8<-- [start:graph]
attn = fp.Attention(32, 8, 128, page_size=16, max_batch_size=4, max_qo_tokens=4, device=device)
attn.plan([0, 1, 2, 3, 4], [37, 200, 5, 1])
attn.run(q, k_cache, v_cache, block_table=block_table, out=out)  # on torch's current stream

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    for _layer in range(2):
        attn.run(q, k_cache, v_cache, block_table=block_table, out=out)

for step in range(3):
    attn.plan([0, 1, 2], [38 + step, 201 + step])  # another batch, the same graph
    graph.replay()
# --8<-- [end:graph]

print(out[:2].isfinite().all().item())
