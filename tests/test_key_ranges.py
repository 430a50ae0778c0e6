# SPDX-License-Identifier: Apache-2.0
"""Ranges of keys by which variants let plan() skip work. Results are tested as cases, in
test_attention.py: those of the variant "blocks"."""

import pickle
import re

import numpy as np
import pytest

import flashplan as fp
from variant_cases import VARIANTS

OPTIONS = {"page_size": None, "q_dtype": "float32", "device": "cpu", "max_batch_size": 4}


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch):
    monkeypatch.setenv("FLASHPLAN_CXXFLAGS", "-O1")


def seeing_all(key_range):
    """Hides nothing itself, so that results show what is skipped."""
    return fp.Variant("seeing_all", mask="return true;", key_range=key_range)


def attention(variant, **options):
    return fp.Attention(4, 2, 8, **OPTIONS | {"variant": variant} | options)


def tensors(rng, tokens, keys):
    shapes = (tokens, 4, 8), (keys, 2, 8), (keys, 2, 8)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def cost_of(plan):
    """Of all queues, as describe() has it; one queue here."""
    return int(re.search(r"^ +0 +(\d+)", plan.describe(), re.MULTILINE)[1])


def test_hidden_tiles_are_not_read(rng):
    """A decode that sees keys [begin, end) of 4000, where all others are NaN."""
    q, k, v = tensors(rng, 1, 4000)
    begin, end = 1024, 1237  # from the begin of a tile: what it has before would be read
    for x in (k, v):
        x[:begin] = x[end:] = np.nan
    attn = attention(seeing_all(lambda request, query, kv_len: (begin, end)), num_ctas=1)
    plan = attn.plan([0, 1], [4000])
    o = attn.run(q, k, v)
    plain = fp.Attention(4, 2, 8, **OPTIONS)
    plain.plan([0, 1], [end - begin])
    np.testing.assert_allclose(o, plain.run(q, k[begin:end], v[begin:end]), rtol=1e-5, atol=1e-6)

    cost = cost_of(plan)
    everything = attention(seeing_all(None), num_ctas=1)
    assert 10 * cost < cost_of(everything.plan([0, 1], [4000]))
    assert cost == cost_of(everything.plan([0, 1], [end - begin]))


def test_a_range_costs_what_the_same_window_does():
    """Prompts, chunks and decodes: the same tiles, so the same schedule."""
    windowed = attention(seeing_all(None), window_left=99, num_ctas=3)
    ranged = attention(
        seeing_all(lambda request, query, kv_len: (query - 99, query + 1)), num_ctas=3
    )
    for qo_lens, kv_lens in (([1, 8, 200, 0], [1000, 3000, 200, 7]), ([3], [2]), ([], [])):
        batch = np.cumsum([0, *qo_lens]), kv_lens
        texts = [attn.plan(*batch).describe() for attn in (windowed, ranged)]
        wanted, actual = (re.sub(r"\d+ partial rows", "", text) for text in texts)
        assert actual == wanted


def test_the_function_gets_every_query():
    calls = []

    def record(*arrays):
        calls.append(arrays)
        return 0, 1 << 40

    attn = attention(seeing_all(record))
    attn.plan([0, 2, 2, 5], [7, 3, 2])
    ((request, query, kv_len),) = calls
    assert [x.dtype for x in calls[0]] == [np.int64] * 3
    assert request.tolist() == [0, 0, 2, 2, 2]
    assert query.tolist() == [5, 6, -1, 0, 1]
    assert kv_len.tolist() == [7, 7, 2, 2, 2]


@pytest.mark.parametrize(
    "bounds",
    [
        lambda query: (np.uint8(3), np.array(5, np.uint64)),
        lambda query: (query * 0 + 3, [5, 5]),
        lambda query: [np.array([3, 3], np.int32), 5],
    ],
)
def test_kinds_of_bounds(rng, bounds):
    q, k, v = tensors(rng, 2, 9)
    v[5:] = np.nan
    attn = attention(seeing_all(lambda request, query, kv_len: bounds(query)))
    attn.plan([0, 2], [9])
    assert np.isfinite(attn.run(q, k, v)).all()


