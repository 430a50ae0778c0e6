# SPDX-License-Identifier: Apache-2.0
"""flashplan.flash_attn on the GPU: results, CUDA graphs, calls that do not wait, PyTorch's SDPA."""

import contextlib

import numpy as np
import pytest

import flash_cases
import flashplan as fp
from flash_cases import Batch, Call

pytestmark = pytest.mark.gpu

CALLS = [
    Call(dtype="bfloat16"),
    Call(dtype="float16", causal=False, heads=(8, 1), dims=(128, 128)),
    Call(dtype="bfloat16", window_size=(9, 0), softcap=2.0, sinks=True),
    Call(dtype="bfloat16", page_size=5, dims=(192, 128)),
    Call(dtype="bfloat16", window_size=(9, 4), causal=False, alibi="sequences"),
    Call(dtype="float16", kv_dtype="float8_e4m3fn", scaled=True, page_size=256),
]
EVERY = pytest.mark.parametrize("call", CALLS, ids=str)


@pytest.fixture
def flash(torch):
    import flashplan.flash_attn

    with torch.inference_mode():
        yield flashplan.flash_attn


@contextlib.contextmanager
def no_wait(torch):
    """PyTorch raises an error where it would wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@EVERY
def test_func(cuda, rng, call, flash):
    flash_cases.check_func(cuda, rng, call, flash)


@EVERY
def test_varlen(cuda, rng, call, flash):
    flash_cases.check_varlen(cuda, rng, call, flash)
    flash_cases.check_varlen(cuda, rng, call, flash, [300, 20], [700, 20])


@EVERY
def test_varlen_paged(cuda, rng, call, flash):
    flash_cases.check_varlen_paged(cuda, rng, call, flash)
    flash_cases.check_varlen_paged(cuda, rng, call, flash, [1, 1, 1], [20, 0, 33], used=True)


@EVERY
def test_kvcache(cuda, rng, call, flash):
    for qo_len in (1, 4):
        flash_cases.check_kvcache(cuda, rng, call, flash, qo_len)
        flash_cases.check_kvcache(cuda, rng, call, flash, qo_len, (1000, 0, 3, 17))


@EVERY
def test_kvcache_append(cuda, rng, call, flash):
    for choice in (False, True):
        flash_cases.check_kvcache_places(cuda, rng, call, flash, append=choice)
        flash_cases.check_kvcache_append(cuda, rng, call, flash, ragged=choice)


@pytest.mark.parametrize("append", [False, True])
def test_graph_of_decodes(cuda, torch, rng, flash, append):
    """Captured after one call; lengths, page ids and keys change between replays."""
    call, qo_len = Call(dtype="bfloat16", heads=(8, 2), dims=(128, 128), page_size=64), 1
    rows, columns, num_pages = 6, 40, 250
    caches = [
        torch.zeros(num_pages, 64, 2, 128, dtype=torch.bfloat16, device=cuda.device) for _ in "kv"
    ]
    q = torch.zeros(rows, qo_len, 8, 128, dtype=torch.bfloat16, device=cuda.device)
    new = [torch.zeros(rows, 1, 2, 128, dtype=torch.bfloat16, device=cuda.device) for _ in "kv"]
    lens = torch.zeros(rows, dtype=torch.int32, device=cuda.device)
    table = torch.full((rows, columns), -1, dtype=torch.int32, device=cuda.device)

    def run():
        return flash.flash_attn_with_kvcache(
            q,
            *caches,
            *(new if append else ()),
            cache_seqlens=lens,
            block_table=table,
            causal=True,
            return_softmax_lse=True,
        )

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = run()
    for kv_lens in ([1, 2, 3, 64, 65, 2000], [2560, 1, 1, 1, 1, 1], [5] * 6):
        if not append:
            kv_lens = [*kv_lens[:-2], 0, kv_lens[-1]]
        batch = Batch(rng, call, [qo_len] * rows, kv_lens)
        pages = batch.paged(extra_columns=0)
        for kept, written in zip(caches, pages[:2]):
            kept[: len(written)] = cuda.tensor(written)
        table.fill_(-1)
        table[:, : pages[2].shape[1]] = cuda.tensor(pages[2])
        q.copy_(cuda.tensor(np.stack(batch.q)))
        lens.copy_(flash_cases.int32(cuda, [n - append for n in kv_lens]))
        if append:
            for kept, tokens in zip(new, (batch.k, batch.v)):
                kept.copy_(cuda.tensor(np.stack([x[-1:] for x in tokens])))
            for row, kv_len in enumerate(kv_lens):
                for cache in caches:
                    cache[table[row, (kv_len - 1) // 64], (kv_len - 1) % 64] = float("nan")
        graph.replay()
        flash.flash_attn_with_kvcache(q[:3], *caches, cache_seqlens=lens[:3], block_table=table[:3])
        batch.check(cuda.array(o.flatten(0, 1)), flash_cases.rows_of(cuda, lse))


def test_calls_that_do_not_wait(cuda, torch, rng, flash):
    q = torch.randn(4, 1, 8, 128, dtype=torch.bfloat16, device=cuda.device)
    cache = torch.randn(40, 64, 2, 128, dtype=torch.bfloat16, device=cuda.device)
    table = torch.randint(40, (4, 9), dtype=torch.int32, device=cuda.device)
    lens = torch.randint(1, 500, (4,), dtype=torch.int32, device=cuda.device)
    ends = torch.arange(5, dtype=torch.int32, device=cuda.device)
    ends_k = torch.cat([lens.new_zeros(1), lens.cumsum(0, dtype=torch.int32)])

    def calls(columns):
        flash.flash_attn_with_kvcache(
            q,
            cache,
            cache,
            cache_seqlens=lens.clamp(max=64 * columns),
            block_table=table[:, :columns],
        )
        flash.flash_attn_varlen_func(
            q[:, 0], cache, cache, ends, None, 1, 500, block_table=table, seqused_k=lens
        )

    calls(9)
    with no_wait(torch):
        for columns in (9, 4, 5):
            calls(columns)
    rows = (q[:, 0], cache.flatten(0, 1), cache.flatten(0, 1), ends, ends_k, 1, 500)
    wanted = flash.flash_attn_varlen_func(*rows)
    with no_wait(torch):  # the next layer
        assert flash.flash_attn_varlen_func(*rows).shape == wanted.shape


def test_capture_without_a_call_before(cuda, torch, flash):
    q = torch.ones(3, 1, 8, 128, dtype=torch.bfloat16, device=cuda.device)
    cache = torch.ones(3, 48, 8, 128, dtype=torch.bfloat16, device=cuda.device)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="^q: expected a call with the same shapes and options"),
        torch.cuda.graph(graph),
    ):
        flash.flash_attn_with_kvcache(q, cache, cache, softmax_scale=0.0625)


def test_streams(cuda, torch, rng, flash):
    """Calls on two streams share a workspace, and wait for each other."""
    call = Call(dtype="bfloat16", heads=(8, 1), dims=(128, 128), page_size=64)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    batch = Batch(rng, call, [1, 1], [3000, 2900])
    k_cache, v_cache, table = (cuda.tensor(x) for x in batch.paged())
    q, lens = cuda.tensor(np.stack(batch.q)), flash_cases.int32(cuda, batch.kv_lens)
    torch.cuda.synchronize()
    for i in range(20):
        with torch.cuda.stream(streams[i % 2]):
            results.append(
                flash.flash_attn_with_kvcache(
                    q,
                    k_cache,
                    v_cache,
                    cache_seqlens=lens,
                    block_table=table,
                    causal=True,
                    return_softmax_lse=True,
                )
            )
    torch.cuda.synchronize()
    for o, lse in results:
        batch.check(cuda.array(o.flatten(0, 1)), flash_cases.rows_of(cuda, lse))


def test_sdpa(cuda, torch, flash):
    """PyTorch's scaled_dot_product_attention calls what register() has registered."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import flashplan as fp

    q, k, v = (
        torch.randn(2, 8, 70, 128, dtype=torch.bfloat16, device=cuda.device) for _ in range(3)
    )
    attend = torch.nn.functional.scaled_dot_product_attention
    with sdpa_kernel(SDPBackend.MATH):
        wanted = attend(*(x.float() for x in (q, k, v)), is_causal=True)
    torch.nn.attention.activate_flash_attention_impl(flash.register())
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            o = attend(q, k, v, is_causal=True)
            with torch.inference_mode(False):
                given = [x.clone().requires_grad_() for x in (q, k, v)]
                with pytest.raises(fp.UnsupportedError, match="^requires_grad: "):
                    attend(*given, is_causal=True)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    assert torch.allclose(o.float(), wanted, atol=2e-2)


