# SPDX-License-Identifier: Apache-2.0
"""What the filters of sample() keep, and its log-probabilities, against float64."""

import ml_dtypes
import numpy as np
import pytest

import flashplan as fp
from frameworks import NumPy
from sampling_cases import distribution, hard_rows
from test_sampling import DTYPES, FILTERS, mixed

ROUNDING = 2e-5  # relative, of a probability
LEAST = 2**-31  # of the largest one: below it a logit may count for nothing


def rows_of(rng, size, dtype, from_probs=False):
    """Hard rows of logits or of probabilities, in a dtype."""
    largest = float(ml_dtypes.finfo(dtype).max)
    logits = hard_rows(rng, size)
    finite = np.isfinite(logits)
    logits[finite] = np.clip(logits[finite], -largest, largest)
    logits = logits.astype(dtype)
    if not from_probs:
        return logits
    with np.errstate(over="ignore", invalid="ignore"):
        x = np.exp(logits.astype(np.float64) - logits.astype(np.float64).max(1, keepdims=True))
    return (x / x.sum(1, keepdims=True)).astype(dtype)


def check_row(row, probs, options, from_probs=False):
    """Filters keep what they must and no more, and what they keep has its probabilities."""
    wide, narrow = (
        distribution(row, from_probs=from_probs, slack=slack, **options) for slack in (-1, 1)
    )
    kept = probs > 0
    assert (wide[kept] > 0).all(), "a token is kept that the filters drop"
    assert kept[narrow > LEAST * narrow.max()].all(), "a token is dropped that the filters keep"
    unfiltered = {"temperature": options.get("temperature", 1.0), "from_probs": from_probs}
    exact = np.where(kept, distribution(row, **unfiltered), 0)
    exact /= exact.sum()
    assert (np.abs(probs - exact) <= ROUNDING * exact + LEAST).all()


def check_filtered_probs(rng, framework, size, dtype, options, from_probs=False):
    rows = rows_of(rng, size, dtype, from_probs)
    probs = fp.filtered_probs(framework.tensor(rows), from_probs=from_probs, **options)
    for row, filtered in zip(rows, framework.array(probs), strict=True):
        check_row(row, filtered, options, from_probs)


@pytest.mark.parametrize("name", FILTERS)
def test_filtered_probs(rng, name):
    for size in (1, 2, 37, 1024, 5000):
        for dtype in DTYPES:
            check_filtered_probs(rng, NumPy(), size, dtype, FILTERS[name])


@pytest.mark.parametrize("name", ["plain", "greedy", "k 5", "k half", "p 0.3", "min-p 1e-3"])
def test_filtered_probs_of_probabilities(rng, name):
    for size in (2, 1500):
        for dtype in ("float32", "float16"):
            check_filtered_probs(rng, NumPy(), size, dtype, FILTERS[name], from_probs=True)


def test_sample_draws_from_filtered_probs(rng):
    """Each drawn token is one that is kept, and its log-probability is that of the row."""
    logits = (3 * rng.standard_normal((40, 900))).astype(np.float32)
    bias = rng.standard_normal(900).astype(np.float32)
    options = mixed(rng, 40)
    tokens, logprobs = fp.sample(logits, logit_bias=bias, return_logprobs=True, **options)
    del options["seed"], options["offset"]
    probs = fp.filtered_probs(logits, logit_bias=bias, **options)
    drawn = probs[np.arange(40), tokens]
    assert (drawn > 0).all()
    assert np.abs(np.log(drawn) - logprobs).max() < 1e-4
    assert np.abs(probs.astype(np.float64).sum(1) - 1).max() < 1e-5