def test_ranges_beyond_the_keys_and_none(rng):
    """Any integer is a bound; an end that is no larger than the begin means no key."""
    q, k, v = tensors(rng, 3, 9)
    plain = attention(seeing_all(None))
    plain.plan([0, 3], [9])
    expected = plain.run(q, k, v)
    for begin, end in ((-(2**63), 2**63 - 1), (-1, 2**64 - 1), (0, 9)):
        attn = attention(seeing_all(lambda *_, b=begin, e=end: (b, np.array(e))))
        attn.plan([0, 3], [9])
        assert np.array_equal(attn.run(q, k, v), expected)
    for begin, end in ((0, 0), (5, 3), (9, 2**63 - 1), (-5, -3), (2**63, 2**63 + 5)):
        attn = attention(seeing_all(lambda *_, b=begin, e=end: (b, e)))
        attn.plan([0, 3], [9])
        o, lse = attn.run(q, np.nan * k, np.nan * v, return_lse=True)
        assert (o == 0).all()
        assert np.isneginf(lse).all()


def shrinking(request, query, kv_len):
    """Changes the shape of its argument, which says how many queries there are."""
    query.resize((1,), refcheck=False)
    return 0, query


def raise_error(*_):
    raise KeyError("mine")


@pytest.mark.parametrize(
    "error, match, function",
    [
        (TypeError, "key_range: .*begin and end, got None", lambda *_: None),
        (TypeError, "key_range: .*begin and end, got 3", lambda *_: 3),
        (TypeError, "key_range: .*begin and end", lambda *_: (0, 1, 2)),
        (TypeError, "key_range: expected integers as begin, got float64", lambda *_: (0.0, 1)),
        (TypeError, "key_range: expected integers as end, got bool", lambda *_: (0, True)),
        (ValueError, r"key_range: .*end of shape \(2,\), got \(3,\)", lambda *_: (0, [1, 1, 1])),
        (ValueError, r"key_range: .*begin of shape \(2,\)", lambda *_: ([[0], [0]], 1)),
        (ValueError, r"key_range: .*end of shape \(2,\), got \(1,\)", shrinking),
        (KeyError, "mine", raise_error),
        (TypeError, "argument", lambda query: (0, 1)),
    ],
)
def test_wrong_functions(rng, error, match, function):
    """The last plan stays."""
    functions = [lambda *_: (0, 9)]
    attn = attention(seeing_all(lambda *arrays: functions[0](*arrays)))
    attn.plan([0, 2], [9])
    q, k, v = tensors(rng, 2, 9)
    expected = attn.run(q, k, v)
    functions[0] = function
    with pytest.raises(error, match=match):
        attn.plan([0, 1, 2], [5, 4])
    assert np.array_equal(attn.run(q, k, v), expected)


def test_wrong_lengths_are_refused_before_the_function_is_called():
    def never(*_):
        raise AssertionError("called")

    attn = attention(seeing_all(never), max_qo_tokens=8)
    for name, qo_indptr, kv_lens in (
        ("qo_indptr", [0, 2, 1], [5, 5]),
        ("qo_indptr", [1, 2], [5]),
        ("kv_lens", [0, 1], [-1]),
        ("qo_indptr", [0, 2**31 - 1], [5]),
        ("kv_lens", [0, 1, 2, 3, 4, 5], [1] * 5),
    ):
        with pytest.raises(ValueError, match=name):
            attn.plan(qo_indptr, kv_lens)


def test_real_lengths_are_refused(rng):
    attn = attention(VARIANTS["blocks"].variant)
    attn.plan([0, 1], [9])
    q, k, v = tensors(rng, 1, 9)
    out = np.full_like(q, np.nan)
    with pytest.raises(ValueError, match="kv_lens: expected none with key ranges"):
        attn.run(q, k, v, kv_lens=np.array([8], np.int32), out=out)
    assert np.isnan(out).all()


def test_a_function_that_plans_itself():
    def plan_again(request, query, kv_len):
        lengths[0] = 0
        with pytest.raises(RuntimeError, match="one thread at a time"):
            attn.plan([0, 1], [4])
        return 0, kv_len

    attn = attention(seeing_all(plan_again))
    lengths = [5]
    assert "5 keys" in attn.plan([0, 1], lengths).describe()


def test_the_description_has_it():
    blocks = VARIANTS["blocks"].variant
    assert pickle.loads(pickle.dumps(blocks)) == blocks
    without = fp.Variant("blocks", mask=blocks._arguments["mask"])
    assert blocks != without
    assert "key_range=<function" in repr(blocks)
    with pytest.raises(TypeError, match="key_range: expected a function, got tuple"):
        fp.Variant("v", mask="return true;", key_range=(0, 5))
