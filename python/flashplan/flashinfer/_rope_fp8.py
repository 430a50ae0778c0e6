# SPDX-License-Identifier: Apache-2.0
"""Rotations whose results are 8-bit floats, with FlashInfer's names.

Heads come in two parts: rope [tokens, heads, rope_dim], which is rotated, and nope [tokens, heads,
dim], which is not, or None. Keys of one head that is shared, as in multi-head latent attention,
lack the dimension of heads. FlashInfer's scales are factors: 8-bit number = number * quant_scale.
A product that is too large becomes the largest number of the dtype. Rotated numbers are rounded to
the dtype of the input before they are scaled. FlashInfer does not round them, so about one result
of a hundred is the 8-bit number next to FlashInfer's.
"""

from __future__ import annotations

import torch
from torch import Tensor

import flashplan as fp
from flashplan.flashinfer._arguments import name_of
from flashplan.flashinfer.page import append_paged_kv_cache
from flashplan.types import KvLayout

BACKENDS = ("cuda", "cutile")


def _dtype_of(quantize_dtype: torch.dtype | None, *outs: Tensor | None) -> torch.dtype:
    """The dtype of the results: quantize_dtype, or that of a given output, or float8_e4m3fn."""
    given = [out.dtype for out in outs if out is not None]
    dtype = quantize_dtype or (given[0] if given else torch.float8_e4m3fn)
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise ValueError(f"quantize_dtype: expected float8_e4m3fn or float8_e5m2, got {dtype}")
    return dtype


def _in_heads(x: Tensor) -> Tensor:
    return x.unsqueeze(1) if x.dim() == 2 else x


def _quantize(x: Tensor, quant_scale: float, out: Tensor) -> None:
    if x.numel():
        fp.quantize_fp8(_in_heads(x), 1 / quant_scale, dtype=name_of(out.dtype), out=_in_heads(out))


