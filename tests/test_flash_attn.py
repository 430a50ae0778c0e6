# SPDX-License-Identifier: Apache-2.0
"""flashplan.flash_attn: the functions of FlashAttention, against the reference on the CPU."""

import inspect

import numpy as np
import pytest

import flash_cases
import flashplan as fp
from flash_cases import CALLS, Batch, Call, arguments_of
from frameworks import Torch

EVERY = pytest.mark.parametrize("call", CALLS, ids=str)
FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")


@pytest.fixture
def cpu(torch):
    return Torch(torch)


@EVERY
def test_func(cpu, rng, call, flash):
    flash_cases.check_func(cpu, rng, call, flash)


@EVERY
def test_varlen(cpu, rng, call, flash):
    flash_cases.check_varlen(cpu, rng, call, flash)


def test_window_to_the_right_of_many_keys(cpu, rng, flash):
    """Keys behind the window are skipped in whole tiles."""
    call = Call(window_size=(60, 100), causal=False)
    flash_cases.check_varlen(cpu, rng, call, flash, [300, 5, 1], [500, 260, 400])


@pytest.mark.parametrize("used", [False, True])
@EVERY
def test_varlen_paged(cpu, rng, call, used, flash):
    flash_cases.check_varlen_paged(cpu, rng, call, flash, used=used)
    flash_cases.check_varlen_paged(cpu, rng, call, flash, [1, 1, 1], [20, 0, 33], used)
    flash_cases.check_varlen_paged(cpu, rng, call, flash, [4, 4], [20, 4], used)


@pytest.mark.parametrize("qo_len", [1, 4])
@EVERY
def test_kvcache(cpu, rng, call, qo_len, flash):
    flash_cases.check_kvcache(cpu, rng, call, flash, qo_len)


@pytest.mark.parametrize("append", [False, True])
@EVERY
def test_kvcache_of_places(cpu, rng, call, append, flash):
    flash_cases.check_kvcache_places(cpu, rng, call, flash, append)


@pytest.mark.parametrize("ragged", [False, True])
@EVERY
def test_kvcache_append(cpu, rng, call, ragged, flash):
    flash_cases.check_kvcache_append(cpu, rng, call, flash, ragged)


def test_steps_of_other_lengths(cpu, rng, flash):
    """Calls of the same kind plan anew for other lengths, and go back to earlier ones."""
    for qo_lens, kv_lens in (([1, 7], [30, 7]), ([2, 6], [8, 29]), ([1, 7], [30, 7]), ([3], [3])):
        flash_cases.check_varlen(cpu, rng, Call(), flash, qo_lens, kv_lens)
        flash_cases.check_varlen_paged(cpu, rng, Call(), flash, qo_lens, kv_lens)
        flash_cases.check_kvcache(cpu, rng, Call(), flash, 1, kv_lens)


def test_lengths_that_are_written_to(cpu, rng, flash):
    """The same tensors hold other lengths in the next step."""
    lens = cpu.torch.zeros(3, dtype=cpu.torch.int32)
    for kv_lens in ([30, 7], [8, 29]):
        batch = Batch(rng, Call(), [1, 7], kv_lens)
        q, k, v = (cpu.tensor(np.concatenate(x)) for x in (batch.q, batch.k, batch.v))
        lens.copy_(flash_cases.ends_of(cpu, kv_lens))
        ends = flash_cases.ends_of(cpu, [1, 7])
        results = flash.flash_attn_varlen_func(
            q, k, v, ends, lens, 7, 30, causal=True, return_softmax_lse=True
        )
        batch.check(*(cpu.array(x) for x in results))


def test_empty_batch(cpu, flash):
    q, cache = cpu.torch.ones(0, 1, 4, 64), cpu.torch.ones(3, 16, 2, 64)
    table = cpu.torch.zeros((0, 2), dtype=cpu.torch.int32)
    lens = cpu.torch.zeros(0, dtype=cpu.torch.int32)
    o = flash.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lens, block_table=table)
    assert o.shape == (0, 1, 4, 64)
    assert flash.flash_attn_func(q, q[:, :, :2], q[:, :, :2]).shape == (0, 1, 4, 64)


