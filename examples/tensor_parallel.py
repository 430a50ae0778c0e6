# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: each rank has some of the kv heads, and the query heads that use them.

Attention itself sends nothing. Here the outputs are gathered only to be compared; a model
multiplies them by its rank's rows of the output projection instead, and adds up the products of all
ranks.
"""

try:
    import torch
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: pip install torch") from None

import flashplan as fp
from ranks import gather, launch

NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 8, 4, 64, 16
QO_LENS, KV_LENS = [1, 1, 30], [700, 33, 50]  # two decodes and a prompt


def attention(q, k_cache, v_cache, block_table):
    """Attention of as many heads as the tensors have."""
    attn = fp.Attention(
        q.shape[1],
        k_cache.shape[2],
        HEAD_DIM,
        page_size=PAGE_SIZE,
        q_dtype=q.dtype,
        device=q.device,
        batch_invariant=True,  # heads do not change one another's bits either
    )
    attn.plan([0, *torch.tensor(QO_LENS).cumsum(0).tolist()], KV_LENS)
    return attn.run(q, k_cache, v_cache, block_table=block_table)


def worker(rank, num_ranks, device):
    torch.manual_seed(0)  # all ranks make the whole problem, and take their part of it
    dtype = torch.bfloat16
    q = torch.randn(sum(QO_LENS), NUM_QO_HEADS, HEAD_DIM).to(device, dtype)
    caches = torch.randn(2, 64, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM).to(device, dtype)
    pages = -(-max(KV_LENS) // PAGE_SIZE)
    block_table = torch.randint(64, (len(KV_LENS), pages), dtype=torch.int32).to(device)

    # --8<-- [start:divide]
    k_cache, v_cache = caches.chunk(num_ranks, dim=3)[rank]
    own_q = q.chunk(num_ranks, dim=1)[rank]
    own_o = attention(own_q, k_cache, v_cache, block_table)
    # --8<-- [end:divide]

    o = torch.cat(tuple(gather(own_o)), dim=1)
    assert torch.equal(o, attention(q, *caches, block_table))
    if rank == 0:
        sent = own_o.numel() * own_o.element_size()
        print(f"{num_ranks} ranks on {device.type}: the bits of one; each sent its o, {sent} bytes")


if __name__ == "__main__":
    launch(worker)
