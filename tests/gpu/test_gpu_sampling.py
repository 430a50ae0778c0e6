# SPDX-License-Identifier: Apache-2.0
"""sample() and softmax() on the GPU: the CPU's ids, and the tests of the CPU."""

import numpy as np
import pytest

import flashplan as fp
import test_sampling
from sampling_cases import SETTINGS, hard_rows
from test_sampling import DTYPES, FILTERS, mixed, seed_of

pytestmark = pytest.mark.gpu
VOCABULARIES = (1, 37, 5000, 8193, 32000, 50257, 128256, 262144)


@pytest.mark.parametrize("name", SETTINGS)
def test_distribution(cuda, rng, name):
    test_sampling.check_distribution(rng, cuda, name, 1 << 20)


@pytest.mark.parametrize("name", FILTERS)
def test_filters(cuda, rng, name):
    for size in (1, 37, 5000, 20000):
        for dtype in DTYPES:
            test_sampling.check_filters(rng, cuda, size, dtype, FILTERS[name])


@pytest.mark.parametrize("name", ["plain", "greedy", "k 5", "p 0.3", "min-p 1e-3"])
def test_filters_of_probabilities(cuda, rng, name):
    test_sampling.check_filters(rng, cuda, 1500, "float32", FILTERS[name], from_probs=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_the_cpu_s_ids(cuda, rng, vocab, dtype):
    logits = (4 * rng.standard_normal((24, vocab))).astype(dtype)
    options = mixed(rng, 24)
    tensors = {name: cuda.tensor(values) for name, values in options.items()}
    ids = cuda.array(fp.sample(cuda.tensor(logits), **tensors))
    assert np.array_equal(ids, fp.sample(logits, **options))
    bias = rng.standard_normal((24, vocab)).astype(np.float32)
    ids = cuda.array(fp.sample(cuda.tensor(logits), logit_bias=cuda.tensor(bias), **tensors))
    assert np.array_equal(ids, fp.sample(logits, logit_bias=bias, **options))


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("vocab", [1000, 128256])
def test_the_cpu_s_ids_of_hard_rows(cuda, rng, vocab, name):
    logits = hard_rows(rng, vocab)
    seed = seed_of(rng)
    ids = cuda.array(fp.sample(cuda.tensor(logits), seed=seed, **FILTERS[name]))
    assert np.array_equal(ids, fp.sample(logits, seed=seed, **FILTERS[name]))


def test_any_batch(cuda, rng):
    """Of many requests, each has fewer CTAs than of few."""
    logits = (4 * rng.standard_normal((60, 100_000))).astype(np.float32)
    options = mixed(rng, 60)
    together = fp.sample(logits, **options)
    x = cuda.tensor(logits)
    for first, last in ((0, 60), (3, 4), (40, 60)):
        tensors = {name: cuda.tensor(values[first:last]) for name, values in options.items()}
        ids = cuda.array(fp.sample(x[first:last], **tensors))
        assert np.array_equal(ids, together[first:last])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*FILTERS, "mixed"])
