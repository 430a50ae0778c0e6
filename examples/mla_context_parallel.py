# SPDX-License-Identifier: Apache-2.0
"""Context parallelism of multi-head latent attention: each rank has every second latent.

Tensor parallelism divides the heads, but each rank would keep all latents, since all heads share
them. Here the tokens of each request are dealt to the ranks instead. A rank computes the attention
states (o, lse) of all heads over its tokens, and the states of all ranks are gathered and merged. A
short request has no token on some ranks: there lse is -inf, and the state counts for nothing.
"""

try:
    import torch
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: pip install torch") from None

import flashplan as fp
from ranks import gather, launch

NUM_HEADS, LATENT, ROTATED, PAGE_SIZE = 16, 512, 64, 64
KV_LENS = [900, 33, 1, 130]  # of decodes


def attention(q, cache, tables, kv_lens):
    """(o, lse) of one token of each request over its keys in `cache`."""
    attn = fp.Attention(
        NUM_HEADS,
        1,
        (LATENT + ROTATED, LATENT),
        shared_kv=True,
        softmax_scale=192**-0.5,  # of the heads before compression: 128 + 64 dims
        page_size=PAGE_SIZE,
        o_dtype="float32",  # partial results are not rounded
        device="cpu",
    )
    attn.plan(range(len(kv_lens) + 1), kv_lens)
    return attn.run(q, cache, block_table=tables, return_lse=True)


def cache_of(latents):
    """(cache, block table) of requests whose keys are `latents`, in pages one after the other."""
    pages_of = [-(-len(tokens) // PAGE_SIZE) for tokens in latents]
    cache = torch.zeros(sum(pages_of), PAGE_SIZE, LATENT + ROTATED, dtype=torch.bfloat16)
    table = torch.zeros(len(latents), max(pages_of), dtype=torch.int32)
    first = 0
    for r, (tokens, count) in enumerate(zip(latents, pages_of, strict=True)):
        table[r, :count] = torch.arange(first, first + count)
        slots = first * PAGE_SIZE + torch.arange(len(tokens))
        fp.append_mla(tokens[:, :LATENT], tokens[:, LATENT:], cache, slot_mapping=slots)
        first += count
    return cache, table


def worker(rank, num_ranks, _device):
    torch.manual_seed(0)  # all ranks make the whole problem, and take their part of it
    q = torch.randn(len(KV_LENS), NUM_HEADS, LATENT + ROTATED, dtype=torch.bfloat16)
    latents = [torch.randn(n, LATENT + ROTATED, dtype=torch.bfloat16) for n in KV_LENS]

    # --8<-- [start:merge]
    own = [tokens[rank::num_ranks] for tokens in latents]  # the last token sees all of them
    state = attention(q, *cache_of(own), [len(tokens) for tokens in own])
    o, lse = fp.merge_states(*map(gather, state))
    # --8<-- [end:merge]

    exact, exact_lse = attention(q, *cache_of(latents), KV_LENS)
    torch.testing.assert_close(o, exact, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-5, atol=1e-5)
    empty = int(state[1].isneginf().all(dim=1).sum())
    print(f"rank {rank} of {num_ranks}: the state of one; {empty} requests have no key here")


if __name__ == "__main__":
    launch(worker)
