# SPDX-License-Identifier: Apache-2.0
"""What filters keep, and log-probabilities, on the GPU: the CPU's, and the tests of the CPU."""

import numpy as np
import pytest

import flashplan as fp
import test_filters
from frameworks import bits
from sampling_cases import hard_rows
from test_filters import rows_of
from test_sampling import DTYPES, FILTERS, mixed

pytestmark = pytest.mark.gpu
VOCABULARIES = (1, 37, 8193, 50257, 128256, 262144)


@pytest.mark.parametrize("name", FILTERS)
def test_filtered_probs(cuda, rng, name):
    for size in (1, 5000, 20000):
        test_filters.check_filtered_probs(rng, cuda, size, "float32", FILTERS[name])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_the_cpu_s_bits(cuda, rng, vocab, dtype):
    for num_rows in (3, 140):
        if num_rows * vocab > 2**24:
            continue
        logits = (4 * rng.standard_normal((num_rows, vocab))).astype(dtype)
        options = mixed(rng, num_rows)
        del options["seed"], options["offset"]
        for joint in (False, True):
            tensors = {name: cuda.tensor(values) for name, values in options.items()}
            probs = fp.filtered_probs(cuda.tensor(logits), joint=joint, **tensors)
            wanted = fp.filtered_probs(logits, joint=joint, **options)
            assert np.array_equal(bits(cuda.array(probs)), bits(wanted))
        masked = fp.top_k_mask(cuda.tensor(logits), tensors["top_k"])
        wanted = fp.top_k_mask(logits, options["top_k"])
        assert np.array_equal(bits(cuda.array(masked)), bits(wanted))


@pytest.mark.parametrize("name", FILTERS)
def test_the_cpu_s_bits_of_hard_rows(cuda, rng, name):
    logits = hard_rows(rng, 128_256)
    x = cuda.tensor(logits)
    probs = fp.filtered_probs(x, **FILTERS[name])
    assert np.array_equal(bits(cuda.array(probs)), bits(fp.filtered_probs(logits, **FILTERS[name])))
    fp.filtered_probs(x, out=x, **FILTERS[name])
    assert np.array_equal(bits(cuda.array(x)), bits(cuda.array(probs)))


def test_renorms(cuda, rng):
    probs = rows_of(rng, 50_000, "float32", from_probs=True)
    ks = rng.integers(1, 50_000, len(probs)).astype(np.int32)
    ps = rng.uniform(0.05, 1, len(probs)).astype(np.float32)
    x = cuda.tensor(probs)
    for function, values in ((fp.top_k_renorm, ks), (fp.top_p_renorm, ps)):
        wanted = function(probs, values)
        assert np.array_equal(bits(cuda.array(function(x, cuda.tensor(values)))), bits(wanted))


@pytest.mark.parametrize("of", ["filtered", "raw"])
@pytest.mark.parametrize("name", FILTERS)
def test_logprobs(cuda, rng, name, of):
    for size, n in ((1, 1), (5000, 20), (60_000, 256)):
        test_filters.check_logprobs(rng, cuda, size, "float32", FILTERS[name], of=of, n=n)


@pytest.mark.parametrize("of", ["filtered", "raw"])
@pytest.mark.parametrize("num_rows", [2, 140])
def test_the_cpu_s_lists(cuda, rng, num_rows, of):
    logits = (4 * rng.standard_normal((num_rows, 128_256))).astype(np.float32)
    rows = rng.integers(0, num_rows, num_rows).astype(np.int32)
    options = mixed(rng, num_rows)
    tensors = {name: cuda.tensor(values) for name, values in options.items()}
    chosen = {"logprobs_of": of, "top_logprobs": 20}
    actual = fp.sample(cuda.tensor(logits), rows=cuda.tensor(rows), **tensors, **chosen)
    wanted = fp.sample(logits, rows=rows, **options, **chosen)
    for a, b in zip(actual, wanted, strict=True):
        a = cuda.array(a)
        assert np.array_equal(a, b) if a.dtype == np.int32 else np.allclose(a, b, 1e-6, 1e-6)


def test_rows_with_errors(cuda, torch, rng):
    logits = rng.standard_normal((6, 20_000)).astype(np.float32)
    logits[1, 19_000], logits[2, 3], logits[3] = np.nan, np.inf, -np.inf
    top_k = np.int32([9, 9, 9, 9, 0, 9])
    status = torch.full((6,), -7, dtype=torch.int32, device=cuda.device)
    x, k = cuda.tensor(logits), cuda.tensor(top_k)
    probs = cuda.array(fp.filtered_probs(x, top_k=k, status=status))
    assert status.tolist() == [0, 5, 5, 6, 2, 0]
    masked = cuda.array(fp.top_k_mask(x, k))
    results = fp.sample(x, top_k=k, top_logprobs=3)
    tokens, logprobs, ids, top = (cuda.array(y) for y in results)
    for row in (1, 2, 3, 4):
        assert np.isnan(probs[row]).all() and np.isnan(masked[row]).all()
        assert tokens[row] == -1 and np.isnan(logprobs[row])
        assert (ids[row] == -1).all() and np.isnan(top[row]).all()
    for row in (0, 5):
        assert np.array_equal(probs[row], fp.filtered_probs(logits[[row]], top_k=9)[0])
        assert np.isfinite(top[row]).all()


def test_graph(cuda, torch, rng):
    """The seed, the logits and the parameters are read at each replay."""
    logits = (3 * rng.standard_normal((4, 30_000))).astype(np.float32)
    x, seed = cuda.tensor(logits), torch.zeros(1, dtype=torch.int64, device=cuda.device)
    out = torch.empty(4, dtype=torch.int32, device=cuda.device)
    top = (
        torch.empty((4, 5), dtype=torch.int32, device=cuda.device),
        torch.empty((4, 5), dtype=torch.float32, device=cuda.device),
    )
    logprobs = torch.empty(4, dtype=torch.float32, device=cuda.device)
    options = {"top_p": 0.9, "top_logprobs": 5, "logprobs_of": "raw"}
    given = {"out": out, "logprobs": logprobs, "top_out": top, **options}
    fp.sample(x, seed=seed, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fp.sample(x, seed=seed, **given)
    for step in range(3):
        seed.fill_(step)
        graph.replay()
        wanted = fp.sample(logits, seed=step, **options)
        assert np.array_equal(cuda.array(out), wanted[0])
        assert np.array_equal(cuda.array(top[0]), wanted[2])
        assert np.allclose(cuda.array(logprobs), wanted[1], 1e-6, 1e-6)
