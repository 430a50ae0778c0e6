# SPDX-License-Identifier: Apache-2.0
"""Rotations with FlashInfer's names, against float64."""

import numpy as np
import pytest

import rope_cases

torch = pytest.importorskip("torch")

import flashplan as fp  # noqa: E402
from flashplan import flashinfer  # noqa: E402

INDPTR, OFFSETS, POSITIONS = [0, 2, 2, 5], [7, 3, 0], [7, 8, 0, 1, 2]
LLAMA31 = {
    "scaling": "llama3",
    "scale": 8.0,
    "theta": 5e5,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_length": 8192,
}
# Arguments of the functions, and those of the Rope that they mean.
CASES = [
    ("rope", {}, {}),
    ("rope", {"interleave": True}, {"interleaved": True}),
    ("rope", {"rotary_dim": 16}, {"rotary_dim": 16}),
    ("rope", {"rope_scale": 2.0, "rope_theta": 500.0}, {"scale": 2.0, "theta": 500.0}),
    ("llama31_rope", {}, LLAMA31),
    ("llama31_rope", {"interleave": True, "rotary_dim": 8}, {"rotary_dim": 8, "interleaved": True}),
    (
        "llama31_rope",
        {"rope_scale": 4.0, "rope_theta": 1e4, "old_context_len": 64, "high_freq_factor": 8.0},
        {"scale": 4.0, "theta": 1e4, "original_length": 64, "high_freq_factor": 8.0},
    ),
    ("llama31_rope", {"low_freq_factor": 2.0}, {"low_freq_factor": 2.0}),
]


def tensors():
    return torch.randn(5, 4, 32), torch.randn(5, 2, 32)


def check(results, given, rope):
    for got, x in zip(results, given):
        expected = rope_cases.rotated(x.numpy(), np.array(POSITIONS), rope)
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("by_ids", [False, True])
@pytest.mark.parametrize(("name", "arguments", "meant"), CASES)
def test_rotations(name, arguments, meant, by_ids, dtype):
    rope = fp.Rope(**((LLAMA31 if name == "llama31_rope" else {}) | meant))
    where = (POSITIONS,) if by_ids else (INDPTR, OFFSETS)
    where = [torch.tensor(numbers, dtype=dtype) for numbers in where]
    function = f"apply_{name}{'_pos_ids' if by_ids else ''}"
    given = tensors()
    kept = [x.clone() for x in given]
    check(getattr(flashinfer, function)(*given, *where, **arguments), given, rope)
    assert all(torch.equal(x, y) for x, y in zip(given, kept))
    assert getattr(flashinfer, f"{function}_inplace")(*given, *where, **arguments) is None
    check(given, kept, rope)


def test_rows_of_no_request_are_not_rotated():
    q, k = torch.randn(7, 4, 32), torch.randn(7, 2, 32)
    indptr, offsets = torch.tensor(INDPTR), torch.tensor(OFFSETS)
    for x, got in zip((q, k), flashinfer.apply_rope(q, k, indptr, offsets)):
        check([got[:5]], [x[:5]], fp.Rope())
        assert torch.equal(got[5:], x[5:])


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [32, 12])
@pytest.mark.parametrize("flat", [True, False])
def test_rotations_by_a_table(is_neox, rotary_dim, flat):
    """Queries and keys may be the parts of rows that have all heads of q, k and v."""
    rope = fp.Rope(rotary_dim=rotary_dim, interleaved=not is_neox)
    angles = np.arange(9)[:, None] * 10000.0 ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    table = torch.from_numpy(np.hstack((np.cos(angles), np.sin(angles))).astype(np.float32))
    qkv = torch.randn(5, 8 * 32)
    q, k, v = qkv.split((4 * 32, 2 * 32, 2 * 32), dim=1)
    if not flat:
        q, k = q.unflatten(1, (4, 32)), k.unflatten(1, (2, 32))
    before = qkv.clone()
    heads = [x.clone().view(5, -1, 32) for x in (q, k)]
    positions = torch.tensor(POSITIONS, dtype=torch.int32)
    results = flashinfer.apply_rope_with_cos_sin_cache(positions, q, k, 32, table, is_neox)
    assert [x.shape for x in results] == [q.shape, k.shape]
    check([x.view(5, -1, 32) for x in results], heads, rope)
    assert torch.equal(qkv, before)
    flashinfer.apply_rope_with_cos_sin_cache_inplace(
        positions=positions, query=q, key=k, head_size=32, cos_sin_cache=table, is_neox=is_neox
    )
    check([x.reshape(5, -1, 32) for x in (q, k)], heads, rope)
    assert torch.equal(v, before[:, -64:])


def test_size_of_heads():
    x = torch.ones(1, 40)
    with pytest.raises(ValueError, match="head_size: expected a divisor of 40 dims, got 32"):
        flashinfer.apply_rope_with_cos_sin_cache(
            torch.zeros(1, dtype=torch.int64), x, x, 32, torch.ones(1, 32)
        )
