# SPDX-License-Identifier: Apache-2.0
"""Functions with FlashInfer's names against float64: norms, activations, merges."""

import pytest

torch = pytest.importorskip("torch")

from flashplan import flashinfer  # noqa: E402


def normed(x, weight):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def close(got, expected):
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gemma", [False, True])
def test_rmsnorm(gemma):
    x, residual, weight = torch.randn(5, 64), torch.randn(5, 64), torch.randn(64)
    factor, prefix = weight.double() + gemma, "gemma_" if gemma else ""
    out = torch.full_like(x, torch.nan)
    assert getattr(flashinfer, prefix + "rmsnorm")(x, weight, out=out) is out
    close(out, normed(x, factor))
    total = x.double() + residual.double()
    getattr(flashinfer, prefix + "fused_add_rmsnorm")(x, residual, weight)
    close(residual, total)
    close(x, normed(total, factor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_layernorm_does_not_round_its_weights(dtype, weight_dtype):
    x = torch.randn(5, 64).to(dtype)
    weight, bias = torch.randn(2, 64).to(weight_dtype)
    expected = torch.nn.functional.layer_norm(
        x.double(), (64,), weight.double(), bias.double(), 1e-6
    )
    got = flashinfer.layernorm(x, weight, bias)
    assert got.dtype == dtype
    eps = torch.finfo(dtype).eps  # rounding of the result alone
    torch.testing.assert_close(got.double(), expected, rtol=eps, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("scale", [0.25, torch.tensor(0.25), torch.tensor([0.25])])
def test_norms_into_8_bits(dtype, scale):
    x, residual, weight, bias = (torch.randn(n, 64).bfloat16() for n in (5, 5, 1, 1))
    weight, bias, total = weight[0], bias[0], x.double() + residual.double()
    before, out = x.clone(), torch.empty(5, 64, dtype=dtype)

    def check(expected):
        eps, smallest = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
        rtol, atol = 0.51 * eps, 0.51 * eps * smallest
        torch.testing.assert_close(out.double(), expected, rtol=rtol + 1e-2, atol=atol)
        out.view(torch.uint8).fill_(0xFF)  # NaN

    flashinfer.rmsnorm_quant(out, x, weight, scale)
    check(normed(x, weight.double()) / 0.25)
    flashinfer.layernorm_quant(out, x, weight.float(), bias.float(), scale)
    doubles = weight.double(), bias.double()
    check(torch.nn.functional.layer_norm(x.double(), (64,), *doubles, 1e-6) / 0.25)
    flashinfer.fused_add_rmsnorm_quant(out, x, residual, weight, scale)
    check(normed(residual, weight.double()) / 0.25)
    torch.testing.assert_close(residual.double(), total, rtol=2**-8, atol=1e-6)
    assert torch.equal(x, before)


def test_scales_of_several_elements_are_refused():
    x, out = torch.randn(5, 64), torch.empty(5, 64, dtype=torch.float8_e5m2)
    with pytest.raises(ValueError, match=r"scale must be a scalar tensor, got shape \[2\]"):
        flashinfer.rmsnorm_quant(out, x, torch.ones(64), torch.ones(2))


@pytest.mark.parametrize(
    ("name", "gate"),
    [
        ("silu_and_mul", torch.nn.functional.silu),
        ("gelu_and_mul", torch.nn.functional.gelu),
        ("gelu_tanh_and_mul", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ],
)
def test_activations(name, gate):
    x = torch.randn(5, 128)
    left, right = x.double().chunk(2, dim=-1)
    close(getattr(flashinfer, name)(x), gate(left) * right)


def merged(v, s):
    weights = torch.exp2(s.double())
    total = weights.sum(0)
    return (weights[..., None] * v.double()).sum(0) / total[..., None], torch.log2(total)


def test_merges_are_to_base_2():
    v, s = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 3)
    expected = merged(v, s)
    stacked = flashinfer.merge_states(v.transpose(0, 1), s.transpose(0, 1))
    for got in (flashinfer.merge_state(v[0], s[0], v[1], s[1]), stacked):
        close(got[0], expected[0])
        close(got[1], expected[1])


def test_merge_in_place_keeps_masked_tokens():
    v, s = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 3)
    mask = torch.tensor([1, 0, 1, 0, 1], dtype=torch.bool)
    expected_v, expected_s = merged(v, s)
    v_new, s_new = v[0].clone(), s[0].clone()
    flashinfer.merge_state_in_place(v_new, s_new, v[1], s[1], mask)
    close(v_new, torch.where(mask[:, None, None], expected_v, v[0].double()))
    close(s_new, torch.where(mask[:, None], expected_s, s[0].double()))


def test_merges_of_segments():
    """The second one is empty, and the third one has a state without a key."""
    v, s = torch.randn(7, 3, 8), torch.randn(7, 3)
    s[5, 1] = -torch.inf
    indptr = torch.tensor([0, 4, 4, 6, 7], dtype=torch.int32)
    got_v, got_s = flashinfer.triton.cascade.variable_length_merge_states(v, s, indptr)
    for row, (begin, end) in enumerate(((0, 4), (4, 4), (4, 6), (6, 7))):
        if begin == end:
            assert (got_v[row] == 0).all()
            assert (got_s[row] == -torch.inf).all()
            continue
        expected = merged(v[begin:end], s[begin:end])
        close(got_v[row], expected[0])
        close(got_s[row], expected[1])