def test_default_lengths(cpu, rng, flash):
    """A cache is full by default, and a number is the length of all sequences."""
    q, k, v = (
        cpu.tensor(rng.standard_normal((2, n, h, 64)).astype(np.float32))
        for n, h in ((1, 4), (24, 2), (24, 2))
    )
    wanted = flash.flash_attn_func(q, k, v, causal=True)
    assert cpu.torch.equal(flash.flash_attn_with_kvcache(q, k, v, causal=True), wanted)
    wanted = flash.flash_attn_func(q, k[:, :9], v[:, :9], causal=True)
    actual = flash.flash_attn_with_kvcache(q, k, v, cache_seqlens=9, causal=True)
    assert cpu.torch.equal(actual, wanted)


def test_packed_qkv_and_transposed_tensors(cpu, rng, flash):
    """Views with strides give the results of contiguous tensors."""
    qkv = cpu.tensor(rng.standard_normal((2, 6, 3, 4, 64)).astype(np.float32))
    views = qkv.unbind(2)
    wanted = flash.flash_attn_func(*(x.contiguous() for x in views), causal=True)
    assert cpu.torch.equal(flash.flash_attn_func(*views, causal=True), wanted)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in views]
    assert cpu.torch.equal(flash.flash_attn_func(*turned, causal=True), wanted)


def test_ragged_queries_of_a_cache(cpu, rng, flash):
    """As SGLang calls it."""
    for qo_lens, kv_lens in (([1, 1, 1], [20, 33, 0]), ([1, 3, 2], [20, 33, 2])):
        batch = Batch(rng, Call(), qo_lens, kv_lens)
        k_cache, v_cache, table = (cpu.tensor(x) for x in batch.paged())
        o, lse = flash.flash_attn_with_kvcache(
            q=cpu.tensor(np.concatenate(batch.q)),
            k_cache=k_cache,
            v_cache=v_cache,
            page_table=table,
            cache_seqlens=flash_cases.int32(cpu, kv_lens),
            cu_seqlens_q=flash_cases.ends_of(cpu, qo_lens),
            cu_seqlens_k_new=None,
            max_seqlen_q=max(qo_lens),
            softmax_scale=None,
            causal=True,
            window_size=(-1, -1),
            softcap=0.0,
            k_descale=None,
            v_descale=None,
            num_splits=0,
            return_softmax_lse=True,
            sinks=None,
            ver=3,
        )
        batch.check(cpu.array(o), cpu.array(lse))


