# SPDX-License-Identifier: Apache-2.0
"""apply_rope against float64, in memory full of NaN."""

import copy
import dataclasses
import pickle

import ml_dtypes
import numpy as np
import pytest

import flashplan as fp
import rope_cases
from frameworks import NumPy, bits
from inputs import normal, poisoned
from poison import Canary
from rope_cases import ROPES, rotated

DTYPES = ("float32", "float16", "bfloat16")


def tokens(rng, shape, dtype, strided):
    x = poisoned(shape, dtype, strided)
    x[...] = normal(rng, shape, dtype)
    return x


def assert_close(actual, exact, dtype):
    error = np.abs(actual.astype(np.float64) - exact)
    allowed = 0.51 * float(ml_dtypes.finfo(dtype).eps) * np.abs(exact) + 4e-6
    assert (error <= allowed).all(), f"{(error / allowed).max():.3g} times the tolerance"


def check_rope(
    rng, rope, framework=None, dtype="float32", heads=(5, 2), dim=64, strided=False, count=19
):
    framework = framework or NumPy()
    q, k = (tokens(rng, (count, n, dim), dtype, strided) for n in heads)
    integer = np.int64 if strided else np.int32
    positions = rng.integers(0, 200_000, count).astype(integer)
    canaries = [Canary(x.shape, dtype, strided) for x in (q, k)]
    outs = [framework.tensor(canary.view) for canary in canaries]
    arguments = [framework.tensor(x) for x in (q, k, positions)]
    result = fp.apply_rope(*arguments, rope, out_q=outs[0], out_k=outs[1])
    assert result[0] is outs[0]
    assert result[1] is outs[1]
    for x, canary, out in zip((q, k), canaries, outs, strict=True):
        framework.fetch(canary.view, out)
        assert_close(canary.view, rotated(x, positions, rope), dtype)
        canary.assert_only_written(count)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROPES)
def test_rope(rng, name, dtype, strided):
    check_rope(rng, fp.Rope(**ROPES[name]), dtype=dtype, strided=strided)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [2, 6, 80, 576])
def test_head_dims(rng, dim, interleaved):
    rope = fp.Rope(interleaved=interleaved, rotary_dim=min(dim, 512))
    check_rope(rng, rope, dim=dim, heads=(3, 1))
    check_rope(rng, rope, dim=dim, heads=(3, 1), dtype="bfloat16")


def test_positions_of_any_size(rng):
    """Also where float32 can not count positions any more; negative ones turn back."""
    q, k = (normal(rng, (4, 2, 64), "float32") for _ in range(2))
    positions = np.array([2**31 - 1, 2**24 + 1, -5, 0], np.int64)
    rope = fp.Rope()
    for x, y in zip((q, k), fp.apply_rope(q, k, positions, rope), strict=True):
        assert_close(y, rotated(x, positions, rope), "float32")


def test_the_largest_positions(rng):
    """Against arithmetic with 64 bits: 2**40 times a frequency fills the 53 bits of float64."""
    q, k = (normal(rng, (3, 2, 64), "float32") for _ in range(2))
    positions = np.array([2**40, 2**40 - 1, -(2**40)])
    frequencies = np.longdouble(10_000) ** (-np.arange(32, dtype=np.longdouble) / 32)
    angles = (positions[:, None, None] * frequencies).astype(np.longdouble)
    a, b = q[..., :32], q[..., 32:]
    cos, sin = np.cos(angles), np.sin(angles)
    exact = np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    actual = fp.apply_rope(q, k, positions, fp.Rope())[0]
    assert np.abs(actual - exact).max() <= 1e-4 * np.abs(q).max() * 2


@pytest.mark.parametrize("name", ["plain", "interleaved", "partial"])
def test_in_place(rng, name):
    q, k = (normal(rng, (7, n, 64), "float16") for n in (4, 2))
    positions, rope = np.arange(7, dtype=np.int32), fp.Rope(**ROPES[name])
    wanted = fp.apply_rope(q, k, positions, rope)
    fp.apply_rope(q, k, positions, rope, out_q=q, out_k=k)
    for actual, expected in zip((q, k), wanted, strict=True):
        assert np.array_equal(bits(actual), bits(expected))


