# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (shared_kv) on the CPU against a float64 reference."""

import dataclasses
import itertools

import numpy as np
import pytest

import flashplan as fp
import frameworks
from frameworks import bits
from mla_cases import (
    DIMS,
    SCALE,
    MlaCase,
    assert_mla_correct,
    expected,
    make_mla_inputs,
    mla_tensors,
    run_mla,
    stored_keys,
)

LENS = (0, 1, 63, 64, 65, 127, 128, 129)
PAGES = (1, 8, 16, 64, 128)
HEADS = (4, 8, 12, 16, 24, 32, 40, 48, 64, 96, 128)
TOKENS = (1, 2, 3, 4, 8, 65)


def all_combinations():
    """Each number of heads with each number of tokens, and in turn with the other axes."""
    axes = {
        "page_size": itertools.cycle((*PAGES, None)),
        "q_dtype": itertools.cycle(("bfloat16", "float16", "bfloat16", "float32", "bfloat16")),
        "pairs": itertools.cycle(("", "qk", "q", "k", "", "", "qk")),
        "heads": itertools.cycle(("", "NHD", "HND")),
        "sinks": itertools.cycle((False, False, False, True)),
    }
    for num_heads, tokens in itertools.product(HEADS, TOKENS):
        lens = LENS if num_heads * tokens <= 512 else (63, 65 + tokens)
        options = {name: next(values) for name, values in axes.items()}
        yield MlaCase((tokens,) * len(lens), lens, num_heads, **options)


