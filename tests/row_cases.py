# SPDX-License-Identifier: Apache-2.0
"""Norms and activations in float64, and the inputs and outputs that tests give them."""

import math

import ml_dtypes
import numpy as np

from frameworks import bits
from inputs import normal, poisoned
from poison import Canary

DTYPES = ("float32", "float16", "bfloat16")
# Rows for one warp, for one CTA, with several words per thread, and too long for registers; odd
# sizes.
SHAPES = [(5, 8), (3, 4, 64), (2, 3, 2, 127), (7, 1000), (1030, 96), (2, 4096), (2, 70001), (33,)]


def rmsnorm(x, weight, eps, gemma=False):
    x = x.astype(np.float64)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return x if weight is None else x * (weight.astype(np.float64) + gemma)


def layernorm(x, weight, bias, eps):
    x = x.astype(np.float64)
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    x = x if weight is None else x * weight.astype(np.float64)
    return x if bias is None else x + bias.astype(np.float64)


def gated(name, x, scale=1.0):
    x = x.astype(np.float64)
    gate, up = np.split(x, 2, -1)
    if name == "silu":
        half = 1 / (1 + np.exp(np.minimum(-gate, 700)))
    elif name == "gelu":
        half = np.vectorize(lambda z: 0.5 * math.erfc(-z / math.sqrt(2)), [float])(gate)
    else:
        u = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        half = 1 / (1 + np.exp(np.minimum(-2 * u, 700)))
    return gate * half * up / scale


def tolerance(exact, dtype):
    """The allowed error: half a unit in the last place of the result, and float32's errors."""
    return (0.51 * float(ml_dtypes.finfo(dtype).eps) + 1e-5) * np.abs(exact) + 1e-5


def rows(rng, shape, dtype, strided=False):
    """Random rows; if `strided`, with gaps of NaN between them."""
    if not strided or len(shape) == 1:
        return normal(rng, shape, dtype)
    x = poisoned(shape, dtype, strided=True)
    x[...] = normal(rng, shape, dtype)
    return x


def output(shape, dtype, strided=False):
    return Canary(shape if len(shape) > 1 else (1, *shape), dtype, strided)


def view(canary, shape):
    return canary.view if len(shape) > 1 else canary.view[0]


def assert_close(actual, exact, dtype):
    error = np.abs(actual.astype(np.float64) - exact)
    worst = (error / tolerance(exact, dtype)).max(initial=0.0)
    assert worst <= 1.0, f"error is {worst:.3g} times the tolerance"


def assert_same_bits(a, b):
    assert np.array_equal(bits(a), bits(b))
