# SPDX-License-Identifier: Apache-2.0
"""The small operators on the GPU: rows of (make: device -> (call, check), bytes moved)."""

import torch

import flashplan as fp
from gpu_sampling import OTHER_VOCABS, SERVED_SAMPLING, VOCAB

PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM = 16, 8, 128


def _append(batch_size, new_len, kv_len, cache_dtype=torch.bfloat16):
    def make(device):
        total = batch_size * new_len
        pages_of = -(-kv_len // PAGE_SIZE)
        rows = (total, NUM_KV_HEADS, HEAD_DIM)
        k, v = (torch.randn(rows, device=device, dtype=torch.bfloat16) for _ in range(2))
        pages = (batch_size * pages_of, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
        caches = [torch.zeros(pages, device=device).to(cache_dtype) for _ in range(2)]
        table = torch.randperm(pages[0], device=device).int().view(batch_size, pages_of)
        indptr = torch.arange(0, total + 1, new_len, device=device, dtype=torch.int32)
        kv_lens = torch.full((batch_size,), kv_len, device=device, dtype=torch.int32)

        def call():
            fp.append_paged_kv(k, v, *caches, indptr, kv_lens, block_table=table)

        def check():
            key = torch.arange(kv_len - new_len, kv_len, device=device)
            page, slot = table[:, key // PAGE_SIZE].long(), key % PAGE_SIZE
            for new, cache in ((k, caches[0]), (v, caches[1])):
                stored = cache.view(torch.uint8)[page, slot].flatten(0, 1)
                assert torch.equal(stored, new.to(cache_dtype).view(torch.uint8)), "wrong rows"

        return call, check

    item_sizes = 2 + (2 if cache_dtype == torch.bfloat16 else 1)
    return make, 2 * batch_size * new_len * NUM_KV_HEADS * HEAD_DIM * item_sizes


def _rope_append(batch_size, new_len, kv_len, num_qo_heads=32):
    def make(device):
        total = batch_size * new_len
        pages_of = -(-kv_len // PAGE_SIZE)
        q = torch.randn(total, num_qo_heads, HEAD_DIM, device=device).bfloat16()
        k, v = (
            torch.randn(total, NUM_KV_HEADS, HEAD_DIM, device=device).bfloat16() for _ in range(2)
        )
        pages = (batch_size * pages_of, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
        caches = [torch.zeros(pages, device=device).bfloat16() for _ in range(2)]
        table = torch.randperm(pages[0], device=device).int().view(batch_size, pages_of)
        indptr = torch.arange(0, total + 1, new_len, device=device, dtype=torch.int32)
        kv_lens = torch.full((batch_size,), kv_len, device=device, dtype=torch.int32)
        out, rope = torch.empty_like(q), fp.Rope()

        def call():
            lengths = (indptr, kv_lens)
            fp.rope_append_paged_kv(q, k, v, *caches, *lengths, rope, block_table=table, out_q=out)

        def check():
            key = torch.arange(kv_len - new_len, kv_len, device=device)
            positions = key.int().repeat(batch_size)
            rotated_q, rotated_k = fp.apply_rope(q, k, positions, rope)
            page, slot = table[:, key // PAGE_SIZE].long(), key % PAGE_SIZE
            assert torch.equal(out, rotated_q), "wrong queries"
            for new, cache in ((rotated_k, caches[0]), (v, caches[1])):
                assert torch.equal(cache[page, slot].flatten(0, 1), new), "wrong rows"

        return call, check

    return make, 4 * batch_size * new_len * (num_qo_heads + 2 * NUM_KV_HEADS) * HEAD_DIM


def _append_slots(num_tokens):
    def make(device):
        k, v = (
            torch.randn(num_tokens, NUM_KV_HEADS, HEAD_DIM, device=device).bfloat16()
            for _ in range(2)
        )
        pages = (2 * num_tokens // PAGE_SIZE, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
        caches = [torch.zeros(pages, device=device).bfloat16() for _ in range(2)]
        slots = torch.randperm(2 * num_tokens, device=device)[:num_tokens]

        def call():
            fp.append_paged_kv(k, v, *caches, slot_mapping=slots)

        def check():
            for new, cache in ((k, caches[0]), (v, caches[1])):
                assert torch.equal(cache.flatten(0, 1)[slots], new), "wrong rows"

        return call, check

    return make, 8 * num_tokens * NUM_KV_HEADS * HEAD_DIM


def _merge(num_states, num_tokens, num_heads, dtype):
    def make(device):
        shape = (num_states, num_tokens, num_heads)
        o = torch.randn((*shape, HEAD_DIM), device=device).to(dtype)
        lse = torch.randn(shape, device=device)
        out, out_lse = torch.empty_like(o[0]), torch.empty_like(lse[0])

        def call():
            fp.merge_states(o, lse, out=out, lse=out_lse)

        def check():
            weights = lse.softmax(0)
            exact = sum(w[..., None] * x.float() for w, x in zip(weights, o, strict=True))
            assert (out.float() - exact).abs().max() < 0.05, "wrong states"
            assert (out_lse - lse.logsumexp(0)).abs().max() < 1e-4, "wrong lse"

        return call, check

    return make, (num_states + 1) * num_tokens * num_heads * (HEAD_DIM * dtype.itemsize + 4)


def _rmsnorm(num_tokens, size):
    def make(device):
        x, w = torch.randn(num_tokens, size, device=device).bfloat16(), torch.ones(size).bfloat16()
        w, out = w.to(device), torch.empty_like(x)

        def call():
            fp.rmsnorm(x, w, out=out)

        def check():
            exact = torch.nn.functional.rms_norm(x.float(), (size,), eps=1e-6)
            assert (out.float() - exact).abs().max() < 0.02, "wrong rows"

        return call, check

    return make, 4 * num_tokens * size


def _add_rmsnorm(num_tokens, size):
    def make(device):
        x, residual = (torch.randn(num_tokens, size, device=device).bfloat16() for _ in range(2))
        weight = torch.ones(size, device=device).bfloat16()

        def call():
            fp.add_rmsnorm(x, residual, weight)

        def check():
            exact = torch.nn.functional.rms_norm(residual.float(), (size,), eps=1e-6)
            assert (x.float() - exact).abs().max() < 0.02, "wrong rows"

        return call, check

    return make, 8 * num_tokens * size


def _silu_and_mul(num_tokens, size):
    def make(device):
        x = torch.randn(num_tokens, 2 * size, device=device).bfloat16()
        out = torch.empty(num_tokens, size, device=device).bfloat16()

        def call():
            fp.silu_and_mul(x, out)

        def check():
            gate, up = x.float().chunk(2, -1)
            exact = torch.nn.functional.silu(gate) * up
            assert ((out.float() - exact).abs() <= 0.004 * exact.abs() + 1e-5).all(), "wrong rows"

        return call, check

    return make, 6 * num_tokens * size


def _rope(num_tokens, num_qo_heads):
    def make(device):
        shape = (num_tokens, num_qo_heads + NUM_KV_HEADS, HEAD_DIM)
        qk = torch.randn(shape, device=device).bfloat16()
        q, k = qk[:, :num_qo_heads], qk[:, num_qo_heads:]
        out_q, out_k = torch.empty_like(q), torch.empty_like(k)
        positions = torch.arange(num_tokens, device=device, dtype=torch.int32)
        rope = fp.Rope()

        def call():
            fp.apply_rope(q, k, positions, rope, out_q=out_q, out_k=out_k)

        def check():
            pair = torch.arange(HEAD_DIM // 2, device=device, dtype=torch.float64)
            angle = positions[:, None] * 10000.0 ** (-2 * pair / HEAD_DIM)
            turn = torch.polar(torch.ones_like(angle), angle)[:, None]
            first, second = q.double().chunk(2, -1)
            exact = torch.complex(first, second) * turn
            exact = torch.cat([exact.real, exact.imag], -1)
            assert (out_q.double() - exact).abs().max() < 0.04, "wrong rotation"

        return call, check

    return make, 4 * num_tokens * (num_qo_heads + NUM_KV_HEADS) * HEAD_DIM


def _sample(batch_size, probs=False, **options):
    def make(device):
        logits = 2 * torch.randn(batch_size, VOCAB, device=device)
        x = logits.softmax(-1) if probs else logits
        out = torch.empty(batch_size, dtype=torch.int32, device=device)

        def call():
            fp.sample(x, from_probs=probs, out=out, **options)

        def check():
            wanted = fp.sample(x.cpu().numpy(), from_probs=probs, **options)
            assert out.tolist() == wanted.tolist(), "not the tokens of the CPU"

        return call, check

    return make, 4 * batch_size * VOCAB


def _verify(batch_size, num_drafts=4, vocab=VOCAB, nearness=0.0):
    """`nearness`: 0 if drafts' probabilities have nothing to do with the target's, 1 if equal."""

    def make(device):
        shape = (batch_size, num_drafts + 1, vocab)
        logits, noise = (4 * torch.randn(shape, device=device) for _ in range(2))
        targets = logits.softmax(-1)
        drafts = (nearness * logits + (1 - nearness) * noise)[:, :num_drafts].softmax(-1)
        tokens = drafts.view(-1, vocab).multinomial(1).view(batch_size, num_drafts)
        out = torch.empty(batch_size, num_drafts + 1, dtype=torch.int32, device=device)
        count = torch.empty(batch_size, dtype=torch.int32, device=device)

        def call():
            fp.speculative_verify(tokens, drafts, targets, out=out, num_accepted=count)

        def check():
            arrays = [x.cpu().numpy() for x in (tokens, drafts, targets)]
            assert out.tolist() == fp.speculative_verify(*arrays)[0].tolist(), "not the CPU's"

        return call, check

    return make, 8 * batch_size * vocab  # at most one row of each model


def _penalties(batch_size, max_len):
    def make(device):
        logits = torch.randn(batch_size, VOCAB, device=device)
        history = torch.randint(VOCAB, (batch_size, max_len), device=device)
        lens = torch.full((batch_size,), max_len, device=device, dtype=torch.int32)

        def call():
            fp.apply_penalties(logits, history, lens, 1.0, 0.5, 0.5)

        def check():
            before = logits.clone()
            counts = torch.zeros_like(logits).scatter_add_(1, history, torch.ones_like(logits))
            call()
            wanted = before - 0.5 * counts - 0.5 * (counts > 0)
            assert (logits - wanted).abs().max() < 1e-2, "wrong logits"

        return call, check

    return make, batch_size * max_len * (8 + 2 * 32)  # a sector of logits for each token


def _softmax(batch_size, vocab=VOCAB):
    def make(device):
        logits = 2 * torch.randn(batch_size, vocab, device=device)
        out = torch.empty_like(logits)

        def call():
            fp.softmax(logits, 0.8, out)

        def check():
            assert (out - (logits / 0.8).softmax(-1)).abs().max() < 1e-6, "wrong probabilities"

        return call, check

    return make, 8 * batch_size * vocab


SAMPLERS = {
    "sample probs": {"probs": True},
    "sample": {},
    "sample top-p": {"top_p": 0.9},
    "sample top-k": {"top_k": 50},
    "sample top-k top-p": {"top_k": 50, "top_p": 0.9},
    "sample min-p": {"min_p": 0.1},
    "sample all": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
}

OPS = {
    "append 256 x 1": _append(256, 1, 1024),
    "append 8 x 1024": _append(8, 1024, 1024),
    "append 8 x 1024 e4m3": _append(8, 1024, 1024, torch.float8_e4m3fn),
    "append 8192 slots": _append_slots(8192),
    "rope + append 256 x 1": _rope_append(256, 1, 1024),
    "rope + append 8 x 1024": _rope_append(8, 1024, 1024),
    "merge 2 x 8192 x 32 bf16": _merge(2, 8192, 32, torch.bfloat16),
    "merge 8 x 2048 x 32 f32": _merge(8, 2048, 32, torch.float32),
    "rmsnorm 8192 x 4096": _rmsnorm(8192, 4096),
    "rmsnorm 64 x 4096": _rmsnorm(64, 4096),
    "rmsnorm 262144 x 128": _rmsnorm(262144, 128),
    "add_rmsnorm 8192 x 4096": _add_rmsnorm(8192, 4096),
    "rope 8192 x 32+8": _rope(8192, 32),
    "silu_and_mul 8192 x 14336": _silu_and_mul(8192, 14336),
    **{
        f"{name} b{batch_size}": _sample(batch_size, **options)
        for name, options in SAMPLERS.items()
        for batch_size in (1, 32, 256)
    },
    **SERVED_SAMPLING,
    **{f"verify 4 drafts b{batch_size}": _verify(batch_size) for batch_size in (1, 32, 128)},
    "verify 4 near drafts b32": _verify(32, nearness=0.95),
    **{f"verify 4 drafts of {vocab} b32": _verify(32, vocab=vocab) for vocab in OTHER_VOCABS},
    **{f"penalties of 2048 b{batch_size}": _penalties(batch_size, 2048) for batch_size in (1, 256)},
    **{f"softmax b{batch_size}": _softmax(batch_size) for batch_size in (1, 32, 256)},
    **{f"softmax of {vocab} b256": _softmax(256, vocab) for vocab in OTHER_VOCABS},
}
