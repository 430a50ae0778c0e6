# SPDX-License-Identifier: Apache-2.0
"""Sampling in float64, and logits that are hard to filter."""

import math

import numpy as np

# One false alarm in a million runs, over all tests of distributions together.
FALSE_ALARMS = 1e-6
SETTINGS = {
    "plain": {},
    "hot": {"temperature": 2.5},
    "cold": {"temperature": 0.6},
    "top-k": {"top_k": 7},
    "top-k 2": {"top_k": 2},
    "top-p": {"top_p": 0.7},
    "top-p 0.4": {"top_p": 0.4},  # which drops most tries
    "small top-p": {"top_p": 0.3},
    "min-p": {"min_p": 0.1},
    "all": {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    "joint": {"top_k": 12, "top_p": 0.8, "min_p": 0.01, "joint": True},
}
# Relative error of a mass, by exponents in float32 and weights of 30 bits.
SLACK = 3e-6


def distribution(
    logits,
    temperature=1.0,
    top_k=None,
    top_p=1.0,
    min_p=0.0,
    from_probs=False,
    joint=False,
    slack=0,
):
    """The filtered distribution of one row. slack -1 or 1 moves each cut by a rounding error."""
    x = np.asarray(logits, np.float64)
    order = np.lexsort((np.arange(x.size), -x))  # equal values by id
    if temperature == 0:
        one_hot = np.zeros(x.size)
        one_hot[order[0]] = 1
        return one_hot
    p = x.copy() if from_probs else np.exp((x - x[order[0]]) / temperature)
    mass = np.cumsum(p[order] / p.sum())
    p[order[top_k or x.size :]] = 0
    p[p < min(min_p * (1 + slack * SLACK), 1) * p.max()] = 0
    p /= p.sum()
    if top_p < 1:
        mass = mass if joint else np.cumsum(p[order])
        p[order[np.searchsorted(mass, top_p - slack * SLACK) + 1 :]] = 0
    return p / p.sum()


def chi_square(counts, probabilities):
    """How many standard deviations chi-square is too large (Wilson and Hilferty)."""
    n = counts.sum()
    expected = n * probabilities
    assert counts[probabilities == 0].sum() == 0, "a token was drawn that the filters drop"
    rare = expected < 20
    # Tokens that are expected less than 20 times are counted as one token.
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    value = ((counts - expected) ** 2 / np.maximum(expected, 1e-300)).sum()
    freedom = max((expected > 0).sum() - 1, 1)
    return ((value / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom))


def limit(num_tests):
    """How many standard deviations a chi-square test may be off, if there are `num_tests`."""
    low, high = 0.0, 40.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        chance = 0.5 * math.erfc(middle / math.sqrt(2))
        low, high = (middle, high) if chance > FALSE_ALARMS / num_tests else (low, middle)
    return high


def hard_rows(rng, size):
    """Ties at every cut, neighbours in float32, one-hot, flat, denormal, huge, mostly -inf."""
    normal = rng.standard_normal(size)
    near = np.float32(1.5) + np.spacing(np.float32(1.5)) * rng.integers(-3, 4, size)
    one_hot = np.full(size, -np.inf)
    one_hot[size // 3] = -5.0
    few = np.where(rng.random(size) < 0.9, -np.inf, normal)
    few[size // 2] = 0.0
    rows = [
        normal,
        8 * normal,
        np.round(normal),  # ties
        near,
        one_hot,
        np.zeros(size),
        np.where(rng.random(size) < 0.5, 0.0, -0.0),
        1e-42 * normal,
        few,
        np.where(np.arange(size) < size // 2, -np.inf, normal),
        np.sort(3 * normal),
        1e30 * normal,
        np.linspace(-40, 0, size),
    ]
    return np.array(rows, np.float32)
