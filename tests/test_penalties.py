# SPDX-License-Identifier: Apache-2.0
"""apply_penalties() against float64."""

import ml_dtypes
import numpy as np
import pytest

import flashplan as fp
from frameworks import NumPy, bits
from poison import Canary

DTYPES = ("float32", "float16", "bfloat16")


@pytest.fixture
def rng(seed):
    return np.random.default_rng(seed)


def penalised(logits, history, lens, repetition, presence, frequency):
    result = logits.astype(np.float64)
    numbers = np.broadcast_arrays(repetition, presence, frequency, lens)[:3]
    for row, tokens, n, rep, pres, freq in zip(result, history, lens, *numbers, strict=True):
        ids, counts = np.unique(tokens[:n], return_counts=True)
        x = row[ids]
        row[ids] = np.where(x > 0, x / rep, x * rep) - freq * counts - pres
    return result


def problem(rng, batch, vocab, max_len, dtype, integer=np.int64, strided=False):
    """Logits in memory full of NaN; entries of history that do not count are no tokens."""
    canary = Canary((batch, vocab), dtype, strided)
    canary.view[...] = (3 * rng.standard_normal((batch, vocab))).astype(dtype)
    canary.view[:, rng.integers(vocab)] = -np.inf
    history = rng.integers(0, vocab, (batch, max_len)).astype(integer)
    few = rng.random(batch) < 0.5
    history[few] = history[few] % 3 % vocab  # which occur often
    lens = rng.integers(0, max_len + 1, batch).astype(np.int32)
    for row, n in zip(history, lens, strict=True):
        row[n:] = np.iinfo(integer).max
    return canary, history, lens


def check(rng, framework, batch, vocab, max_len, dtype, numbers, **options):
    canary, history, lens = problem(rng, batch, vocab, max_len, dtype, **options)
    before = canary.view.copy()
    exact = penalised(before, history, lens, *numbers)
    logits = framework.tensor(canary.view)
    given = [framework.tensor(x) if isinstance(x, np.ndarray) else x for x in numbers]
    tokens = [framework.tensor(x) for x in (history, lens)]
    assert fp.apply_penalties(logits, *tokens, *given) is None
    framework.fetch(canary.view, logits)
    actual = canary.view.astype(np.float64)
    rounding = 0.51 * float(ml_dtypes.finfo(dtype).eps)
    float32 = 2 * float(np.finfo(np.float32).eps)  # of each of three operations
    finite = np.isfinite(exact)
    assert np.array_equal(actual[~finite], exact[~finite])
    error = np.abs(actual[finite] - exact[finite])
    assert (error <= (rounding + float32) * np.abs(exact[finite]) + 2e-5).all()
    for row, old, own, n in zip(canary.view, before, history, lens, strict=True):
        others = np.setdiff1d(np.arange(vocab), own[:n])
        assert np.array_equal(bits(row[others]), bits(old[others]))
    canary.assert_only_written(batch)


def each(rng, batch):
    return [
        rng.uniform(0.5, 2, batch).astype(np.float32),
        rng.uniform(-1, 1, batch).astype(np.float32),
        rng.uniform(-1, 1, batch).astype(np.float32),
    ]


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_penalties(rng, dtype, strided):
    for integer in (np.int32, np.int64):
        for batch, vocab, max_len in ((1, 1, 5), (7, 100, 0), (5, 300, 900), (9, 20000, 50)):
            options = {"integer": integer, "strided": strided}
            sizes = (batch, vocab, max_len, dtype)
            check(rng, NumPy(), *sizes, (1.3, 0.5, 0.25), **options)
            check(rng, NumPy(), *sizes, each(rng, batch), **options)


def test_many_tokens(rng):
    """Shared out to threads, whose counters serve several requests."""
    check(rng, NumPy(), 100, 500, 20_000, "float32", each(rng, 100))


def test_defaults_change_nothing(rng):
    canary, history, lens = problem(rng, 4, 50, 20, "float32")
    before = canary.view.copy()
    fp.apply_penalties(canary.view, history, lens)
    assert np.array_equal(canary.view, before)
    fp.apply_penalties(canary.view, history, lens, None, None, 0.5)
    exact = penalised(before, history, lens, 1, 0, 0.5)
    np.testing.assert_allclose(canary.view, exact, rtol=1e-6)


def test_frameworks_give_the_same_bits(rng, framework):
    canary, history, lens = problem(rng, 6, 200, 30, "bfloat16")
    wanted = canary.view.copy()
    tensors = [framework.tensor(x) for x in (history.astype(np.int32), lens)]
    numbers = each(rng, 6)
    fp.apply_penalties(wanted, history, lens, *numbers)
    logits = framework.tensor(canary.view.copy()) if framework.writable else canary.view
    fp.apply_penalties(logits, *tensors, *(framework.tensor(x) for x in numbers))
    actual = framework.array(logits) if framework.writable else logits
    assert np.array_equal(bits(actual), bits(wanted))


def test_nothing_to_do():
    none = np.zeros((0, 9), np.float32)
    fp.apply_penalties(none, np.zeros((0, 4), np.int32), np.zeros(0, np.int32), 2.0)
    logits = np.ones((2, 9), np.float32)
    fp.apply_penalties(logits, np.zeros((2, 0), np.int32), np.zeros(2, np.int32), 2.0)
    assert (logits == 1).all()
