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