CASES = [
    *all_combinations(),
    MlaCase((1, 1), (4097, 4096), num_ctas=7),
    MlaCase((1,), (4097,), 128, num_ctas=8),
    MlaCase((4, 1), (4097, 300), 8, num_ctas=5, batch_invariant=True),
    MlaCase((1, 4, 0, 2), (200, 130, 50, 2), dims=(512, 512)),
    MlaCase((1, 4), (200, 130), dims=(512, 512), page_size=1, q_dtype="float32", num_ctas=3),
    MlaCase((2, 3), (60, 70), dims=(40, 24), q_dtype="float32", pairs="qk", page_size=8),
    MlaCase((2, 3), (60, 70), dims=(39, 23), q_dtype="float16", pairs="k", page_size=None),
    MlaCase((1, 2), (90, 70), strided=True, pairs="qk", heads="NHD"),
    MlaCase((1, 2), (90, 70), strided=True, heads="HND", page_size=16, csr=True),
    MlaCase((1, 2), (90, 70), strided=True, page_size=None),
    MlaCase((1, 3), (90, 70), causal=False, o_dtype="float32"),
    MlaCase((1, 4, 2), (90, 70, 0), planned_lens=(300, 70, 128), sinks=True),
    MlaCase((1, 4), (900, 70), planned_lens=(2000, 300), num_ctas=9, pairs="k"),
    MlaCase((3, 1), (700, 1900), planned_lens=(2000, 2000), batch_invariant=True, num_ctas=6),
    MlaCase((65, 0, 1), (3, 5, 0), 4),
    MlaCase((0, 0), (7, 0)),
    MlaCase((1, 2), (300, 200), gain=20.0),
    *(
        MlaCase((tokens, 1), lens, kv_dtype="float8_e4m3fn", k_scale=0.7, **options)
        for tokens, lens, options in (
            (1, (130, 64), {}),
            (4, (65, 300), {"pairs": "qk", "page_size": 16, "q_dtype": "float16"}),
            (2, (2000, 3), {"num_ctas": 5, "batch_invariant": True, "heads": "NHD"}),
            (3, (200, 129), {"page_size": None, "strided": True, "q_dtype": "float32"}),
        )
    ),
    *(
        MlaCase((tokens, 1), lens, kv_dtype="fp8_ds_mla", **options)
        for tokens, lens, options in (
            (1, (130, 64), {}),
            (4, (65, 300), {"pairs": "q", "page_size": 1, "q_dtype": "float16"}),
            (2, (2000, 3), {"num_ctas": 5, "batch_invariant": True, "heads": "NHD"}),
            (3, (200, 129), {"page_size": None, "strided": True, "q_dtype": "float32"}),
            (1, (300, 63), {"planned_lens": (512, 64), "sinks": True, "num_heads": 128}),
        )
    ),
    MlaCase((1200,), (1200,), 4, dims=(72, 64)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_mla(case, seed):
    inputs = make_mla_inputs(case, seed)
    o, lse = run_mla(case, inputs)
    assert_mla_correct(case, inputs, o, lse, expected(case, inputs))


@pytest.mark.parametrize("framework", frameworks.NAMES, indirect=True)
@pytest.mark.parametrize("pairs", ["", "qk"])
def test_every_framework_gives_the_same_bits(framework, pairs, seed):
    case = MlaCase((2, 1), (70, 33), pairs=pairs, sinks=True)
    inputs = make_mla_inputs(case, seed)
    wanted = run_mla(case, inputs)
    for actual, expect in zip(run_mla(case, inputs, framework=framework), wanted, strict=True):
        assert np.array_equal(bits(actual), bits(expect))


def test_parts_and_wholes_give_the_same_bits(seed):
    case = MlaCase((2, 1), (700, 33), num_ctas=3)
    inputs = make_mla_inputs(case, seed)
    wanted = run_mla(case, inputs)
    for pairs, heads in itertools.product(("q", "k", "qk"), ("", "NHD", "HND")):
        other = dataclasses.replace(case, pairs=pairs, heads=heads)
        for actual, expect in zip(run_mla(other, inputs), wanted, strict=True):
            assert np.array_equal(bits(actual), bits(expect)), (pairs, heads)


def test_bound_calls_follow_the_plan(seed):
    case = MlaCase((1, 1), (130, 64), pairs="qk")
    inputs = make_mla_inputs(case, seed)
    attn = fp.Attention(**case.options())
    q, k = mla_tensors(case, inputs, np.asarray)
    call = attn.bind(q, k, block_table=inputs.tables["block_table"], return_lse=True)
    for kv_lens in ((130, 64), (64, 63), (65, 0), (129, 64)):  # across the edges of pages
        now = dataclasses.replace(case, kv_lens=kv_lens)
        keys = [rows[:n] for rows, n in zip(inputs.keys, kv_lens, strict=True)]
        attn.plan([0, 1, 2], kv_lens)
        o, lse = call()
        wanted = expected(now, dataclasses.replace(inputs, keys=keys))
        assert_mla_correct(now, dataclasses.replace(inputs, keys=keys), o[:2], lse[:2], wanted)


@pytest.mark.parametrize("keys_between", [(), (0,), (5, 2000)])
def test_batch_invariance_with_splits(keys_between, seed):
    """A request has the same bits whatever its neighbours and the number of queues."""
    case = MlaCase((2,), (2500,), 8, num_ctas=1, batch_invariant=True)
    alone = make_mla_inputs(case, seed)
    wanted = run_mla(case, alone)
    lens = (*keys_between, 2500)
    for num_ctas in (2, 9):
        batch = dataclasses.replace(
            case, qo_lens=(1,) * len(keys_between) + (2,), kv_lens=lens, num_ctas=num_ctas
        )
        rng = np.random.default_rng(seed)
        keys = [stored_keys(rng, batch, n) for n in keys_between]
        inputs = make_mla_inputs(batch, seed, [*keys, alone.keys[0]])
        begin = inputs.qo_indptr[-2]
        inputs.q[begin : begin + 2] = alone.q[:2]
        for actual, expect in zip(run_mla(batch, inputs), wanted, strict=True):
            assert np.array_equal(bits(actual[begin : begin + 2]), bits(expect))


@pytest.mark.parametrize("place", [0, 31, 32, 63, 64, 127, 199])
def test_one_huge_key_at_each_place(place, seed):
    """The largest logit so far rises in the block of that key alone."""
    case = MlaCase((1, 3), (200, 200))
    rng = np.random.default_rng(seed)
    keys = [stored_keys(rng, case, 200) for _ in case.kv_lens]
    for rows in keys:
        rows[place] = rows[place].astype(np.float32) * 64
    inputs = make_mla_inputs(case, seed, keys)
    assert_mla_correct(case, inputs, *run_mla(case, inputs), expected(case, inputs))


def test_logits_that_grow_from_block_to_block(seed):
    case = MlaCase((1, 2), (320, 256), q_dtype="float32")
    rng = np.random.default_rng(seed)
    keys = [stored_keys(rng, case, n) for n in case.kv_lens]
    inputs = make_mla_inputs(case, seed, keys)
    direction = inputs.q[0, 0] / np.linalg.norm(inputs.q[0, 0])
    for rows in keys:
        rows += np.exp2(np.arange(len(rows)) // 32)[:, None].astype(np.float32) * direction
    inputs = make_mla_inputs(case, seed, keys)
    assert_mla_correct(case, inputs, *run_mla(case, inputs), expected(case, inputs))


def test_equal_keys_give_their_values(seed):
    case = MlaCase((1, 2), (129, 64), q_dtype="float32")
    rng = np.random.default_rng(seed)
    key = stored_keys(rng, case, 1)
    inputs = make_mla_inputs(case, seed, [np.repeat(key, n, axis=0) for n in case.kv_lens])
    o, lse = run_mla(case, inputs)
    assert_mla_correct(case, inputs, o, lse, expected(case, inputs))
    assert np.allclose(o, key[0, :512], rtol=1e-6)


def test_infinite_logits(seed):
    """Logits of -inf have the weight 0, whatever else their keys hold; those of +inf make NaN."""
    case = MlaCase((1, 1), (70, 65), q_dtype="float32")
    inputs = make_mla_inputs(case, seed)
    inputs.q[:2, :, 575] = 1
    for value, is_nan in ((-np.inf, False), (np.inf, True)):
        inputs.keys[0][[3, 40, 69], 575] = value
        inputs = make_again(case, inputs, seed)
        o, lse = run_mla(case, inputs)
        assert_mla_correct(case, inputs, o, lse, expected(case, inputs))
        assert np.isnan(lse[0]).all() == is_nan
        assert np.isfinite(lse[1]).all()


def make_again(case, inputs, seed):
    """Inputs with the keys and queries of `inputs`."""
    again = make_mla_inputs(case, seed, inputs.keys)
    again.q[...] = inputs.q
    return again


def test_nan_of_keys_that_a_query_does_not_see(seed):
    """In masked keys of the tile, in other requests, in page 0 and in unused pages."""
    case = MlaCase((3, 1), (66, 30), q_dtype="float32", page_size=16)
    inputs = make_mla_inputs(case, seed)
    inputs.keys[0][-1] = np.nan  # the last query alone sees it
    inputs = make_again(case, inputs, seed)
    o, lse = run_mla(case, inputs)
    assert np.isnan(lse[2]).all() and np.isnan(o[2]).all()
    wanted = expected(case, inputs)
    assert np.allclose(o[[0, 1, 3]], wanted[0][[0, 1, 3]], rtol=1e-4, atol=1e-5)
    assert np.allclose(lse[[0, 1, 3]], wanted[1][[0, 1, 3]], rtol=1e-5)


def test_states_of_empty_shards_merge_to_nothing(seed):
    """As merges of chunked prefixes and of context parallel ranks need them."""
    case = MlaCase((1, 2), (0, 0))
    o, lse = run_mla(case, make_mla_inputs(case, seed))
    assert np.all(o == 0) and np.all(np.isneginf(lse))
    full = MlaCase((1, 2), (90, 70))
    inputs = make_mla_inputs(full, seed)
    states = run_mla(full, inputs)
    for order in (((o, lse), states), (states, (o, lse)), ((o, lse), (o, lse))):
        merged, merged_lse = fp.merge_states(*order[0], *order[1])
        wanted = states if order[1] is states or order[0] is states else (o, lse)
        assert np.array_equal(bits(merged), bits(np.asarray(wanted[0])))
        assert np.array_equal(merged_lse, wanted[1])


def test_addresses_beyond_32_bits():
    """The last pages of a cache of more than 2^31 elements, of which only they are touched."""
    num_pages = (1 << 31) // (64 * 576) + 100
    cache = np.zeros((num_pages, 64, 576), np.float16)
    rng = np.random.default_rng(0)
    cache[-2:] = rng.standard_normal((2, 64, 576)).astype(np.float16)
    q = rng.standard_normal((1, 8, 576)).astype(np.float16)
    attn = fp.Attention(
        8,
        1,
        DIMS,
        shared_kv=True,
        softmax_scale=SCALE,
        q_dtype="float16",
        page_size=64,
        device="cpu",
    )
    attn.plan([0, 1], [128])
    far = np.array([[num_pages - 1, num_pages - 2]], np.int32)
    near = np.array([[1, 0]], np.int32)
    small = cache[-2:].copy()
    assert np.array_equal(attn.run(q, cache, block_table=far), attn.run(q, small, block_table=near))


def test_a_batch_without_requests():
    case = MlaCase((), ())
    o, lse = run_mla(case, make_mla_inputs(case, 0))
    assert o.shape == (0, 16, 512) and lse.shape == (0, 16)


def test_options_hold_shared_kv():
    case = MlaCase((1,), (1,))
    attn = fp.Attention(**case.options())
    assert attn.options["shared_kv"] is True
    assert fp.Attention(**attn.options).options == attn.options
    assert fp.is_supported(**case.options())


@pytest.mark.parametrize("pairs", ["", "qk"])
@pytest.mark.parametrize("kv_dtype", [None, "fp8_ds_mla"])
def test_torch_operator(torch, pairs, kv_dtype, seed):
    """Under torch.compile, without v."""
    ops = pytest.importorskip("flashplan.torch")
    case = MlaCase((2, 1), (70, 33), pairs="q" if kv_dtype and pairs else pairs, kv_dtype=kv_dtype)
    inputs = make_mla_inputs(case, seed)
    attn = fp.Attention(**case.options())
    wanted = run_mla(case, inputs, attn)
    framework = frameworks.Torch(torch)
    q, k = mla_tensors(case, inputs, framework.tensor)
    table = framework.tensor(inputs.tables["block_table"])

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(q, k, table):
        return ops.run(attn, q, k, block_table=table, return_lse=True)

    for actual, expect in zip(run(q, k, table), wanted, strict=True):
        assert np.array_equal(bits(framework.array(actual)[:3]), bits(expect))


@pytest.mark.parametrize("pairs", ["", "qk"])
@pytest.mark.parametrize("kv_dtype", [None, "fp8_ds_mla"])
def test_jax_call(jax, pairs, kv_dtype, seed):
    """Under jit, without v."""
    calls = pytest.importorskip("flashplan.jax")
    case = MlaCase((2, 1), (70, 33), pairs="q" if kv_dtype and pairs else pairs, kv_dtype=kv_dtype)
    inputs = make_mla_inputs(case, seed)
    attn = fp.Attention(**case.options())
    wanted = run_mla(case, inputs, attn)
    q, k = mla_tensors(case, inputs, jax.numpy.asarray)

    @jax.jit
    def run(q, k, table):
        return calls.run(attn, q, k, block_table=table, return_lse=True)

    for actual, expect in zip(run(q, k, inputs.tables["block_table"]), wanted, strict=True):
        assert np.array_equal(bits(np.asarray(actual)[:3]), bits(expect))
    whole = fp.Attention(4, 1, 16, page_size=None, q_dtype="float32", device="cpu")
    x = np.ones((1, 4, 16), np.float32)
    with pytest.raises(TypeError, match="^v: expected an array, got None"):
        calls.run(whole, x, x[:, :1])


def test_lists_in_frameworks(torch, jax, seed):
    ops, calls = pytest.importorskip("flashplan.torch"), pytest.importorskip("flashplan.jax")
    rng = np.random.default_rng(seed)
    q, cache = (rng.standard_normal(shape, np.float32) for shape in ((3, 4, 40), (5, 4, 40)))
    lists = rng.integers(-1, 20, (3, 8)).astype(np.int32)
    lens = np.array([8, 0, 5], np.int32)
    options = {"softmax_scale": 0.2, "page_size": 4, "q_dtype": "float32", "device": "cpu"}
    attn = fp.Attention(4, 1, (40, 24), shared_kv=True, topk=8, **options)
    attn.plan([0, 2, 3], [20, 20])
    wanted = attn.run(q, cache, topk_indices=lists, topk_lens=lens)
    tensors = map(torch.tensor, (q, cache, lists, lens))
    q_t, cache_t, lists_t, lens_t = tensors
    result = ops.run(attn, q_t, cache_t, topk_indices=lists_t, topk_lens=lens_t)
    assert np.array_equal(result.numpy(), wanted)
    result = jax.jit(lambda *x: calls.run(attn, x[0], x[1], topk_indices=x[2], topk_lens=x[3]))(
        q, cache, lists, lens
    )
    assert np.array_equal(np.asarray(result), wanted)
