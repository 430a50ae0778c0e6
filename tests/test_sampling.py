# SPDX-License-Identifier: Apache-2.0
"""sample() and softmax() against float64."""

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import flashplan as fp
from frameworks import NumPy, bits
from sampling_cases import SETTINGS, chi_square, distribution, hard_rows, limit

DTYPES = ("float32", "float16", "bfloat16")
DRAWS = int(os.environ.get("FLASHPLAN_TEST_DRAWS", 1 << 18))
SEED_RANGE = (-(2**63), 2**63 - 1)


def seed_of(rng):
    return int(rng.integers(*SEED_RANGE))


def check_distribution(rng, framework, name, draws, size=100):
    """Of `draws` requests with the same logits, which read the same memory."""
    logits = (2 * rng.standard_normal((1, size))).astype(np.float32)
    exact = distribution(logits[0], **SETTINGS[name])
    row = framework.tensor(logits)
    rows = np.broadcast_to(row, (draws, size)) if row is logits else row.expand(draws, size)
    ids = framework.array(fp.sample(rows, seed=seed_of(rng), **SETTINGS[name]))
    assert chi_square(np.bincount(ids, minlength=size), exact) < limit(len(SETTINGS))


def check_filters(rng, framework, size, dtype, options, from_probs=False):
    """The token has a place in the filtered distribution, and the logprob says which."""
    largest = float(ml_dtypes.finfo(dtype).max)
    logits = hard_rows(rng, size)
    finite = np.isfinite(logits)
    logits[finite] = np.clip(logits[finite], -largest, largest)
    logits = logits.astype(dtype)
    if from_probs:
        with np.errstate(over="ignore", invalid="ignore"):
            x = np.exp(logits.astype(np.float64) - logits.astype(np.float64).max(1, keepdims=True))
        logits = (x / x.sum(1, keepdims=True)).astype(dtype)
    ids, logprobs = fp.sample(
        framework.tensor(logits),
        seed=seed_of(rng),
        return_logprobs=True,
        from_probs=from_probs,
        **options,
    )
    ids, logprobs = framework.array(ids), framework.array(logprobs)
    for row, token, logprob in zip(logits, ids, logprobs, strict=True):
        wide, narrow = (
            distribution(row, from_probs=from_probs, slack=slack, **options) for slack in (-1, 1)
        )
        assert wide[token] > 0, f"token {token} is none of the filtered ones"
        least = np.log(wide[token])
        most = least + np.log(narrow.max() / wide.max())
        rounding = 2**-28 * wide.max() / wide[token]  # of the token's weight
        error = 2e-5 * (1 + abs(logprob)) + rounding
        assert least - error < logprob < most + error