def test_rotation_in_a_graph(cuda, torch, flash):
    """Replays rotate by the lengths that they find."""
    new = torch.randn(2, 3, 1, 2, 64, device=cuda.device).bfloat16()
    q = torch.randn(3, 1, 4, 64, device=cuda.device).bfloat16()
    k_cache, v_cache = (q.new_zeros(12, 16, 2, 64) for _ in range(2))
    table = torch.randperm(12, dtype=torch.int32, device=cuda.device).view(3, 4)
    lengths = torch.tensor([0, 30, 7], dtype=torch.int32, device=cuda.device)
    angles = torch.rand(64, 32, device=cuda.device) * 6
    cos, sin = angles.cos(), angles.sin()

    def rotate_first():
        rows = [x.squeeze(1) for x in (q, new[0])]
        rows = fp.apply_rope(*rows, lengths, cos_sin_cache=torch.cat((cos, sin), 1))
        return [x.unsqueeze(1) for x in rows]

    def call(q, k, caches, **rotary):
        options = {"cache_seqlens": lengths, "block_table": table, "causal": True}
        return flash.flash_attn_with_kvcache(q, *caches, k, new[1], **options, **rotary)

    rotary = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": False}
    call(q, new[0], (k_cache, v_cache), **rotary)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = call(q, new[0], (k_cache, v_cache), **rotary)
    for _ in range(3):
        caches = k_cache.clone(), v_cache.clone()
        graph.replay()
        turned, k = rotate_first()
        wanted = call(turned, k, caches)
        for actual, exact in zip((o, k_cache, v_cache), (wanted, *caches)):
            assert torch.equal(actual, exact)
        lengths += 1
