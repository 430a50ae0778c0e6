# SPDX-License-Identifier: Apache-2.0
"""append_mla() and gather_mla() on the CPU."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

import flashplan as fp
import frameworks
from frameworks import bits
from inputs import INT_MAX
from mla_cases import SCALE, ds_mla_rows, real_keys
from mla_op_cases import (
    CASES,
    DS_MLA,
    OpCase,
    append_options,
    assert_rows,
    empty_cache,
    expected_rows,
    make_op_inputs,
    new_keys,
    stored_rows,
)
from rope_cases import ROPES


@pytest.mark.parametrize("case", CASES, ids=str)
def test_append(case, seed):
    inputs = make_op_inputs(case, seed)
    before = stored_rows(case, inputs.cache).copy()
    q_pe = None if inputs.q_pe is None else inputs.q_pe.copy()
    options = append_options(case, inputs)
    result = fp.append_mla(inputs.kv_c, inputs.k_pe, inputs.given_cache(), **options, q_pe=q_pe)
    assert result is None
    latent, tail, wanted_q = new_keys(case, inputs)
    wanted = expected_rows(case, latent, tail)
    rows = stored_rows(case, inputs.cache)
    used = inputs.slots >= 0
    assert_rows(case, rows[inputs.slots[used]], wanted[used])
    others = np.setdiff1d(np.arange(len(rows)), inputs.slots)
    assert np.array_equal(bits(rows[others]), bits(before[others])), "rows beside the slots"
    if q_pe is not None:  # of tokens that are skipped too, and of no others
        error = np.abs(q_pe[: case.tokens].astype(np.float64) - wanted_q.astype(np.float64))
        step = {"float32": 2.0**-20, "float16": 2.0**-10, "bfloat16": 2.0**-7}[case.dtype]
        assert np.all(error <= step * np.abs(wanted_q.astype(np.float64)) + 1e-5)
        assert np.array_equal(bits(q_pe[case.tokens :]), bits(inputs.q_pe[case.tokens :]))


@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"])
def test_append_has_the_bits_of_its_steps(kv_dtype, seed):
    case = OpCase(norm="bfloat16", rope="interleaved", num_heads=2, kv_dtype=kv_dtype)
    inputs = make_op_inputs(case, seed)
    q_pe = inputs.q_pe.copy()
    options = append_options(case, inputs)
    fp.append_mla(inputs.kv_c, inputs.k_pe, inputs.given_cache(), **options, q_pe=q_pe)
    latent = fp.rmsnorm(inputs.kv_c, inputs.weight)
    rope = fp.Rope(**ROPES["interleaved"])
    wanted_q, tail = fp.apply_rope(inputs.q_pe, inputs.k_pe[:, None], inputs.positions, rope)
    n = case.tokens
    assert np.array_equal(bits(q_pe[:n]), bits(wanted_q[:n]))
    rows = np.concatenate([latent, tail[:, 0]], axis=1)[:n, None]
    apart = empty_cache(dataclasses.replace(case, heads=True), inputs.num_pages)[0]
    fp.append_paged_kv(rows, rows, apart, apart.copy(), slot_mapping=inputs.slots)
    assert np.array_equal(bits(apart[:, :, 0]), bits(inputs.cache[0]))


@pytest.mark.parametrize("framework", frameworks.NAMES, indirect=True)
def test_append_and_gather_in_every_framework(framework, seed):
    if not framework.writable:
        pytest.skip("its arrays can not be written")
    case = OpCase(norm="float32", rope="interleaved", num_heads=2)
    inputs = make_op_inputs(case, seed)
    cache = framework.tensor(inputs.cache[0].copy())
    q_pe = framework.tensor(inputs.q_pe.copy())
    options = append_options(case, inputs, framework.tensor)
    fp.append_mla(
        framework.tensor(inputs.kv_c), framework.tensor(inputs.k_pe), cache, **options, q_pe=q_pe
    )
    fp.append_mla(
        inputs.kv_c, inputs.k_pe, inputs.cache[0], **append_options(case, inputs), q_pe=inputs.q_pe
    )
    assert np.array_equal(bits(framework.array(cache)), bits(inputs.cache[0]))
    assert np.array_equal(bits(framework.array(q_pe)), bits(inputs.q_pe))
    table, indptr = np.array([[1, 0]], np.int32), np.array([0, 20], np.int32)
    rows = fp.gather_mla(cache, framework.tensor(table), framework.tensor(indptr))
    assert isinstance(rows, framework.tensor_type)
    wanted = fp.gather_mla(inputs.cache[0], table, indptr)
    assert np.array_equal(bits(framework.array(rows)), bits(wanted))


def test_slots_that_are_skipped_write_nothing(seed):
    case = OpCase()
    inputs = make_op_inputs(case, seed)
    before = inputs.cache[0].copy()
    inputs.slots[:] = -1
    fp.append_mla(inputs.kv_c, inputs.k_pe, inputs.cache[0], slot_mapping=inputs.slots)
    none = inputs.slots[:0]
    fp.append_mla(inputs.kv_c, inputs.k_pe, inputs.cache[0], slot_mapping=none)
    assert np.array_equal(bits(inputs.cache[0]), bits(before))


def test_special_values_in_rows_with_scales():
    """Zeros stay zeros; NaN stays in its element; the others keep the scale of the largest."""
    kv_c, k_pe = np.zeros((3, 512), ml_dtypes.bfloat16), np.zeros((3, 64), ml_dtypes.bfloat16)
    kv_c[1, 5], kv_c[1, 6] = np.nan, 448
    kv_c[2, 128:256] = 3e38
    k_pe[1, 63] = np.nan
    cache = np.zeros((1, 4, 656), np.uint8)
    fp.append_mla(kv_c, k_pe, cache, slot_mapping=np.arange(3))
    keys = real_keys(cache[0])
    assert np.all(keys[0] == 0) and np.all(keys[2, :128] == 0)
    assert np.isnan(keys[1, [5, 575]]).all() and keys[1, 6] == 448
    assert np.allclose(keys[2, 128:256], 3e38, rtol=2**-4)


def filled(case, seed):
    """(cache, stored rows by slot)."""
    rng = np.random.default_rng(seed)
    num_pages = 9
    cache = empty_cache(case, num_pages)
    values = rng.standard_normal((num_pages * case.page_size, sum(case.dims)), np.float32)
    rows = ds_mla_rows(values) if case.kv_dtype == DS_MLA else values.astype(case.stored_dtype)
    first = 0
    for part in cache:
        size = part.shape[-1]
        part[...] = rows[:, first : first + size].reshape(part.shape)
        first += size
    return cache, rows


GATHERS = [
    (case, out_dtype, apart)
    for case in CASES
    if not (case.norm or case.rope)
    for out_dtype in ([case.dtype, "float32", "float16"] if case.kv_dtype else [case.dtype])
    for apart in ((False, True) if case.dims[1] else (False,))
]


@pytest.mark.parametrize(("case", "out_dtype", "apart"), GATHERS, ids=str)
def test_gather(case, out_dtype, apart, seed):
    cache, rows = filled(case, seed)
    rng = np.random.default_rng(seed)
    size = case.page_size
    columns = 4
    table = np.stack([rng.permutation(9)[:columns] for _ in range(5)]).astype(np.int32)
    counts = np.array([2 * size, 0, 1, size + 1, 0])
    starts = np.array([size // 2, 3, 4 * size - 1, 0, 0], np.int32)
    table[1] = INT_MAX  # of no row
    table[3, 2:] = INT_MAX
    indptr = np.concatenate([[2], 2 + np.cumsum(counts)]).astype(np.int32)
    n = indptr[-1] + 3
    out = [np.full((n, d), 7, out_dtype) for d in (case.dims if apart else (sum(case.dims),))]
    given = tuple(out) if apart else out[0]
    result = fp.gather_mla(
        cache[0] if len(cache) == 1 else tuple(cache),
        table,
        indptr,
        starts=starts,
        out=given,
        scale=case.scale,
    )
    assert result is given
    actual = np.concatenate(out, axis=1)
    wanted = np.full(actual.shape, 7, out_dtype)
    for r, count in enumerate(counts):
        for i in range(count):
            key = starts[r] + i
            stored = rows[table[r, key // size] * size + key % size][None]
            if case.kv_dtype == DS_MLA:
                real = real_keys(stored)[0].astype(np.float32)
            else:
                real = stored[0].astype(np.float32)
            if case.scale != 1:
                real = real * np.float32(case.scale)
            wanted[indptr[r] + i] = real.astype(out_dtype)
    assert np.array_equal(bits(actual), bits(wanted))


def test_gather_makes_its_result(seed):
    for kv_dtype, dtype in (
        (None, "bfloat16"),
        ("float8_e4m3fn", "bfloat16"),
        (DS_MLA, "bfloat16"),
    ):
        case = OpCase(kv_dtype=kv_dtype, pair=kv_dtype is None)
        cache, _ = filled(case, seed)
        table, indptr = np.array([[4, 2]], np.int32), np.array([0, 20], np.int32)
        given = cache[0] if len(cache) == 1 else tuple(cache)
        out = np.zeros((20, 576), dtype)
        fp.gather_mla(given, table, indptr, out=out)
        made = fp.gather_mla(given, table, indptr)
        assert made.dtype == np.dtype(dtype)
        assert np.array_equal(bits(made), bits(out))


def test_uint8_caches_hold_what_their_rows_say(seed):
    case = OpCase(kv_dtype="float8_e4m3fn")
    cache, _ = filled(case, seed)
    table, indptr = np.array([[4, 2]], np.int32), np.array([0, 20], np.int32)
    wanted = fp.gather_mla(cache[0], table, indptr)
    for options in ({}, {"kv_dtype": "float8_e4m3fn"}):
        raw = fp.gather_mla(cache[0].view(np.uint8), table, indptr, **options)
        assert np.array_equal(bits(np.asarray(raw)), bits(wanted))


@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn", DS_MLA])
def test_what_is_appended_is_what_attention_reads(kv_dtype, seed):
    """append_mla, gather_mla and shared_kv agree on the format."""
    case = OpCase(kv_dtype=kv_dtype, page_size=64, tokens=90)
    inputs = make_op_inputs(case, seed)
    inputs.slots = np.concatenate([np.arange(128, 192), np.arange(26)])  # pages 2 and 0
    fp.append_mla(inputs.kv_c, inputs.k_pe, inputs.cache[0], slot_mapping=inputs.slots)
    table, indptr = np.array([[2, 0]], np.int32), np.array([0, 90], np.int32)
    out = np.zeros((90, 576), np.float32 if kv_dtype else "bfloat16")
    dense = fp.gather_mla(inputs.cache[0], table, indptr, out=out).astype(np.float32)
    q = np.random.default_rng(seed).standard_normal((1, 8, 576), np.float32)
    attn = fp.Attention(
        8,
        1,
        (576, 512),
        shared_kv=True,
        softmax_scale=SCALE,
        page_size=64,
        device="cpu",
        q_dtype="bfloat16",
        kv_dtype=kv_dtype,
        o_dtype="float32",
    )
    attn.plan([0, 1], [90])
    o = attn.run(q.astype("bfloat16"), inputs.cache[0], block_table=table)
    logits = q.astype("bfloat16").astype(np.float64)[0] @ dense.T.astype(np.float64) * SCALE
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    wanted = weights @ dense[:, :512] / weights.sum(axis=1, keepdims=True)
    assert np.allclose(o[0], wanted, rtol=1e-4, atol=1e-5)
