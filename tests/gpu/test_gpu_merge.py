# SPDX-License-Identifier: Apache-2.0
"""merge_states on the GPU against the reference, in memory full of NaN."""

import numpy as np
import pytest

import flashplan as fp
import poison
from frameworks import bits
from test_merge import DTYPES as MERGE_DTYPES
from test_merge import assert_merged, states
from test_nonfinite import assert_merges, assert_special_values, merges, special_values

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"


def on_gpu(cuda, *arrays):
    return [cuda.tensor(x) for x in arrays]


@pytest.mark.parametrize("dtype", MERGE_DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 17, 64, 65, 200])
@pytest.mark.parametrize("dim", [1, 33, 128])
def test_merge(cuda, dtype, count, dim):
    """Also of more states than one kernel's argument lists."""
    o, lse = states(count, dtype, (7, 3, dim))
    merged = fp.merge_states(*on_gpu(cuda, o, lse))
    assert_merged(o, lse, *(cuda.array(x) for x in merged))


@pytest.mark.parametrize("shape", [(1, 1, 8), (300, 5, 64), (2, 2, 2048), (3, 1, 1030)])
@pytest.mark.parametrize("dtype", MERGE_DTYPES)
def test_merge_of_two(cuda, dtype, shape):
    o, lse = states(2, dtype, shape)
    merged = fp.merge_states(*on_gpu(cuda, o[0], lse[0], o[1], lse[1]))
    assert_merged(o, lse, *(cuda.array(x) for x in merged))


@pytest.mark.parametrize("count", [1, 2, 5, 70])
def test_merge_to_base_2(cuda, count):
    o, lse = states(count, "bfloat16", (7, 3, 128))
    tensors = on_gpu(cuda, o, lse / np.float32(np.log(2)))
    merged_o, merged_lse = (cuda.array(x) for x in fp.merge_states(*tensors, base2=True))
    assert_merged(o, lse, merged_o, merged_lse * np.float32(np.log(2)))


def test_merge_of_no_tokens(cuda):
    o, lse = on_gpu(cuda, np.zeros((2, 0, 4, 8), np.float32), np.zeros((2, 0, 4), np.float32))
    merged_o, merged_lse = fp.merge_states(o, lse)
    assert merged_o.shape == (0, 4, 8)
    assert merged_lse.shape == (0, 4)


@pytest.mark.parametrize("into", [0, 1])
@pytest.mark.parametrize("shape", [(500, 4, 64), (100, 3, 1024), (50, 2, 3000), (700, 3, 33)])
def test_merge_in_place(cuda, shape, into):
    """Rows of one warp, of many and of several rounds: lse is read by all before it is written."""
    o, lse = states(2, "float32", shape)
    pairs = [on_gpu(cuda, o[i], lse[i]) for i in range(2)]
    fp.merge_states(*pairs[0], *pairs[1], out=pairs[into][0], lse=pairs[into][1])
    assert_merged(o, lse, *(cuda.array(x) for x in pairs[into]))


def test_merge_of_empty_states_that_hold_anything(cuda):
    for count in (2, 5, 70):
        o, lse = states(count)
        expected = [cuda.array(x) for x in fp.merge_states(*on_gpu(cuda, o, lse))]
        o[np.isneginf(lse)] = np.nan
        for actual, wanted in zip(fp.merge_states(*on_gpu(cuda, o, lse)), expected, strict=True):
            assert np.array_equal(bits(cuda.array(actual)), bits(wanted))


@pytest.mark.parametrize("dtype", MERGE_DTYPES)
@pytest.mark.parametrize("dim", [1, 64, 130])
def test_merge_of_nan_and_infinity(cuda, dtype, dim):
    """-inf in lse alone says that there are no keys; NaN and +inf stay, also of many states."""
    for o, lse, expected in merges(dtype, dim):
        merged = fp.merge_states(*on_gpu(cuda, o, lse))
        assert_merges(*(cuda.array(x) for x in merged), expected)
        many = [np.concatenate([x] + [x[-1:]] * 70) for x in (o, lse)]
        merged_o, merged_lse = (cuda.array(x) for x in fp.merge_states(*on_gpu(cuda, *many)))
        assert np.isnan(merged_lse).all() == np.isnan(expected)
        assert np.isneginf(merged_lse).all() == np.isneginf(expected)
        assert np.isnan(merged_o.astype(np.float32)).all() == np.isnan(expected)


@pytest.mark.parametrize("dtype", MERGE_DTYPES)
def test_merge_keeps_special_values(cuda, dtype):
    """In their dims of o, and nowhere else."""
    o, lse = special_values(dtype)
    merged = fp.merge_states(*on_gpu(cuda, o, lse))
    assert_special_values(o, lse, *(cuda.array(x) for x in merged))


def test_merge_left_to_right(cuda):
    """However many states are listed or stacked, the sum of each element is taken in order."""
    o, lse = states(70)
    lse[64:] = -np.inf
    listed = fp.merge_states(*on_gpu(cuda, o[:64], lse[:64]))
    stacked = fp.merge_states(*on_gpu(cuda, o, lse))
    for x, y in zip(listed, stacked, strict=True):
        assert np.array_equal(bits(cuda.array(x)), bits(cuda.array(y)))


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", MERGE_DTYPES)
@pytest.mark.parametrize("dim", [33, 64])
def test_merge_writes_into_out(cuda, dtype, strided, dim):
    o, lse = states(3, dtype, (7, 3, dim))
    canaries = [
        poison.Canary(o.shape[1:], dtype, strided),
        poison.Canary(lse.shape[1:], np.float32, strided),
    ]
    out, out_lse = on_gpu(cuda, *(canary.view for canary in canaries))
    fp.merge_states(*on_gpu(cuda, o, lse), out=out, lse=out_lse)
    for canary, tensor in zip(canaries, (out, out_lse), strict=True):
        cuda.fetch(canary.view, tensor)
        canary.assert_only_written(len(canary.view))
    assert_merged(o, lse, *(canary.view for canary in canaries))


def test_merge_in_a_graph(cuda, torch):
    o, lse = states(3, "bfloat16", (40, 4, 128))
    tensors = on_gpu(cuda, o, lse)
    out = fp.merge_states(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fp.merge_states(*tensors, out=out[0], lse=out[1])
    o, lse = states(3, "bfloat16", (40, 4, 128), seed=1)
    for tensor, array in zip(tensors, (o, lse), strict=True):
        tensor.copy_(cuda.tensor(array))
    graph.replay()
    torch.cuda.synchronize()
    assert_merged(o, lse, *(cuda.array(x) for x in out))