def test_weights_are_rounded_as_the_documentation_says(rng):
    """With a filter to integers of which the largest is 2^30: what is lighter than half is never
    drawn."""
    size = 1000
    for distance in (21.4, 21.6):  # the others weigh 0.55 and 0.45
        logits = np.full((1, size), -distance, np.float32)
        logits[0, 7] = 0
        rest = np.round(2**30 * np.exp(-distance)) * (size - 1)
        options = {"min_p": 1e-30, "seed": int(rng.integers(2**40)), "return_logprobs": True}
        ids, logprobs = fp.sample(np.repeat(logits, 5, axis=0), **options)
        assert (ids == 7).all()
        assert np.allclose(logprobs, -np.log1p(rest / 2**30), rtol=1e-3, atol=0)
        ids, _, top_ids, _ = fp.sample(logits, **options, top_logprobs=2)
        assert top_ids[0].tolist() == [7, 0 if rest else -1]


def first_by_value(rows, ks):
    """Whether each element is among the ks largest of its row; equal ones count by id."""
    keep = np.zeros(rows.shape, bool)
    for row, kept, k in zip(rows.astype(np.float64), keep, ks, strict=True):
        kept[np.lexsort((np.arange(row.size), -row))[:k]] = True
    return keep


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 37, 3000])
def test_top_k_mask(rng, size, dtype):
    rows = rows_of(rng, size, dtype)
    ks = rng.integers(1, size + 2, len(rows)).astype(np.int32)
    for top_k, each in ((ks, ks), (5, np.full(len(rows), 5))):
        keep = first_by_value(rows, each)
        wanted = np.where(keep, rows, np.array(-np.inf, dtype))
        masked = fp.top_k_mask(rows, top_k)
        assert masked.dtype == rows.dtype
        assert np.array_equal(masked, wanted)
        in_place = rows.copy()
        assert fp.top_k_mask(in_place, top_k, out=in_place) is in_place
        assert np.array_equal(in_place, wanted)


def test_renorms(rng):
    probs = rows_of(rng, 700, "float32", from_probs=True)
    ks = rng.integers(1, 700, len(probs)).astype(np.int32)
    ps = rng.uniform(0.05, 1, len(probs)).astype(np.float32)
    by_k, by_p = fp.top_k_renorm(probs, ks), fp.top_p_renorm(probs, ps)
    for row, k, p, of_k, of_p in zip(probs, ks, ps, by_k, by_p, strict=True):
        check_row(row, of_k, {"top_k": int(k)}, from_probs=True)
        check_row(row, of_p, {"top_p": float(p)}, from_probs=True)
    assert np.array_equal(fp.top_k_renorm(probs, 9)[0], fp.top_k_renorm(probs[:1], 9)[0])
    in_place = probs.copy()
    fp.top_p_renorm(in_place, ps, out=in_place)
    assert np.array_equal(in_place, by_p)


def check_logprobs(rng, framework, size, dtype, options, from_probs=False, of="filtered", n=20):
    rows = rows_of(rng, size, dtype, from_probs)
    n = min(n, size)
    results = fp.sample(
        framework.tensor(rows),
        top_logprobs=n,
        logprobs_of=of,
        from_probs=from_probs,
        **options,
    )
    tokens, logprobs, top_ids, top_logprobs = (framework.array(x) for x in results)
    used = options if of == "filtered" else {}
    temperature = used.get("temperature") or 1.0
    kept = framework.array(fp.filtered_probs(framework.tensor(rows), from_probs=from_probs, **used))
    for i, row in enumerate(rows):
        x = row.astype(np.float64) + 0.0
        order = np.lexsort((np.arange(size), -x))[:n]
        with np.errstate(divide="ignore", over="ignore"):
            below = np.log(x) if from_probs else (x - x.max()) / temperature
        all_kept = kept[i] > 0
        exact = below - np.log(np.exp(below[all_kept]).sum())
        error = 2e-5 * (1 + np.abs(exact))
        assert abs(logprobs[i] - exact[tokens[i]]) <= error[tokens[i]]
        for token, logprob, wanted in zip(top_ids[i], top_logprobs[i], order, strict=True):
            if all_kept[wanted]:
                assert token == wanted
            if token == -1:
                assert logprob == -np.inf and not all_kept[wanted]
            else:
                assert token == wanted and abs(logprob - exact[token]) <= error[token]