def _out_for(x: Tensor | None, like: Tensor, out: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`out`, or a new tensor: shaped like x or, if x is None, like `like` with heads of 0 dims."""
    if out is not None:
        return out
    return torch.empty(
        like.shape[:-1] + (0,) if x is None else x.shape, dtype=dtype, device=like.device
    )


def rope_quantize_fp8(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor | None,
    k_nope: Tensor | None,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: Tensor | None = None,
    k_rope_out: Tensor | None = None,
    q_nope_out: Tensor | None = None,
    k_nope_out: Tensor | None = None,
    enable_pdl: bool = False,
    backend: str = "cuda",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Calls `flashplan.apply_rope` with a table, and `flashplan.quantize_fp8`.

    Args:
        q_rope, k_rope, q_nope, k_nope: the two parts of queries and keys, [tokens, heads, dims].
        cos_sin_cache: [positions, rope_dim] float32: cosines, then sines.
        pos_ids: [tokens], int32 or int64.
        is_neox: pairs are dims (i, i + rope_dim / 2), else (2 i, 2 i + 1).
        quantize_dtype: float8_e4m3fn or float8_e5m2; default: that of the outputs that are given,
            or float8_e4m3fn.
        quant_scale_q, quant_scale_kv: factors > 0 of queries and of keys.
        q_rope_out, k_rope_out, q_nope_out, k_nope_out: written; default: new tensors.
        backend: "cuda" or "cutile"; neither has an effect.

    Returns:
        The four outputs, shaped like the parts.

    Raises:
        ValueError, TypeError: an argument is malformed.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    dtype = _dtype_of(quantize_dtype, q_rope_out, k_rope_out, q_nope_out, k_nope_out)
    q_rope_out = _out_for(q_rope, q_rope, q_rope_out, dtype)
    k_rope_out = _out_for(k_rope, k_rope, k_rope_out, dtype)
    q_nope_out = _out_for(q_nope, q_rope, q_nope_out, dtype)
    k_nope_out = _out_for(k_nope, k_rope, k_nope_out, dtype)
    if cos_sin_cache.dtype != torch.float32:  # programs search the message for FlashInfer's text
        raise ValueError(f"cos_sin_cache should be float32, got {cos_sin_cache.dtype}")
    fp.apply_rope(
        q_rope,
        _in_heads(k_rope),
        pos_ids,
        cos_sin_cache=cos_sin_cache,
        interleaved=not is_neox,
        out_q=q_rope_out,
        out_k=_in_heads(k_rope_out),
        out_dtype=name_of(q_rope_out.dtype),
        q_scale=1 / quant_scale_q,
        k_scale=1 / quant_scale_kv,
    )
    if q_nope is not None:
        _quantize(q_nope, quant_scale_q, q_nope_out)
    if k_nope is not None:
        _quantize(k_nope, quant_scale_kv, k_nope_out)
    return q_rope_out, k_rope_out, q_nope_out, k_nope_out


def mla_rope_quantize_fp8(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor,
    k_nope: Tensor,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: Tensor | None = None,
    k_rope_out: Tensor | None = None,
    q_nope_out: Tensor | None = None,
    k_nope_out: Tensor | None = None,
    enable_pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Calls `rope_quantize_fp8` with keys that have no dimension of heads: [tokens, rope_dim] and
    [tokens, dim]."""
    return rope_quantize_fp8(
        q_rope,
        k_rope,
        q_nope,
        k_nope,
        cos_sin_cache,
        pos_ids,
        is_neox,
        quantize_dtype,
        quant_scale_q,
        quant_scale_kv,
        q_rope_out,
        k_rope_out,
        q_nope_out,
        k_nope_out,
    )


def rope_quantize_fp8_append_paged_kv_cache(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor | None,
    k_nope: Tensor | None,
    v: Tensor | None,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    paged_kv_cache: tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    page_size: int = 16,
    kv_layout: KvLayout = "NHD",
    q_rope_out: Tensor | None = None,
    q_nope_out: Tensor | None = None,
    enable_pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Calls `rope_quantize_fp8`, and `append_paged_kv_cache` with the resulting keys and v.

    Args:
        v: [tokens, heads, head_dim] of 16 bits; None with keys of one shared head.
        paged_kv_cache: 8-bit pages (k, v). A head of k is its rope part, then its nope part. With
            keys of one shared head, a pair of [pages, page_size, dim]: their nope parts, and their
            rope parts.
        kv_indices, kv_indptr, batch_indices, positions: as in `append_paged_kv_cache`: tokens whose
            batch index is -1 are not appended.
        page_size: that of the caches.

    The other arguments and errors are those of `rope_quantize_fp8`.

    Returns:
        (q_rope_out, q_nope_out).

    Raises:
        ValueError: the caches have another dtype, or v is missing, or given beside a shared head.
    """
    dtype = _dtype_of(quantize_dtype, q_rope_out, q_nope_out)
    if len(paged_kv_cache) != 2:
        raise ValueError(
            f"paged_kv_cache must be a tuple of 2 tensors, got {len(paged_kv_cache)} of them"
        )
    for i, cache in enumerate(paged_kv_cache):
        if cache.dtype != dtype:
            raise ValueError(
                f"paged_kv_cache[{i}]: cache dtype mismatch: expected {dtype}, got {cache.dtype}"
            )
    is_mla = k_rope.dim() == 2
    if is_mla and v is not None:
        raise ValueError("v: MLA should not have V input (pass None), got a tensor")
    if not is_mla and v is None:
        raise ValueError("v: GQA/MHA expects a V tensor, but got None")
    caches = paged_kv_cache
    if is_mla:
        caches, kv_layout = (caches[0].unsqueeze(2), caches[1].unsqueeze(2)), "NHD"
    _check_page_size(page_size, caches[0], kv_layout)
    q_rope_out = _out_for(q_rope, q_rope, q_rope_out, dtype)
    q_nope_out = _out_for(q_nope, q_rope, q_nope_out, dtype)
    rope_dim = k_rope.shape[-1]
    dims = rope_dim + (0 if k_nope is None else k_nope.shape[-1])
    keys = torch.empty(*k_rope.shape[:-1], dims, dtype=dtype, device=k_rope.device)
    rope_quantize_fp8(
        q_rope,
        k_rope,
        q_nope,
        k_nope,
        cos_sin_cache,
        pos_ids,
        is_neox,
        dtype,
        quant_scale_q,
        quant_scale_kv,
        q_rope_out,
        keys[..., :rope_dim],
        q_nope_out,
        keys[..., rope_dim:],
    )
    if v is None:
        rows = (_in_heads(keys[..., rope_dim:]), _in_heads(keys[..., :rope_dim]))
    else:
        values = torch.empty(v.shape, dtype=dtype, device=v.device)
        _quantize(v, quant_scale_kv, values)
        rows = (keys, values)
    append_paged_kv_cache(
        *rows, batch_indices, positions, caches, kv_indices, kv_indptr, kv_indptr, kv_layout
    )
    return q_rope_out, q_nope_out


def _check_page_size(page_size: int, cache: Tensor, kv_layout: KvLayout) -> None:
    if cache.dim() != 4:
        raise ValueError(f"paged_kv_cache: expected 4D pages, got shape {list(cache.shape)}")
    found = cache.shape[1 if kv_layout == "NHD" else 2]
    if page_size != found:
        raise ValueError(f"page_size: expected {found}, that of the cache, got {page_size}")
