# SPDX-License-Identifier: Apache-2.0
"""A chunk of a prompt with multi-head latent attention, as vLLM and SGLang compute it.

The new tokens attend to each other in the expanded form, with keys of 192 dims and values of 128
for each head. The cached prefix is read in chunks that fit into a workspace: latents are gathered,
expanded by the up-projection, attended to without a mask, and merged by lse. The absorbed form,
which reads latents as they are, gives the same; it takes more products for each key, so it is for
decodes.
"""

try:
    import torch
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: pip install torch") from None

import flashplan as fp

NUM_HEADS, LATENT, NOPE, ROTATED, VALUE = 4, 512, 128, 64, 128
SCALE = (NOPE + ROTATED) ** -0.5
PAGE_SIZE, CHUNK = 64, 48  # tokens of each request in a round
PREFIX_LENS, NEW_LENS = [100, 0, 300], [30, 17, 5]


def indptr(lens):
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32)


def expand(latents, w_k, w_v):
    """(keys without their rotated dims, values) of all heads."""
    return torch.einsum("tc,hdc->thd", latents, w_k), torch.einsum("tc,hdc->thd", latents, w_v)


def expanded_attention(causal):
    return fp.Attention(
        NUM_HEADS,
        NUM_HEADS,
        (NOPE + ROTATED, VALUE),
        page_size=None,
        softmax_scale=SCALE,
        q_dtype="float32",
        causal=causal,
        device="cpu",
    )


# --8<-- [start:chunks]
def chunked_prefill(q, kv_c, k_pe, cache, tables, weights):
    """o of the new tokens, whose latents are kv_c and k_pe, after the prefixes in the cache."""
    own = expanded_attention(causal=True)
    own.plan(indptr(NEW_LENS), NEW_LENS)
    k, v = expand(kv_c, *weights)
    state = own.run(q, k, v, k_tail=k_pe, return_lse=True)
    prefix = expanded_attention(causal=False)
    for start in range(0, max(PREFIX_LENS), CHUNK):
        lens = [min(max(n - start, 0), CHUNK) for n in PREFIX_LENS]  # 0: no key in this round
        starts = torch.full((len(lens),), start, dtype=torch.int32)
        rows = fp.gather_mla(cache, tables, indptr(lens), starts=starts)
        latents, rotated = rows.split([LATENT, ROTATED], dim=1)
        k, v = expand(latents, *weights)
        prefix.plan(indptr(NEW_LENS), lens)
        chunk = prefix.run(q, k, v, k_tail=rotated, return_lse=True)
        state = fp.merge_states(*state, *chunk)
    return state[0]


# --8<-- [end:chunks]


# --8<-- [start:absorbed]
def absorbed(q, cache, tables, weights):
    """The same in the latent space: w_k moves to the queries, w_v to the outputs."""
    w_k, w_v = weights
    attn = fp.Attention(
        NUM_HEADS,
        1,
        (LATENT + ROTATED, LATENT),
        shared_kv=True,
        softmax_scale=SCALE,
        page_size=PAGE_SIZE,
        q_dtype="float32",
        device="cpu",
    )
    attn.plan(indptr(NEW_LENS), [a + b for a, b in zip(PREFIX_LENS, NEW_LENS, strict=True)])
    q_latent = torch.einsum("thd,hdc->thc", q[..., :NOPE], w_k)
    q_rotated = q[..., NOPE:].contiguous()
    o = attn.run((q_latent, q_rotated), cache, block_table=tables)
    return torch.einsum("thc,hdc->thd", o, w_v)


# --8<-- [end:absorbed]


def main():
    torch.manual_seed(0)
    weights = [torch.randn(NUM_HEADS, dim, LATENT) / LATENT**0.5 for dim in (NOPE, VALUE)]
    w_norm = 1 + torch.randn(LATENT) / 8
    lens = [a + b for a, b in zip(PREFIX_LENS, NEW_LENS, strict=True)]
    pages_of = [-(-n // PAGE_SIZE) for n in lens]
    cache = torch.zeros(sum(pages_of), PAGE_SIZE, LATENT + ROTATED)
    tables = torch.zeros(len(lens), max(pages_of), dtype=torch.int32)
    queries, new_latents, new_rotated = [], [], []
    first = 0
    for r, (count, prefix, n) in enumerate(zip(pages_of, PREFIX_LENS, lens, strict=True)):
        pages = torch.arange(first, first + count, dtype=torch.int32)
        tables[r, :count] = pages
        first += count
        x, k_pe = torch.randn(n, LATENT), torch.randn(n, ROTATED)
        q = torch.randn(n, NUM_HEADS, NOPE + ROTATED)
        # --8<-- [start:append]
        positions = torch.arange(n)
        slots = pages[positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
        fp.append_mla(
            x,
            k_pe,
            cache,
            slot_mapping=slots,
            norm_weight=w_norm,
            rope=fp.Rope(interleaved=True),
            positions=positions,
            q_pe=q[..., NOPE:],  # rotated in place
        )
        # --8<-- [end:append]
        keys = cache.view(-1, LATENT + ROTATED)[slots[prefix:]]
        queries.append(q[prefix:])
        new_latents.append(keys[:, :LATENT])
        new_rotated.append(keys[:, LATENT:])
    q, kv_c, k_pe = map(torch.cat, (queries, new_latents, new_rotated))
    o = chunked_prefill(q, kv_c, k_pe, cache, tables, weights)
    torch.testing.assert_close(o, absorbed(q, cache, tables, weights), rtol=1e-4, atol=1e-4)
    print(f"{len(q)} new tokens after {sum(PREFIX_LENS)} cached ones: both forms agree")


if __name__ == "__main__":
    with torch.no_grad():
        main()