def table_of(rng, positions, rotary_dim):
    """Cosines and sines of random angles."""
    angles = rng.uniform(-np.pi, np.pi, (positions, rotary_dim // 2))
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def rotated_by_table(x, positions, table, interleaved):
    """In float64."""
    pairs = table.shape[1] // 2
    cos, sin = (
        t[positions][:, None].astype(np.float64) for t in (table[:, :pairs], table[:, pairs:])
    )
    y = x.astype(np.float64)
    first, second = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
        if interleaved
        else (slice(0, pairs), slice(pairs, 2 * pairs))
    )
    a, b = y[..., first].copy(), y[..., second].copy()
    y[..., first], y[..., second] = a * cos - b * sin, b * cos + a * sin
    return y


def check_table(rng, framework=None, dtype="float32", dim=64, rotary_dim=64, **options):
    """In place on heads of a packed row, and apart."""
    framework = framework or NumPy()
    interleaved, strided = options.get("interleaved", False), options.get("strided", False)
    q, k = (tokens(rng, (19, n, dim), dtype, strided) for n in (5, 2))
    memory = poisoned((40, rotary_dim), "float32", strided)
    memory[...] = table_of(rng, 40, rotary_dim)
    positions = rng.integers(0, 40, 19).astype(np.int64 if strided else np.int32)
    wanted = [rotated_by_table(x, positions, memory, interleaved) for x in (q, k)]
    given = [framework.tensor(x) for x in (q, k, positions)]
    table = framework.tensor(memory)
    apart = fp.apply_rope(*given, cos_sin_cache=table, interleaved=interleaved)
    for actual, exact in zip(apart, wanted, strict=True):
        assert_close(framework.array(actual), exact, dtype)
    result = fp.apply_rope(
        *given, cos_sin_cache=table, interleaved=interleaved, out_q=given[0], out_k=given[1]
    )
    for x, out, exact, same in zip((q, k), result, wanted, apart, strict=True):
        framework.fetch(x, out)
        assert_close(x, exact, dtype)
        assert np.array_equal(bits(np.ascontiguousarray(x)), bits(framework.array(same)))


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (80, 32), (6, 2), (576, 512)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_table(rng, dtype, dim, rotary_dim, interleaved, strided):
    check_table(rng, None, dtype, dim, rotary_dim, interleaved=interleaved, strided=strided)


def test_table_of_a_rope(rng):
    """A table of the cosines and sines of a Rope rotates as the Rope does."""
    q, k = (normal(rng, (9, n, 64), "float32") for n in (4, 2))
    positions = np.arange(9) * 3
    angles = positions.max() + 1
    angles = np.arange(angles)[:, None] * 10000.0 ** (-np.arange(32) / 32)
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    results = fp.apply_rope(q, k, positions, cos_sin_cache=table)
    for actual, wanted in zip(results, fp.apply_rope(q, k, positions, fp.Rope()), strict=True):
        assert np.abs(actual - wanted).max() < 1e-5


def test_frameworks_give_the_same_bits(rng, framework):
    q, k = (normal(rng, (7, n, 64), "bfloat16") for n in (4, 2))
    positions, rope = np.arange(7, dtype=np.int32), fp.Rope()
    wanted = fp.apply_rope(q, k, positions, rope)
    results = fp.apply_rope(*(framework.tensor(x) for x in (q, k, positions)), rope)
    for actual, expected in zip(results, wanted, strict=True):
        assert isinstance(actual, framework.tensor_type)
        assert np.array_equal(bits(framework.array(actual)), bits(expected))


def test_no_tokens():
    empty = np.zeros((0, 2, 8), np.float32)
    q, k = fp.apply_rope(empty, empty, np.zeros(0, np.int32), fp.Rope())
    assert q.shape == k.shape == (0, 2, 8)


@pytest.mark.parametrize("name", ROPES)
def test_a_rope_travels(name):
    """To workers, with the options of an Attention."""
    rope = fp.Rope(**ROPES[name])
    copies = [pickle.loads(pickle.dumps(rope)), copy.deepcopy(rope), dataclasses.replace(rope)]
    copies.append(fp.Rope(**dataclasses.asdict(rope)))
    q = np.random.default_rng(0).standard_normal((3, 2, rope.rotary_dim or 8)).astype(np.float32)
    expected, _ = fp.apply_rope(q, q, np.arange(3), rope)
    for other in copies:
        assert other == rope
        assert hash(other) == hash(rope)
        assert np.array_equal(fp.apply_rope(q, q, np.arange(3), other)[0], expected)


PARTIAL = {"rope_theta": 5e5, "partial_rotary_factor": 0.5}
CONFIGS = {
    "default": ({"rope_theta": 5e5}, {}),
    "partial": (PARTIAL, {}),
    "linear": ({"rope_type": "linear", "factor": 3.0}, {}),
    "dynamic": ({"rope_type": "dynamic", "factor": 3.0}, {"max_position_embeddings": 512}),
    "llama3": (
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {"max_position_embeddings": 131072},
    ),
    "yarn of gpt-oss": (
        {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        {"max_position_embeddings": 131072},
    ),
    "yarn of deepseek": (
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
            "original_max_position_embeddings": 4096,
        },
        {"max_position_embeddings": 163840},
    ),
    "longrope": (
        {
            "rope_type": "longrope",
            "short_factor": [1.0 + 0.05 * i for i in range(16)],
            "long_factor": [2.0 + 0.5 * i for i in range(16)],
            "original_max_position_embeddings": 4096,
        },
        {"max_position_embeddings": 131072},
    ),
}


@pytest.mark.parametrize("length", [None, 1000, 60000])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_rope_of_a_configuration(torch, transformers, name, length):
    """Frequencies and factor are those that transformers computes."""
    parameters, sizes = CONFIGS[name]
    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=4, rope_parameters=parameters, **sizes
    )
    rope = fp.Rope.from_config(config, length=length)
    assert rope.rotary_dim == (16 if name == "partial" else 32)
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        exponents = np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim
        expected, gain = 5e5**-exponents, 1.0
    else:
        functions = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS
        expected, gain = functions[kind](config, "cpu", seq_len=length)
        expected = expected.double().numpy()
    actual, factor = rope_cases.frequencies(rope, rope.rotary_dim)
    np.testing.assert_allclose(actual, expected, rtol=2e-6)
    assert factor == pytest.approx(gain, rel=1e-6)