@pytest.mark.parametrize("of", ["filtered", "raw"])
@pytest.mark.parametrize("name", FILTERS)
def test_logprobs(rng, name, of):
    for size in (1, 37, 3000):
        for dtype in DTYPES:
            check_logprobs(rng, NumPy(), size, dtype, FILTERS[name], of=of)


@pytest.mark.parametrize("of", ["filtered", "raw"])
@pytest.mark.parametrize("name", ["plain", "greedy", "k 5", "p 0.3", "min-p 1e-3"])
def test_logprobs_of_probabilities(rng, name, of):
    for size in (2, 1500):
        check_logprobs(rng, NumPy(), size, "float32", FILTERS[name], from_probs=True, of=of)


def test_filters_end_the_list(rng):
    logits = rng.standard_normal((3, 50)).astype(np.float32)
    _, _, ids, logprobs = fp.sample(logits, top_k=4, top_logprobs=9)
    assert np.array_equal(ids[:, :4], np.argsort(-logits, axis=1)[:, :4])
    assert (ids[:, 4:] == -1).all() and (logprobs[:, 4:] == -np.inf).all()
    assert np.isfinite(logprobs[:, :4]).all()


def test_raw_logprobs_know_no_bias(rng):
    logits = rng.standard_normal((5, 50)).astype(np.float32)
    bias = np.zeros(50, np.float32)
    bias[7] = 30
    tokens, logprobs, ids, top = fp.sample(
        logits, temperature=0.3, logit_bias=bias, logprobs_of="raw", top_logprobs=50
    )
    assert (tokens == 7).all()
    exact = np.log(fp.softmax(logits.astype(np.float32)))
    assert np.allclose(logprobs, exact[:, 7], atol=1e-5)
    assert np.allclose(top, np.take_along_axis(exact, ids, axis=1), atol=1e-5)
    _, alone = fp.sample(
        logits, temperature=0.3, logit_bias=bias, logprobs_of="raw", return_logprobs=True
    )
    assert np.array_equal(alone, logprobs)


def test_lists_of_chosen_rows_in_memory(rng):
    logits = rng.standard_normal((4, 300)).astype(np.float32)
    rows = np.array([3, 0, 3])
    wanted = fp.sample(logits[rows], top_k=20, top_logprobs=5, seed=3)
    memory = np.full((3, 9), -7, np.int32), np.full((3, 9), np.nan, np.float32)
    out = memory[0][:, :5], memory[1][:, 2:7]
    results = fp.sample(logits, rows=rows, top_k=20, top_logprobs=5, seed=3, top_out=out)
    assert results[2] is out[0] and results[3] is out[1]
    for actual, expected in zip(results, wanted, strict=True):
        assert np.array_equal(actual, expected)
    assert (memory[0][:, 5:] == -7).all() and np.isnan(memory[1][:, [0, 1, 7, 8]]).all()


def test_frameworks_give_the_same(rng, framework):
    logits = (3 * rng.standard_normal((6, 400))).astype("bfloat16")
    x = framework.tensor(logits)
    pairs = [
        (fp.filtered_probs(x, top_p=0.8), fp.filtered_probs(logits, top_p=0.8)),
        (fp.top_k_mask(x, 7), fp.top_k_mask(logits, 7)),
        *zip(fp.sample(x, top_logprobs=4), fp.sample(logits, top_logprobs=4), strict=True),
    ]
    for actual, expected in pairs:
        assert isinstance(actual, framework.tensor_type)
        assert np.array_equal(framework.array(actual), expected)


def test_no_requests():
    logits = np.zeros((0, 9), np.float32)
    assert fp.filtered_probs(logits).shape == (0, 9)
    assert fp.top_k_mask(logits, 2).shape == (0, 9)
    assert [x.shape for x in fp.sample(logits, top_logprobs=3)] == [(0,), (0,), (0, 3), (0, 3)]
