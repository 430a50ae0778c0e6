# SPDX-License-Identifier: Apache-2.0
"""Bits with FlashInfer's names, against NumPy."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flashplan import flashinfer  # noqa: E402


@pytest.mark.parametrize("order", ["big", "little"])
@pytest.mark.parametrize("size", [0, 1, 8, 77])
def test_packbits(order, size):
    x = torch.rand(size) < 0.5
    expected = np.packbits(x.numpy(), bitorder=order)
    assert np.array_equal(flashinfer.packbits(x, order).numpy(), expected)


def test_packbits_names_a_wrong_order():
    with pytest.raises(ValueError, match="bitorder: expected 'big' or 'little', got 'middle'"):
        flashinfer.packbits(torch.ones(3), "middle")


@pytest.mark.parametrize("order", ["big", "little"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_segment_packbits(order, dtype):
    ends = np.array([0, 3, 3, 19, 27])
    x = np.random.default_rng().random(27) < 0.5
    parts = [np.packbits(x[a:b], bitorder=order) for a, b in zip(ends, ends[1:])]
    indptr = torch.from_numpy(ends).to(dtype)
    packed, begins = flashinfer.segment_packbits(torch.from_numpy(x), indptr, order)
    assert np.array_equal(packed.numpy(), np.concatenate(parts))
    assert begins.dtype == dtype
    assert begins.tolist() == [0, 1, 1, 3, 4]