def test_configurations_of_several_kinds_of_layers(transformers):
    config = transformers.Gemma3TextConfig()
    with pytest.raises(
        ValueError, match="^layer_type: expected one of .*'sliding_attention'.*None"
    ):
        fp.Rope.from_config(config)
    with pytest.raises(ValueError, match="^layer_type: expected one of .*, got 'local'"):
        fp.Rope.from_config(config, "local")
    assert fp.Rope.from_config(config, "sliding_attention").theta == 10000.0
    assert fp.Rope.from_config(config, "full_attention").theta == 1e6


def test_rotations_that_a_rope_can_not_express(transformers):
    config = transformers.LlamaConfig(
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    )
    with pytest.raises(fp.UnsupportedError, match="^config: expected one position .*mrope_section"):
        fp.Rope.from_config(config)
    config.rope_parameters = {"rope_type": "spiral", "rope_theta": 1e6, "factor": 2.0}
    with pytest.raises(fp.UnsupportedError, match="^config: expected rope_type .*, got 'spiral'"):
        fp.Rope.from_config(config)


def test_yarn_scales_nothing_if_all_dims_rotate_often(rng):
    """Pair 31 makes 8192 / (2 pi 2^(31/32)) rotations, more than beta_fast."""
    x = rng.standard_normal((5, 1, 64)).astype(np.float32)
    positions = np.arange(5, dtype=np.int32) * 1000
    yarn = fp.Rope(theta=2.0, scaling="yarn", scale=4.0, original_length=8192, attention_factor=1.0)
    q, k = fp.apply_rope(x, x, positions, yarn)
    plain, _ = fp.apply_rope(x, x, positions, fp.Rope(theta=2.0))
    assert np.array_equal(q, plain)
    assert np.array_equal(k, plain)
