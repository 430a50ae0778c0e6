# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings that tests run, and the rotation in float64."""

import functools
import math

import numpy as np

import flashplan as fp

LLAMA3 = {"theta": 5e5, "scale": 8.0, "scaling": "llama3", "original_length": 8192}
YARN = {"theta": 1e6, "scale": 4.0, "scaling": "yarn", "original_length": 32768}
ROPES = {
    "plain": {},
    "interleaved": {"interleaved": True},
    "partial": {"rotary_dim": 32},
    "partial interleaved": {"rotary_dim": 6, "interleaved": True},
    "scaled": {"theta": 500.0, "scale": 2.5},
    "llama3": LLAMA3,
    "llama3 factors": LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 9.0},
    "yarn": YARN,
    "yarn interleaved": YARN | {"interleaved": True, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn factor": YARN | {"attention_factor": 0.7},
    "yarn not rounded": YARN | {"truncate": False},
    "yarn mscale": YARN | {"mscale": 1.3, "mscale_all_dim": 0.4},
    "frequencies": {
        "rotary_dim": 8,
        "frequencies": [2.5, 0.3, 0.0, 1e-5],
        "attention_factor": 1.2,
    },
}


def frequencies(rope, dim):
    """As transformers computes them, in float64; and the factor of cos and sin."""
    if rope.frequencies is not None:
        return np.array(rope.frequencies), rope.attention_factor or 1.0
    i = np.arange(0, dim, 2)
    plain = 1 / rope.theta ** (i / dim)
    if rope.scaling == "linear":
        return plain / rope.scale, 1.0
    if rope.scaling == "llama3":
        wavelength = 2 * math.pi / plain
        low = rope.original_length / rope.low_freq_factor
        high = rope.original_length / rope.high_freq_factor
        smooth = (rope.original_length / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        middle = (1 - smooth) * plain / rope.scale + smooth * plain
        scaled = np.where(wavelength > low, plain / rope.scale, plain)
        return np.where((wavelength <= low) & (wavelength >= high), middle, scaled), 1.0

    def correction(rotations):
        length = rope.original_length / (rotations * 2 * math.pi)
        return dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = correction(rope.beta_fast), correction(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    factor = rope.attention_factor or 0.1 * math.log(rope.scale) + 1
    if rope.mscale is not None:
        factors = [0.1 * m * math.log(rope.scale) + 1 for m in (rope.mscale, rope.mscale_all_dim)]
        factor = factors[0] / factors[1]
    return plain / rope.scale * ramp + plain * (1 - ramp), factor


def rotated(x, positions, rope):
    x = x.astype(np.float64)
    dim = rope.rotary_dim or x.shape[-1]
    turns, factor = frequencies(rope, dim)
    angles = positions.astype(np.float64)[:, None, None] * turns
    cos, sin = factor * np.cos(angles), factor * np.sin(angles)
    first, second = np.arange(0, dim, 2), np.arange(1, dim, 2)
    if not rope.interleaved:
        first, second = np.arange(dim // 2), np.arange(dim // 2, dim)
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def rotation(name):
    """(x [tokens, heads, dim], positions) -> x rotated, of the rope with this name."""
    return functools.partial(rotated, rope=fp.Rope(**ROPES[name]))