FILTERS = {
    "plain": {},
    "greedy": {"temperature": 0},
    "cold": {"temperature": 1e-30},
    "hot": {"temperature": 1e30},
    "k 1": {"top_k": 1},
    "k 5": {"top_k": 5},
    "k half": {"top_k": 300},
    "k all": {"top_k": 10**9},
    "p tiny": {"top_p": 1e-45},
    "p 0.3": {"top_p": 0.3},
    "p 0.8": {"top_p": 0.8},
    "p 0.999": {"top_p": 0.999},
    "min-p 1": {"min_p": 1.0},
    "min-p 1e-3": {"min_p": 1e-3},
    "all": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
    "joint": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "joint": True},
    "joint all": {"top_k": 300, "top_p": 0.6, "min_p": 0.01, "joint": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_distribution(rng, name):
    check_distribution(rng, NumPy(), name, DRAWS)


@pytest.mark.parametrize("from_probs", [False, True])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_distribution_over_blocks(rng, from_probs, top_p):
    """The values of some blocks of a draw without filters are far below those of others."""
    size = 6 * 768 + 100
    blocks = np.float32([-1, 0, -4, -0.5, -np.inf, -9, -2])[np.arange(size) // 768]
    logits = (rng.standard_normal(size) + blocks).astype(np.float32)
    exact = distribution(logits, top_p=top_p)
    row = distribution(logits).astype(np.float32) if from_probs else logits
    rows = np.broadcast_to(row, (1 << 17, size))
    ids = fp.sample(rows, seed=seed_of(rng), from_probs=from_probs, top_p=top_p)
    for i in range(7):  # blocks of little mass count too
        chosen = slice(768 * i, 768 * (i + 1))
        of_block = exact[chosen].sum()
        error = (ids // 768 == i).sum() - of_block * ids.size
        assert abs(error) <= 6 * np.sqrt(of_block * ids.size) + 6 * (of_block > 0)
    assert chi_square(np.bincount(ids, minlength=size), exact) < limit(len(SETTINGS))


def test_logprobs_over_blocks(rng):
    size = 20_000
    blocks = np.float32(3 * rng.standard_normal(27))[np.arange(size) // 768]
    logits = (rng.standard_normal((400, size)) + blocks).astype(np.float32)
    ids, logprobs = fp.sample(logits, temperature=1.5, seed=seed_of(rng), return_logprobs=True)
    for row, token, logprob in zip(logits, ids, logprobs, strict=True):
        exact = distribution(row, temperature=1.5)[token]
        assert abs(logprob - np.log(exact)) < 1e-5 * (1 + abs(logprob)) + 2**-28 / exact


def test_a_wrong_distribution_is_noticed(rng):
    """A temperature of 1.05 is not taken for 1."""
    logits = (2 * rng.standard_normal((1, 100))).astype(np.float32)
    rows = np.broadcast_to(logits, (1 << 18, 100))
    ids = fp.sample(rows, seed=seed_of(rng), temperature=1.05)
    assert chi_square(np.bincount(ids, minlength=100), distribution(logits[0])) > limit(1)


@pytest.mark.parametrize("name", FILTERS)
def test_filters(rng, name):
    for size in (1, 2, 37, 1024, 5000):
        for dtype in DTYPES:
            check_filters(rng, NumPy(), size, dtype, FILTERS[name])


@pytest.mark.parametrize("name", ["plain", "greedy", "k 5", "p 0.3", "min-p 1e-3"])
def test_filters_of_probabilities(rng, name):
    for size in (2, 1500):
        for dtype in ("float32", "float16"):
            check_filters(rng, NumPy(), size, dtype, FILTERS[name], from_probs=True)


def test_the_largest_values_come_after_many_equal_ones(rng):
    """More values reach the bound of a small top-k than are looked at one by one."""
    logits = np.zeros((8, 20_000), np.float32)
    logits[:, -30:] = 40
    ids = fp.sample(logits, top_k=100, seed=seed_of(rng))
    assert (ids >= 20_000 - 30).all()


def mixed(rng, batch):
    """Parameters of each request."""
    return {
        "temperature": rng.choice(np.float32([0, 0.5, 1, 2]), batch),
        "top_k": rng.choice(np.int32([1, 3, 40, 2**31 - 1]), batch),
        "top_p": rng.choice(np.float32([0.1, 0.9, 1]), batch),
        "min_p": rng.choice(np.float32([0, 0.05]), batch),
        "seed": rng.integers(*SEED_RANGE, batch),
        "offset": rng.integers(0, 2**40, batch),
    }


@pytest.mark.parametrize("size", [700, 3000])
def test_a_request_s_place_does_not_matter(rng, size):
    logits = (3 * rng.standard_normal((40, size))).astype(np.float32)
    options = mixed(rng, 40)
    for name, number in {"temperature": 1, "top_k": 2**31 - 1, "top_p": 1, "min_p": 0}.items():
        options[name][:10] = number  # without filters, beside others
    together = fp.sample(logits, **options)
    for i in range(40):
        alone = {name: values[i : i + 1] for name, values in options.items()}
        assert fp.sample(logits[i : i + 1], **alone)[0] == together[i]
        numbers = {name: values[i] for name, values in options.items()}
        assert fp.sample(logits[i : i + 1], **numbers)[0] == together[i]


def test_joint_top_p_counts_what_top_k_drops(rng):
    """Of five equal tokens, top-k keeps three, and top-p 0.5 three of five or two of three."""
    logits = np.zeros((2000, 5), np.float32)
    options = {"top_k": 3, "top_p": 0.5, "seed": seed_of(rng)}
    assert set(fp.sample(logits, joint=True, **options)) == {0, 1, 2}
    assert set(fp.sample(logits, **options)) == {0, 1}


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_rows(rng, dtype):
    """Each request draws from the row that it names, with parameters of its own."""
    logits = (3 * rng.standard_normal((6, 900))).astype(np.float32)
    bias = rng.standard_normal((6, 900)).astype(np.float32)
    rows = rng.integers(0, 6, 40).astype(dtype)
    options = mixed(rng, 40)
    wanted = fp.sample(logits[rows], logit_bias=bias[rows], **options)
    assert np.array_equal(fp.sample(logits, rows=rows, logit_bias=bias, **options), wanted)
    del options["seed"]
    wanted = fp.sample(logits[rows], seed=4, **options)
    assert np.array_equal(fp.sample(logits, rows=rows, seed=4, **options), wanted)
    assert fp.sample(logits, rows=rows[:0]).shape == (0,)


def test_errors_name_the_row_of_the_logits(rng):
    logits = rng.standard_normal((3, 50)).astype(np.float32)
    logits[2] = np.nan
    with pytest.raises(ValueError, match=r"^logits\[2\]: expected"):
        fp.sample(logits, rows=np.array([1, 2]))


def test_one_seed_in_memory(rng):
    """It is the seed for all, as a number is."""
    logits = np.zeros((50, 4096), np.float32)
    seed, offset = seed_of(rng), 77
    wanted = fp.sample(logits, seed=seed, offset=offset)
    ids = fp.sample(logits, seed=np.array([seed]), offset=np.array([offset]))
    assert np.array_equal(ids, wanted)
    assert len(set(ids)) > 25


def test_seeds_offsets_and_streams_are_independent(rng):
    """Of flat logits, so that equal numbers would give equal tokens."""
    flat = np.zeros((1000, 4096), np.float32)
    seed = seed_of(rng)
    draws = [
        fp.sample(flat, seed=seed),
        fp.sample(flat, seed=seed ^ 1),
        fp.sample(flat, seed=seed, offset=1),
        np.roll(fp.sample(flat, seed=seed), 1),
    ]
    assert np.array_equal(draws[0], fp.sample(flat, seed=seed))
    for i, a in enumerate(draws):
        for b in draws[:i]:
            assert (a == b).sum() < 15


def test_random_numbers_are_those_of_philox():
    """Seen through flat logits: the first number draws a block of ids, the second an id of it."""
    block_size = 768
    # The known answer for zeros, from the tests of Random123, the library by the authors of Philox.
    assert philox(0, 0, 0) == (0xE169C58D6627E8D5, 0x9B00DBD8BC57AC4C)

    def token(size, seed, offset, stream):
        first, second = philox(seed, offset, stream)
        block = (first * size >> 64) // block_size
        ids = min(block_size, size - block * block_size)
        return block * block_size + (second * ids >> 64)

    for size in (1 << 16, 7_000_000):
        flat = np.zeros((1, size), np.float32)
        for seed, offset in ((0, 0), (5, 9), (-1, 2**62 + 12345)):
            assert fp.sample(flat, seed=seed, offset=offset)[0] == token(size, seed, offset, 0)
        rows = np.broadcast_to(flat, (3, size))
        assert fp.sample(rows, seed=7)[2] == token(size, 7, 0, 2)


def philox(seed, offset, stream):
    mask = 0xFFFFFFFF
    c = [offset & mask, (offset >> 32) & mask, stream, 0]
    k = [seed & mask, (seed >> 32) & mask]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & mask, (a >> 32) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c[0] | c[1] << 32, c[2] | c[3] << 32


def test_bias(rng):
    logits = rng.standard_normal((20, 300)).astype(np.float32)
    bias = rng.standard_normal((20, 300)).astype(np.float32)
    bias[:, 7] = -np.inf
    options = {"top_p": 0.9, "seed": 3}
    wanted = fp.sample(logits + bias, **options)
    assert np.array_equal(fp.sample(logits, logit_bias=bias, **options), wanted)
    wanted = fp.sample(logits + bias[4], **options)
    assert np.array_equal(fp.sample(logits, logit_bias=bias[4], **options), wanted)
    assert 7 not in wanted


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_bias_is_not_called_a_logit(rng, value):
    logits = rng.standard_normal((3, 50)).astype(np.float32)
    bias = np.zeros((3, 50), np.float32)
    bias[1, 20] = value
    with pytest.raises(ValueError, match=r"^logit_bias: expected .* for row 1, got NaN or \+inf"):
        fp.sample(logits, logit_bias=bias)
    logits[2, 3] = np.nan
    with pytest.raises(ValueError, match=r"^logits\[2\]: expected"):
        fp.sample(logits, logit_bias=bias[0])


def test_outputs(rng):
    logits = rng.standard_normal((9, 64)).astype(np.float32)
    wanted, wanted_logprobs = fp.sample(logits, return_logprobs=True)
    memory = np.full((3, 9), -7, np.int32)
    logprobs, status = np.full(9, np.nan, np.float32), np.full(9, -7, np.int32)
    ids, same = fp.sample(logits, out=memory[1], logprobs=logprobs, status=status)
    assert np.array_equal(ids, wanted)
    assert same is logprobs
    assert np.array_equal(logprobs, wanted_logprobs)
    assert not status.any()
    assert (memory[::2] == -7).all()


def test_frameworks_give_the_same_ids(rng, framework):
    logits = (3 * rng.standard_normal((16, 1000))).astype("bfloat16")
    options = mixed(rng, 16)
    tensors = {
        name: values if framework.name == "jax" else framework.tensor(values)
        for name, values in options.items()
    }
    ids = fp.sample(framework.tensor(logits), **tensors)
    assert isinstance(ids, framework.tensor_type)
    assert np.array_equal(framework.array(ids), fp.sample(logits, **options))


def test_instruction_sets_give_the_same_ids():
    source = """
import numpy as np, flashplan as fp
x = (4 * np.random.default_rng(0).standard_normal((50, 3000))).astype(np.float32)
for o in {}, {"top_k": 30}, {"top_p": 0.9, "temperature": 0.7}, {"min_p": 0.01, "top_p": 0.8}:
    print(fp.sample(x, seed=1, **o).tolist())
"""
    outputs = set()
    for isa in ("avx512", "avx2", "baseline"):
        done = subprocess.run(
            [sys.executable, "-c", source],
            env=os.environ | {"FLASHPLAN_MAX_CPU_ISA": isa},
            capture_output=True,
            check=True,
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1


def check_softmax(rng, framework, batch, size, dtype, out_dtype, temperature):
    logits = (4 * rng.standard_normal((batch, size))).astype(dtype)
    x = logits.astype(np.float64) / np.reshape(temperature, (-1, 1))
    exact = np.exp(x - x.max(1, keepdims=True))
    exact /= exact.sum(1, keepdims=True)
    out = framework.tensor(np.full(logits.shape, np.nan, out_dtype))
    parameter = temperature
    if not isinstance(temperature, float):
        parameter = framework.tensor(temperature)
    assert fp.softmax(framework.tensor(logits), parameter, out) is out
    error = np.abs(framework.array(out).astype(np.float64) - exact)
    eps = 0.51 * float(ml_dtypes.finfo(out_dtype).eps)
    smallest = float(ml_dtypes.finfo(out_dtype).smallest_subnormal)
    assert (error <= (eps + 3e-5) * exact + max(smallest, 2e-38)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax(rng, dtype):
    for size in (1, 7, 256, 3001):
        check_softmax(rng, NumPy(), 5, size, dtype, "float32", 1.0)
        check_softmax(rng, NumPy(), 5, size, dtype, dtype, 0.5)
        each = np.array([0.3, 1, 2, 5, 100], np.float32)
        check_softmax(rng, NumPy(), 5, size, dtype, "float32", each)


def test_softmax_defaults(rng, framework):
    logits = rng.standard_normal((3, 50)).astype(np.float32)
    probabilities = fp.softmax(framework.tensor(logits))
    assert isinstance(probabilities, framework.tensor_type)
    assert np.array_equal(bits(framework.array(probabilities)), bits(fp.softmax(logits)))
    in_place = logits.copy()
    fp.softmax(in_place, out=in_place)
    assert np.array_equal(in_place, fp.softmax(logits))


def test_softmax_of_what_is_no_number():
    inf = np.inf
    rows = np.float32([[0, np.nan, 1], [-inf, -inf, -inf], [inf, 0, 0], [0, -inf, 0]])
    out = fp.softmax(rows)
    assert np.isnan(out[:3]).any(1).all()
    assert np.array_equal(out[3], [0.5, 0, 0.5])


def test_no_requests():
    logits = np.zeros((0, 9), np.float32)
    assert fp.sample(logits).shape == (0,)
    assert fp.softmax(logits).shape == (0, 9)


def test_differences_beyond_float32_weigh_nothing():
    """Even at a temperature that would bring them back."""
    logits = np.array([[3e38, -3e38]], np.float32)
    assert fp.softmax(logits, 1e38).tolist() == [[1, 0]]
    assert {int(fp.sample(logits, temperature=1e38, seed=seed)[0]) for seed in range(2000)} == {0}