def test_many_rows(cuda, rng, name, dtype):
    """With at least one row per SM, one CTA reads each row and does not hold it."""
    rows = np.concatenate([hard_rows(rng, 30_011) for _ in range(13)])[:140]
    assert len(rows) == 140
    bias = rng.standard_normal((140, 30_011)).astype(np.float32)
    if dtype == "float16":
        rows = np.where(np.isfinite(rows), rows.clip(-6e4, 6e4), rows)
    logits, options = rows.astype(dtype), FILTERS.get(name) or mixed(rng, 140)
    options = {"seed": seed_of(rng), **options}
    tensors = {
        name: cuda.tensor(value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }
    # The first rows are on words of 16 bytes, those of 30,011 elements are not.
    for x, more in ((logits[:, :30_008], None), (logits, None), (logits, bias)):
        x = np.ascontiguousarray(x)
        wanted = fp.sample(x, logit_bias=more, **options)
        more = None if more is None else cuda.tensor(more)
        ids = cuda.array(fp.sample(cuda.tensor(x), logit_bias=more, **tensors))
        assert np.array_equal(ids, wanted)


@pytest.mark.parametrize("num_rows", [3, 140])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_rows(cuda, rng, dtype, num_rows):
    logits = (4 * rng.standard_normal((num_rows, 30_000))).astype(np.float32)
    bias = rng.standard_normal(logits.shape).astype(np.float32)
    rows = rng.integers(0, num_rows, 150).astype(dtype)
    for options in ({}, {"top_k": 40}, {"top_p": 0.9}, mixed(rng, 150)):
        tensors = {
            name: cuda.tensor(value) if isinstance(value, np.ndarray) else value
            for name, value in options.items()
        }
        for more in (None, bias):
            wanted = fp.sample(logits, rows=rows, logit_bias=more, **options)
            more = None if more is None else cuda.tensor(more)
            x, chosen = cuda.tensor(logits), cuda.tensor(rows)
            ids = fp.sample(x, rows=chosen, logit_bias=more, **tensors)
            assert np.array_equal(cuda.array(ids), wanted)


def test_rows_that_do_not_exist(cuda, torch, rng):
    logits = rng.standard_normal((4, 30_000)).astype(np.float32)
    rows = cuda.tensor(np.array([0, 4, -1, 3, 2**40]))
    status = torch.full((5,), -7, dtype=torch.int32, device=cuda.device)
    for options in ({}, {"top_k": 9}, {"top_p": 0.9}, {"temperature": 0}):
        ids = fp.sample(cuda.tensor(logits), rows=rows, status=status, **options).tolist()
        assert status.tolist() == [0, 9, 9, 0, 9]
        assert [i >= 0 for i in ids] == [True, False, False, True, False]


def test_one_seed_in_memory(cuda, rng):
    logits = rng.standard_normal((50, 5000)).astype(np.float32)
    wanted = fp.sample(logits, seed=5, offset=6)
    seed, offset = (cuda.tensor(np.array([n])) for n in (5, 6))
    ids = fp.sample(cuda.tensor(logits), seed=seed, offset=offset)
    assert np.array_equal(cuda.array(ids), wanted)


@pytest.mark.parametrize("deviation", [1, 3, 8])
@pytest.mark.parametrize("num_rows", [1, 32, 140])
@pytest.mark.parametrize("num_masked", [0, 20_000])
def test_the_cpu_s_logprobs(cuda, rng, num_masked, num_rows, deviation):
    logits = (15 + deviation * rng.standard_normal((num_rows, 128_256))).astype(np.float32)
    logits[:, :num_masked] = -np.inf
    top_p = rng.uniform(0.7, 1, num_rows).astype(np.float32)
    top_p[num_rows // 2] = 0.9995
    seed = seed_of(rng)
    options = {"seed": seed, "return_logprobs": True}
    ids, logprobs = fp.sample(cuda.tensor(logits), top_p=cuda.tensor(top_p), **options)
    wanted, of_wanted = fp.sample(logits, top_p=top_p, **options)
    assert np.array_equal(cuda.array(ids), wanted)
    assert np.abs(cuda.array(logprobs) - of_wanted).max() < 1e-5


# Rows with these top-p are in one batch. 1 keeps all tokens. For 0.001 the kernel finds the
# threshold of top-p before it draws; for the others it draws first.
TOP_PS = np.float32([0.9, 0.7, 0.95, 1, 0.1, 0.999, 0.45, 0.01, 0.001])


@pytest.mark.parametrize("from_probs", [False, True])
@pytest.mark.parametrize("deviation", [0, 0.02, 0.5, 2, 8])
@pytest.mark.parametrize("num_rows", [20, 140])  # of 20 rows, each has four CTAs
def test_top_p_of_each_row(cuda, rng, num_rows, deviation, from_probs):
    logits = (deviation * rng.standard_normal((num_rows, 128_256))).astype(np.float32)
    arrays = {"top_p": np.resize(TOP_PS, num_rows), "seed": rng.integers(0, 1 << 40, num_rows)}
    if from_probs:
        logits = fp.softmax(logits)
    else:
        arrays["temperature"] = np.resize(np.float32([0.7, 1, 0, 1.3, 1]), num_rows)
    tensors = {name: cuda.tensor(value) for name, value in arrays.items()}
    options = {"from_probs": from_probs}
    for has_logprobs in (False, True):
        options["return_logprobs"] = has_logprobs
        wanted = fp.sample(logits, **arrays, **options)
        results = fp.sample(cuda.tensor(logits), **tensors, **options)
        if not has_logprobs:
            assert np.array_equal(cuda.array(results), wanted)
            continue
        assert np.array_equal(cuda.array(results[0]), wanted[0])
        assert np.abs(cuda.array(results[1]) - wanted[1]).max() < 1e-5


@pytest.mark.parametrize("deviation", [0.02, 1, 8])
def test_large_top_k_of_many_rows(cuda, rng, deviation):
    logits = (deviation * rng.standard_normal((140, 40_000))).astype(np.float32)
    for top_k in (129, 1000, 20_000):
        options = {"top_k": top_k, "seed": seed_of(rng), "return_logprobs": True}
        ids, logprobs = fp.sample(cuda.tensor(logits), **options)
        wanted, of_wanted = fp.sample(logits, **options)
        assert np.array_equal(cuda.array(ids), wanted)
        assert np.abs(cuda.array(logprobs) - of_wanted).max() < 1e-5


def test_errors_of_many_rows(cuda, torch, rng):
    logits = rng.standard_normal((150, 30_000)).astype(np.float32)
    logits[1, 29_000], logits[2, 3], logits[3] = np.nan, np.inf, -np.inf
    status = torch.full((150,), -7, dtype=torch.int32, device=cuda.device)
    for options in ({"top_k": 9}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0}):
        status.fill_(-7)
        ids, logprobs = fp.sample(
            cuda.tensor(logits), status=status, return_logprobs=True, **options
        )
        assert status.tolist() == [0, 5, 5, 6] + [0] * 146
        ids, logprobs = cuda.array(ids), cuda.array(logprobs)
        others = np.delete(np.arange(150), [1, 2, 3])
        wanted, of_wanted = fp.sample(logits[:1], return_logprobs=True, **options)
        assert (ids[[1, 2, 3]] == -1).all() and np.isnan(logprobs[[1, 2, 3]]).all()
        assert ids[0] == wanted[0] and abs(logprobs[0] - of_wanted[0]) < 1e-5
        assert (ids[others] >= 0).all() and np.isfinite(logprobs[others]).all()


def test_rows_with_errors(cuda, torch, rng):
    logits = rng.standard_normal((8, 20000)).astype(np.float32)
    logits[1, 19000], logits[2, 3], logits[3] = np.nan, np.inf, -np.inf
    parameters = {
        "temperature": np.float32([1, 1, 1, 1, np.nan, 1, 1, 1]),
        "top_k": np.int32([9, 9, 9, 9, 9, 0, 9, 9]),
        "top_p": np.float32([1, 1, 1, 1, 1, 1, 1.5, 1]),
        "min_p": np.float32([0, 0, 0, 0, 0, 0, 0, -1]),
    }
    status = torch.full((8,), -7, dtype=torch.int32, device=cuda.device)
    ids, logprobs = fp.sample(
        cuda.tensor(logits),
        **{name: cuda.tensor(values) for name, values in parameters.items()},
        status=status,
        return_logprobs=True,
    )
    assert status.tolist() == [0, 5, 5, 6, 1, 2, 3, 4]
    ids, logprobs = cuda.array(ids), cuda.array(logprobs)
    assert ids[0] == fp.sample(logits[:1], top_k=9)[0]
    assert (ids[1:] == -1).all()
    assert np.isfinite(logprobs[0])
    assert np.isnan(logprobs[1:]).all()


def test_probabilities_with_errors(cuda, torch):
    rows = np.full((4, 10000), 1e-4, np.float32)
    rows[1] *= 0.5
    rows[2, :2] = -1e-4, 3e-4
    rows[3, 5] = np.nan
    status = torch.full((4,), -7, dtype=torch.int32, device=cuda.device)
    ids = fp.sample(cuda.tensor(rows), from_probs=True, status=status)
    assert status.tolist() == [0, 7, 7, 5]
    assert ids[0] == fp.sample(rows[:1], from_probs=True)[0]
    assert ids[1:].tolist() == [-1] * 3


def test_graph(cuda, torch, rng):
    """Seeds and offsets are read at each replay."""
    logits = rng.standard_normal((6, 30000)).astype(np.float32)
    x = cuda.tensor(logits)
    seeds = torch.arange(6, device=cuda.device)
    offsets, out = torch.zeros_like(seeds), torch.empty(6, dtype=torch.int32, device=cuda.device)
    fp.sample(x, seed=seeds, offset=offsets, top_p=0.9, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fp.sample(x, seed=seeds, offset=offsets, top_p=0.9, out=out)
    for step in range(3):
        offsets.fill_(step)
        graph.replay()
        wanted = fp.sample(logits, seed=np.arange(6), offset=step, top_p=0.9)
        assert out.tolist() == wanted.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [*VOCABULARIES[:-1], 40_003, 151_936])  # the last: 3, 10 CTAs
def test_softmax(cuda, rng, vocab, dtype):
    each = np.array([0.3, 1, 2, 5, 100], np.float32)
    test_sampling.check_softmax(rng, cuda, 5, vocab, dtype, "float32", 1.0)
    test_sampling.check_softmax(rng, cuda, 5, vocab, dtype, dtype, 0.5)
    test_sampling.check_softmax(rng, cuda, 5, vocab, dtype, "float32", each)


def test_softmax_in_place(cuda, rng):
    for vocab in (1000, 300_000):
        x = cuda.tensor(rng.standard_normal((3, vocab)).astype(np.float32))
        wanted = fp.softmax(x)
        assert (fp.softmax(x, out=x) == wanted).all()


def test_gpu_frameworks(gpu_framework, rng):
    logits = rng.standard_normal((6, 1000)).astype(np.float32)
    ids = fp.sample(gpu_framework.tensor(logits), seed=4, top_k=20)
    assert isinstance(ids, gpu_framework.tensor_type)
    assert np.array_equal(gpu_framework.array(ids), fp.sample(logits, seed=4, top_k=20))
