# SPDX-License-Identifier: Apache-2.0
"""Rotations into 8 bits with FlashInfer's names, against float64."""

import ml_dtypes
import numpy as np
import pytest

import rope_cases

torch = pytest.importorskip("torch")

import flashplan as fp  # noqa: E402
from flashplan import flashinfer  # noqa: E402
from flashplan.flashinfer.cutile import cutile_common  # noqa: E402

TOKENS, HEADS, ROPE, NOPE = 7, (6, 2), 16, 24
DTYPES = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
MODES = [(is_mla, has_nope) for is_mla in (False, True) for has_nope in (False, True)][:3]


def table(rope):
    """Rows of cosines and sines, float32."""
    turns = np.arange(40)[:, None] * 1e4 ** (-2 * np.arange(rope // 2) / rope)
    return torch.from_numpy(np.concatenate((np.cos(turns), np.sin(turns)), 1)).float()


class Tokens:
    """Rows of q and k in their two parts, which are views of whole heads."""

    def __init__(self, rng, is_mla, has_nope, dtype=torch.float16):
        dims = ROPE + (NOPE if has_nope else 0)
        k_shape = (TOKENS, dims) if is_mla else (TOKENS, HEADS[1], dims)
        self.q, self.k = (
            torch.from_numpy(rng.standard_normal(shape) * 3).to(dtype)
            for shape in ((TOKENS, HEADS[0], dims), k_shape)
        )
        self.v = torch.from_numpy(rng.standard_normal((TOKENS, HEADS[1], dims))).to(dtype)
        self.positions = torch.from_numpy(rng.permutation(40)[:TOKENS])
        self.has_nope, self.is_mla = has_nope, is_mla

    def parts(self):
        """q_rope, k_rope, q_nope, k_nope."""
        rope = self.q[..., :ROPE], self.k[..., :ROPE]
        return *rope, *((self.q[..., ROPE:], self.k[..., ROPE:]) if self.has_nope else (None, None))

    def expected(self, x, quant_scale, dtype, is_neox):
        """Whole heads, rotated, rounded to the dtype of x, and converted, as float32."""
        rope = fp.Rope(rotary_dim=ROPE, interleaved=not is_neox)
        heads = (x if x.dim() == 3 else x[:, None]).double().numpy()
        rotated = torch.from_numpy(rope_cases.rotated(heads, self.positions.numpy(), rope))
        rounded = rotated.to(x.dtype).double().numpy()
        return narrow(rounded.reshape(x.shape) * quant_scale, dtype)


def narrow(x, dtype):
    largest = float(ml_dtypes.finfo(DTYPES[dtype]).max)
    return np.clip(x, -largest, largest).astype(DTYPES[dtype]).astype(np.float32)


def check(got, expected):
    """Equal, but for numbers that rounding errors of float32 move over the middle of two."""
    got = got.float().numpy()
    assert got.shape == expected.shape
    differ = got != expected
    assert differ.mean() < 0.005
    np.testing.assert_allclose(got, expected, rtol=0.25, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize(("is_mla", "has_nope"), MODES)
def test_rotated_and_converted(rng, is_mla, has_nope, is_neox, dtype):
    tokens = Tokens(rng, is_mla, has_nope)
    quantize_dtype = getattr(torch, dtype)
    arguments = *tokens.parts(), table(ROPE), tokens.positions
    scales = {"quant_scale_q": 0.3, "quant_scale_kv": 50.0}  # the latter makes some too large
    function = flashinfer.rope.mla_rope_quantize_fp8 if is_mla else flashinfer.rope_quantize_fp8
    results = function(*arguments, is_neox, quantize_dtype, **scales)
    assert all(x.dtype == quantize_dtype for x in results)
    expected_q = tokens.expected(tokens.q, 0.3, dtype, is_neox)
    expected_k = tokens.expected(tokens.k, 50.0, dtype, is_neox)
    check(torch.cat((results[0], results[2]), -1), expected_q)
    check(torch.cat((results[1], results[3]), -1), expected_k)
    outs = [torch.full(x.shape, 7.0).to(quantize_dtype) for x in (tokens.q, tokens.k)]
    given = [out[..., dims] for dims in (slice(ROPE), slice(ROPE, None)) for out in outs]
    names = ("q_rope_out", "k_rope_out", "q_nope_out", "k_nope_out")
    again = function(*arguments, is_neox, **scales, **dict(zip(names, given)))
    assert all(a is b for a, b in zip(again, given))
    check(outs[0], expected_q)
    check(outs[1], expected_k)


def test_default_dtype(rng):
    tokens = Tokens(rng, False, False)
    results = flashinfer.rope_quantize_fp8(*tokens.parts(), table(ROPE), tokens.positions)
    assert results[0].dtype == torch.float8_e4m3fn
    assert [x.shape[-1] for x in results] == [ROPE, ROPE, 0, 0]


BATCH, WHERE = [0, 0, 0, 2, -1, 2, 2], [3, 4, 5, 0, 9, 1, 2]
INDPTR, INDICES, PAGE = [0, 2, 2, 3], [5, 0, 3], 4


def page_of(batch, position):
    return INDICES[INDPTR[batch] + position // PAGE], position % PAGE


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("is_mla", "has_nope"), [(False, False), (False, True), (True, True)])
def test_appended(rng, is_mla, has_nope, dtype, layout):
    """Each key goes to its page; other slots, and those of skipped tokens, stay as they are."""
    tokens = Tokens(rng, is_mla, has_nope, torch.bfloat16)
    quantize_dtype = getattr(torch, dtype)
    dims = tokens.k.shape[-1]
    if is_mla:
        shapes = [(6, PAGE, NOPE), (6, PAGE, ROPE)]
    else:
        shapes = [(6, PAGE, HEADS[1], dims)] * 2
        if layout == "HND":
            shapes = [(6, HEADS[1], PAGE, dims)] * 2
    caches = tuple(torch.full(shape, 7.0).to(quantize_dtype) for shape in shapes)
    ints = [torch.tensor(x, dtype=torch.int32) for x in (INDICES, INDPTR, BATCH, WHERE)]
    results = flashinfer.rope_quantize_fp8_append_paged_kv_cache(
        *tokens.parts(),
        None if is_mla else tokens.v,
        table(ROPE),
        tokens.positions,
        caches,
        *ints,
        quantize_dtype=quantize_dtype,
        quant_scale_q=0.5,
        quant_scale_kv=2.0,
        page_size=PAGE,
        kv_layout=layout,
    )
    check(torch.cat(results, -1), tokens.expected(tokens.q, 0.5, dtype, True))
    keys = tokens.expected(tokens.k, 2.0, dtype, True)
    values = narrow(tokens.v.double().numpy() * 2.0, dtype)
    rows = (keys[:, ROPE:], keys[:, :ROPE]) if is_mla else (keys, values)
    for cache, new in zip(caches, rows):
        if not is_mla and layout == "HND":
            cache = cache.transpose(1, 2)
        expected = np.full(cache.shape, 7.0, np.float32)
        for row, batch, position in zip(new, BATCH, WHERE):
            if batch >= 0:
                expected[page_of(batch, position)] = row
        check(cache, expected)


def test_wrong_arguments(rng):
    tokens = Tokens(rng, False, True)
    where = table(ROPE), tokens.positions
    with pytest.raises(ValueError, match="backend: expected one of cuda, cutile, got 'cuitle'"):
        flashinfer.rope_quantize_fp8(*tokens.parts(), *where, backend="cuitle")
    with pytest.raises(ValueError, match="quantize_dtype: expected float8_e4m3fn or .* got .*16"):
        flashinfer.rope_quantize_fp8(*tokens.parts(), *where, quantize_dtype=torch.half)
    with pytest.raises(ValueError, match="cos_sin_cache should be float32, got torch.float64"):
        flashinfer.rope_quantize_fp8(*tokens.parts(), table(ROPE).double(), tokens.positions)
    assert not cutile_common.is_cuda_tile_available()


def test_wrong_appends(rng):
    tokens = Tokens(rng, False, True)
    shared = Tokens(rng, True, True)
    ints = [torch.tensor(x, dtype=torch.int32) for x in (INDICES, INDPTR, BATCH, WHERE)]
    pages = torch.zeros(6, PAGE, HEADS[1], ROPE + NOPE, dtype=torch.float8_e4m3fn)
    latent = torch.zeros(6, PAGE, NOPE, dtype=torch.float8_e4m3fn)

    def append(given, v, caches, **options):
        flashinfer.rope_quantize_fp8_append_paged_kv_cache(
            *given.parts(), v, table(ROPE), given.positions, caches, *ints, **options
        )

    for given, v, caches, options, message in (
        (tokens, tokens.v, (pages,), {}, "paged_kv_cache must be a tuple of 2 tensors, got 1"),
        (tokens, tokens.v, (pages, pages.half()), {}, r"paged_kv_cache\[1\]: .* dtype mismatch"),
        (tokens, None, (pages, pages), {}, "v: GQA/MHA expects a V tensor, but got None"),
        (shared, tokens.v, (latent, latent), {}, "v: MLA should not have V input"),
        (tokens, tokens.v, (pages, pages), {}, "page_size: expected 4, .* got 16"),
        (shared, None, (pages, pages), {}, "paged_kv_cache: expected 4D pages, got shape"),
    ):
        with pytest.raises(ValueError, match=message):
            append(given, v, caches, **options)
    assert not pages.float().any()
