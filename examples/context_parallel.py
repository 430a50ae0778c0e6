# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: each rank has some of the keys of every request, and all queries.

A rank computes the attention states (o, lse) over its keys; the states of all ranks are gathered
and merged. What is sent does not grow with the context: in each layer, a rank sends
num_tokens * num_qo_heads * (head_dim * bytes of o + 4) bytes to each of the others.
"""

try:
    import torch
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: pip install torch") from None

import flashplan as fp
from ranks import gather, launch

NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 2, 64
QO_LENS, KV_LENS = [1, 1, 20, 7], [900, 33, 500, 7]  # decodes, a later chunk of a prompt, a prompt


def indptr(lens):
    return [0, *torch.tensor(lens).cumsum(0).tolist()]


def own_keys(rank, num_ranks):
    """(begin, end) of each request's keys on a rank.

    What was there before this step is divided evenly; the keys of new tokens are on the last rank.
    """
    begins_and_ends = []
    for qo_len, kv_len in zip(QO_LENS, KV_LENS, strict=True):
        old = kv_len - qo_len
        begin, end = old * rank // num_ranks, old * (rank + 1) // num_ranks
        begins_and_ends.append((begin, kv_len if rank == num_ranks - 1 else end))
    return begins_and_ends


def attention(q, k, v, kv_lens, causal):
    """(o, lse) of ragged keys."""
    attn = fp.Attention(
        NUM_QO_HEADS,
        NUM_KV_HEADS,
        HEAD_DIM,
        page_size=None,
        q_dtype=q.dtype,
        o_dtype="float32" if q.device.type == "cpu" else None,
        causal=causal,
        device=q.device,
    )
    attn.plan(indptr(QO_LENS), kv_lens)
    return attn.run(q, k, v, return_lse=True)


def worker(rank, num_ranks, device):
    torch.manual_seed(0)  # all ranks make the whole problem, and take their part of it
    dtype = torch.bfloat16
    q = torch.randn(sum(QO_LENS), NUM_QO_HEADS, HEAD_DIM).to(device, dtype)
    k, v = torch.randn(2, sum(KV_LENS), NUM_KV_HEADS, HEAD_DIM).to(device, dtype)
    ranges = own_keys(rank, num_ranks)
    rows = torch.cat([
        torch.arange(first + begin, first + end)
        for first, (begin, end) in zip(indptr(KV_LENS), ranges, strict=False)
    ]).to(device)  # fmt: skip

    # --8<-- [start:merge]
    # Causal masks are aligned to the last key. Keys of earlier ranks are visible to all new tokens;
    # on the last rank, new tokens and their keys end together.
    causal = rank == num_ranks - 1
    state = attention(q, k[rows], v[rows], [end - begin for begin, end in ranges], causal)
    o, lse = fp.merge_states(*map(gather, state))
    # --8<-- [end:merge]

    exact, exact_lse = attention(q, k, v, KV_LENS, causal=True)
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[o.dtype]
    torch.testing.assert_close(o, exact, rtol=rounding, atol=rounding)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-5, atol=1e-5)
    if rank == 0:
        sent = sum(tensor.numel() * tensor.element_size() for tensor in state)
        keys = sum(end - begin for begin, end in ranges) * NUM_KV_HEADS * HEAD_DIM * 2 * 2
        print(
            f"{num_ranks} ranks on {device.type}: the state of one; rank 0 sent {sent} bytes, "
            f"its {keys} bytes of keys and values stayed"
        )


if __name__ == "__main__":
    launch(worker)
