# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention over caches of 8 bits on a GPU, against a float64 reference on what
the caches hold. Memory that must not be read holds NaN."""

import dataclasses
import itertools

import ml_dtypes
import numpy as np
import pytest

import flashplan as fp
from frameworks import TorchCuda, bits
from gpu_cases import DEVICE
from gpu_mla_cases import assert_right, check_replays, is_served, options_of, run_on_gpu, shifted
from mla_cases import MlaCase, make_mla_inputs

pytestmark = pytest.mark.gpu

FORMATS = ("float8_e4m3fn", "fp8_ds_mla")


@pytest.fixture(autouse=True)
def hopper():
    for kv_dtype in FORMATS:
        if not is_served(MlaCase((1,), (1,), kv_dtype=kv_dtype)):
            pytest.skip(f"the GPU has no kernel for {kv_dtype}")


def all_combinations():
    """Each format with each number of heads, query tokens and keys, and in turn with the other
    axes. Tiles of 1, 2, 3 and more blocks of 64 keys, whole, cut and without keys."""
    axes = {
        "page_size": itertools.cycle((64, 16, 1, 128, 64, 24, None)),
        "num_ctas": itertools.cycle((None, 3, None, 40, 132)),
        "q_dtype": itertools.cycle(("bfloat16", "bfloat16", "float16")),
        "heads": itertools.cycle(("", "NHD", "", "HND")),
        "sinks": itertools.cycle((False, False, True, False)),
        "o_dtype": itertools.cycle((None, None, None, None, "float32")),
    }
    lens = ((64, 128, 192, 256), (1, 65, 130, 300), (640, 63, 0, 1000), (4097, 5))
    for kv_dtype, num_heads, tokens, kv_lens in itertools.product(
        FORMATS, (16, 64, 128, 96), (1, 2, 3, 4), lens
    ):
        case = MlaCase((tokens,) * len(kv_lens), kv_lens, num_heads, kv_dtype=kv_dtype)
        yield dataclasses.replace(case, **{name: next(values) for name, values in axes.items()})


PER_TENSOR = [
    MlaCase(qo, kv, heads, kv_dtype="float8_e4m3fn", k_scale=0.3, page_size=page_size, pairs=pairs)
    for qo, kv in (((1, 2), (700, 33)), ((3,), (4097,)))
    for heads in (16, 128)
    for page_size in (64, 1)
    for pairs in ("", "k", "qk")
]
CASES = [
    *all_combinations(),
    *PER_TENSOR,
    MlaCase((1, 4), (200, 130), dims=(512, 512), kv_dtype="float8_e4m3fn"),
    MlaCase((1, 4), (2000, 130), 128, dims=(512, 512), kv_dtype="float8_e4m3fn", page_size=1),
    MlaCase((4,), (300,), dims=(512, 512), kv_dtype="float8_e4m3fn", q_dtype="float16"),
    *(
        MlaCase(qo, kv, heads, planned_lens=planned, num_ctas=ctas, kv_dtype=kv_dtype)
        for qo, kv, planned in (
            ((1, 1), (3, 9000), (20000, 9100)),
            ((2, 1), (700, 0), (9000, 40)),
        )
        for heads in (128, 12)
        for ctas in (7, 132)
        for kv_dtype in FORMATS
    ),
    *(
        MlaCase((1, 2), (1000, 700), heads, gain=gain, kv_dtype=kv_dtype)
        for heads in (16, 128)
        for gain in (8.0, 40.0)
        for kv_dtype in FORMATS
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_mla_8bit(case, torch, seed):
    inputs = make_mla_inputs(case, seed)
    assert_right(case, inputs, *run_on_gpu(case, inputs, torch))


@pytest.mark.parametrize("scale", [0.25, 3.0])
@pytest.mark.parametrize("num_heads", [16, 128])
def test_k_scale_as_a_tensor(num_heads, scale, torch, seed):
    """It multiplies logits and, because values are keys, results, in tiles whole and cut."""
    case = MlaCase((1, 2), (3000, 33), num_heads, kv_dtype="float8_e4m3fn", num_ctas=9)
    inputs = make_mla_inputs(case, seed)
    k_scale = torch.tensor([scale], device=DEVICE)
    o, lse = run_on_gpu(case, inputs, torch, k_scale=k_scale)
    assert_right(dataclasses.replace(case, k_scale=scale), inputs, o, lse)


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("page_size", [64, 1])
def test_same_inputs_give_the_same_bits(kv_dtype, page_size, torch, seed):
    case = MlaCase(
        (1, 2, 1), (4097, 700, 90), 128, num_ctas=40, kv_dtype=kv_dtype, page_size=page_size
    )
    inputs = make_mla_inputs(case, seed)
    attn = fp.Attention(**options_of(case))
    first = run_on_gpu(case, inputs, torch, attn)
    for _ in range(20):
        for x, y in zip(run_on_gpu(case, inputs, torch, attn), first, strict=True):
            assert np.array_equal(bits(x), bits(y))


def test_one_tensor_or_two_give_the_same_bits(torch, seed):
    case = MlaCase((2, 1), (700, 33), num_ctas=3, kv_dtype="float8_e4m3fn")
    inputs = make_mla_inputs(case, seed)
    wanted = run_on_gpu(case, inputs, torch)
    for pairs, heads in (("q", "NHD"), ("k", ""), ("qk", "HND")):
        other = dataclasses.replace(case, pairs=pairs, heads=heads)
        for x, y in zip(run_on_gpu(other, inputs, torch), wanted, strict=True):
            assert np.array_equal(bits(x), bits(y)), (pairs, heads)


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_every_8_bit_float(kv_dtype, torch, seed):
    """Each dim has every 8-bit number once, and a query reads one dim. NaN (0x7f and 0xff) makes
    the results of its request NaN, and no others."""
    numbers = np.array([b for b in range(256) if b not in (0x7F, 0xFF)], np.uint8)
    case = MlaCase((1, 1), (254, 254), 16, kv_dtype=kv_dtype)
    inputs = make_mla_inputs(case, seed)
    keys = [np.array(inputs.keys[r]) for r in (0, 1)]
    for r in (0, 1):
        for d in range(512):
            keys[r].view(np.uint8)[:, d] = np.roll(numbers, d + r)
    inputs = make_mla_inputs(case, seed, keys)
    inputs.q[:2] = 0
    inputs.q[np.arange(2), :, 7 + np.arange(2)] = 0.03
    o, lse = run_on_gpu(case, inputs, torch)
    assert_right(case, inputs, o, lse)
    for byte in (0x7F, 0xFF):
        keys[0].view(np.uint8)[100, 300] = byte
        spoiled = make_mla_inputs(case, seed, keys)
        spoiled.q[:] = inputs.q
        spoiled_o, spoiled_lse = run_on_gpu(case, spoiled, torch)
        assert np.isnan(spoiled_o[0].astype(np.float32)).all()
        assert np.isnan(spoiled_lse[0]).all()
        assert np.array_equal(bits(spoiled_o[1]), bits(o[1]))


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_tensors_of_any_alignment(kv_dtype, torch, seed):
    """Rows that cannot be loaded 16 bytes at a time: the same bits, by another way."""
    case = MlaCase((1, 2), (300, 90), kv_dtype=kv_dtype)
    inputs = make_mla_inputs(case, seed)
    wanted = run_on_gpu(case, inputs, torch)
    framework = TorchCuda(torch)
    attn = fp.Attention(**options_of(case))
    attn.plan(inputs.qo_indptr, np.array(case.kv_lens, np.int32))
    q, cache = framework.tensor(inputs.q), framework.tensor(inputs.cache)
    table = framework.tensor(inputs.tables["block_table"])
    given = attn.run(q, shifted(torch, cache), block_table=table, return_lse=True)
    for x, y in zip(given, wanted, strict=True):
        assert np.array_equal(bits(framework.array(x)[:3]), bits(y))


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_pages_that_are_none_of_the_cache(kv_dtype, torch, seed):
    """Keys on such pages count as if they were hidden."""
    case = MlaCase((1,), (640,), kv_dtype=kv_dtype)
    inputs = make_mla_inputs(case, seed)
    inputs.tables["block_table"][0, 3] = 1 << 20
    kept = np.r_[0 : 3 * 64, 4 * 64 : 640]
    short = dataclasses.replace(case, kv_lens=(576,))
    wanted = dataclasses.replace(inputs, keys=[inputs.keys[0][kept]])
    assert_right(short, wanted, *run_on_gpu(case, inputs, torch))


def test_other_formats_are_refused():
    with pytest.raises(fp.UnsupportedError, match="kv_dtype: expected .*, got float8_e5m2"):
        fp.Attention(**options_of(MlaCase((1,), (1,), kv_dtype="float8_e5m2")))


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_replays_of_a_graph(kv_dtype, torch, seed):
    torch.manual_seed(seed)
    table = torch.randint(100, (8, 32), dtype=torch.int32, device=DEVICE)
    case = MlaCase((2,) * 8, (2048,) * 8, 128, kv_dtype=kv_dtype)
    check_replays(torch, case, seed, {"block_table": table})


def test_widened_keys_are_those_of_a_cache_of_q_dtype(torch, seed):
    """Every e4m3 number is a bfloat16, so a cache of bfloat16 with the same numbers gives the same
    bits. In one queue no tile is cut, although the caches' kernels have tiles of different rows."""
    case = MlaCase((1, 2), (900, 90), 128, num_ctas=1, kv_dtype="float8_e4m3fn")
    inputs = make_mla_inputs(case, seed)
    o, lse = run_on_gpu(case, inputs, torch)
    wide = dataclasses.replace(case, kv_dtype=None)
    keys = [rows.astype(np.float32).astype(ml_dtypes.bfloat16) for rows in inputs.keys]
    wide_inputs = make_mla_inputs(wide, seed, keys)
    wide_inputs.q[:] = inputs.q
    wide_o, wide_lse = run_on_gpu(wide, wide_inputs, torch)
    assert np.array_equal(bits(o), bits(wide_o))
    assert np.array_equal(bits(lse), bits(wide_lse))