TENSOR = object()
REFUSED = {
    "dropout_p": 0.1,
    "return_attn_probs": True,
    "rotary_seqlens": TENSOR,
    "cache_leftpad": TENSOR,
    "qv": TENSOR,
    "q_v": TENSOR,
    "attention_chunk": 64,
    "seqused_q": TENSOR,
    "cp_world_size": 2,
    "cp_tot_seqused_k": TENSOR,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_refused(torch, flash, name):
    function = getattr(flash, name)
    arguments = arguments_of(torch, name)
    function(*arguments)
    parameters = inspect.signature(function).parameters
    for argument, value in REFUSED.items():
        if argument in parameters:
            given = torch.ones(2) if value is TENSOR else value
            with pytest.raises(fp.UnsupportedError, match=f"^{argument}: expected "):
                function(*arguments, **{argument: given})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_keywords_of_forks(torch, flash, name):
    """What changes the result is refused, what tunes a kernel is not, and what no fork has is
    unknown."""
    function, arguments = getattr(flash, name), arguments_of(torch, name)
    o, lse = function(*arguments, return_softmax_lse=True)
    tuning = {"min_seqlen_k": 3, "rel_bias": None, "mask_mod": None, "return_lse": True}
    again = function(*arguments, **tuning)
    assert torch.equal(again[0], o)
    assert torch.equal(again[1], lse)
    for argument, value in (("score_mod", max), ("mask_mod", max), ("rel_bias", torch.ones(2))):
        with pytest.raises(fp.UnsupportedError, match=f"^{argument}: expected none, got "):
            function(*arguments, **{argument: value})
    with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument 'cusal'"):
        function(*arguments, cusal=True)
    out = torch.full_like(o, torch.nan)
    sinks = torch.ones(4)
    wanted = function(*arguments, sinks=sinks)
    assert torch.equal(function(*arguments, out=out, learnable_sink=sinks), wanted)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_8_bit_queries_and_gradients(torch, flash, name):
    function = getattr(flash, name)
    q, *others = arguments_of(torch, name)
    with pytest.raises(fp.UnsupportedError, match=r"^kv_dtype: expected .* q_dtype float8_e4m3fn"):
        function(q.to(torch.float8_e4m3fn), *others)
    with torch.enable_grad(), pytest.raises(ValueError, match=r"^q: .* requires grad"):
        function(q.requires_grad_(), *others)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_outputs_of_8_bit_queries(torch, flash, name):
    """bfloat16, or the dtype of `out`."""
    function = getattr(flash, name)
    q, k, v, *others = arguments_of(torch, name)
    narrow = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    o = function(*narrow, *others)
    assert o.dtype == torch.bfloat16
    out = torch.full(o.shape, torch.nan)
    result = function(*narrow, *others, out=out)
    assert result.dtype == torch.float32
    torch.testing.assert_close(out.bfloat16(), o, rtol=2**-7, atol=0)


def test_wrong_arguments(torch, flash):
    q, k, v = arguments_of(torch, "flash_attn_func")
    rows = arguments_of(torch, "flash_attn_varlen_func")
    table = torch.zeros(2, 1, dtype=torch.int32)
    for function in FUNCTIONS:
        given = arguments_of(torch, function)
        for shape in ((3,), (1, 4), (3, 4), ()):
            with pytest.raises(
                ValueError, match=r"^alibi_slopes: expected shape \[4\] or \[2, 4\]"
            ):
                getattr(flash, function)(*given, alibi_slopes=torch.ones(shape))
        with pytest.raises(ValueError, match="^softcap: expected 0 with a variant that has logits"):
            getattr(flash, function)(*given, alibi_slopes=torch.ones(4), softcap=3.0)
    for error, match, call in (
        (ValueError, r"^q: expected 4 dim", lambda: flash.flash_attn_func(q[0], k, v)),
        (
            ValueError,
            r"^k: expected 3 dim",
            lambda: flash.flash_attn_varlen_func(rows[0], k, v, *rows[3:]),
        ),
        (
            ValueError,
            r"^block_table: expected it or page_table, got both",
            lambda: flash.flash_attn_with_kvcache(q, k, v, block_table=table, page_table=table),
        ),
        (
            ValueError,
            r"^s_aux: expected it, sinks or learnable_sink, got several",
            lambda: flash.flash_attn_func(q, k, v, s_aux=torch.ones(4), sinks=torch.ones(4)),
        ),
        (
            ValueError,
            r"^cache_batch_idx: expected None with a block table",
            lambda: flash.flash_attn_with_kvcache(
                q, k, v, block_table=table, cache_batch_idx=table[0]
            ),
        ),
        (
            ValueError,
            r"^cu_seqlens_k: expected it or seqused_k, got neither",
            lambda: flash.flash_attn_varlen_func(*rows[:4]),
        ),
        (
            ValueError,
            r"^cu_seqlens_k: expected it with ragged",
            lambda: flash.flash_attn_varlen_func(*rows[:4], seqused_k=table[:, 0]),
        ),
        (
            ValueError,
            r"^v: expected both k and v, or neither, got one of them",
            lambda: flash.flash_attn_with_kvcache(q, k, v, k[:, :1]),
        ),
    ):
        with pytest.raises(error, match=match):
            call()


def test_scales_that_differ_between_sequences(torch, flash):
    q, k = torch.ones(2, 1, 4, 64), torch.ones(2, 16, 2, 64).to(torch.float8_e5m2)
    scales = torch.ones(2, 2)
    with pytest.raises(
        fp.UnsupportedError, match="^v_descale: expected the scales of one sequence"
    ):
        flash.flash_attn_with_kvcache(q, k, k, v_descale=scales)
    expanded = torch.full((1, 1), 3.0).expand(2, 2)
    o = flash.flash_attn_with_kvcache(q, k, k, v_descale=expanded)
    assert torch.allclose(o, torch.tensor(3.0))
    plain = torch.ones(2, 16, 2, 64)
    assert torch.allclose(
        flash.flash_attn_with_kvcache(q, plain, plain, v_descale=expanded), torch.tensor(1.0)
    )


def test_append_of_16_bits_to_an_8_bit_cache(torch, flash):
    """The cache stores what the scales turn into the new keys."""
    q, cache = torch.ones(1, 1, 4, 64), torch.zeros(1, 16, 2, 64).to(torch.float8_e4m3fn)
    new, scale = torch.full((1, 1, 2, 64), 3.0), torch.tensor([[2.0, 0.5]])
    lens = torch.zeros(1, dtype=torch.int32)
    caches = (cache, cache.clone())
    o = flash.flash_attn_with_kvcache(
        q, *caches, new, new, cache_seqlens=lens, k_descale=scale, v_descale=scale
    )
    assert torch.allclose(o, torch.tensor(3.0))
    assert caches[1][0, 0, :, 0].float().tolist() == [1.5, 6.0]


def test_torch_takes_it_as_flash_attention(torch, flash, rng):
    """register(), and what PyTorch then calls on GPUs."""
    from flashplan import flash_sdpa

    registry = torch.nn.attention
    assert flash.register() == "flashplan"
    assert "flashplan" in registry.list_flash_attention_impls()
    registry.activate_flash_attention_impl("flashplan")
    assert registry.current_flash_attention_impl() == "flashplan"
    registry.restore_flash_attention_impl()
    assert registry.current_flash_attention_impl() is None

    q, k, v = (torch.from_numpy(rng.standard_normal((2, n, 6, 64))) for n in (4, 4, 4))
    q, k, v = q.float(), k.float(), v.float()
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    out, lse, *_ = flash_sdpa.dense_forward(q, k, v, is_causal=True)
    assert torch.allclose(out, wanted, atol=1e-5)
    assert out.stride() == torch.empty_like(q).stride()
    assert lse.shape == (2, 4, 6)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    out, lse_too, *_ = flash_sdpa.forward(*turned, None, None, 6, 6, 0.0, True, False)
    assert torch.allclose(out.transpose(1, 2), wanted, atol=1e-5)
    assert torch.equal(lse_too, lse)
    rows = [x.flatten(0, 1) for x in turned]
    ends = torch.tensor([0, 6, 12], dtype=torch.int32)
    out, lse_too, *_ = flash_sdpa.forward(*rows, ends, ends, 6, 6, 0.0, True, False, scale=0.125)
    assert torch.allclose(out.unflatten(0, (2, 6)).transpose(1, 2), wanted, atol=1e-5)
    assert lse_too.shape == (4, 12)
    with pytest.raises(fp.UnsupportedError, match="^dropout_p: "):
        flash_sdpa.dense_forward(q, k, v, 0.5)
    with pytest.raises(fp.UnsupportedError, match="^requires_grad: "):
        flash_sdpa._backward(q)
    with torch.enable_grad(), pytest.raises(fp.UnsupportedError, match="^requires_grad: "):
        flash_sdpa.dense_forward(q, k.requires_grad_(), v)


def test_transformers_takes_it_as_a_kernel(torch, transformers, flash, monkeypatch):
    """As a module that the package `kernels` has loaded; with padding, and a window."""
    from transformers import modeling_flash_attention_utils as utils
    from transformers.integrations import hub_kernels

    monkeypatch.setattr(hub_kernels, "load_and_register_attn_kernel", lambda *_args: flash)
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    q, k, v = (torch.randn(2, 9, heads, 16) for heads in (4, 2, 2))
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, :4] = False
    options = {"is_causal": True, "sliding_window": 4, "attn_implementation": "org/flashplan"}
    padded = utils._flash_attention_forward(q, k, v, mask, 9, **options)
    for row, begin in ((0, 0), (1, 4)):
        alone = flash.flash_attn_func(
            q[row : row + 1, begin:],
            k[row : row + 1, begin:],
            v[row : row + 1, begin:],
            causal=True,
            window_size=(3, 3),
        )
        assert torch.allclose(padded[row, begin:], alone[0], atol=1e-5)
    plain = utils._flash_attention_forward(q, k, v, None, 9, **options)
    assert torch.allclose(plain[0], padded[0], atol=1e-5)
