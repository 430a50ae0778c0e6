# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings with FlashInfer's names.

q is [tokens, num_qo_heads, head_dim] and k [tokens, num_kv_heads, head_dim]. The first rotary_dim
dims of a head are rotated, by default all: pairs are dims (i, i + rotary_dim / 2), with interleave
(2 i, 2 i + 1).
"""

from __future__ import annotations

import functools

from torch import Tensor

import flashplan as fp
from flashplan.flashinfer._rope_fp8 import (
    mla_rope_quantize_fp8,
    rope_quantize_fp8,
    rope_quantize_fp8_append_paged_kv_cache,
)
from flashplan.flashinfer.page import get_batch_indices_positions

__all__ = [
    "apply_llama31_rope",
    "apply_llama31_rope_inplace",
    "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace",
    "apply_rope",
    "apply_rope_inplace",
    "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace",
    "mla_rope_quantize_fp8",
    "rope_quantize_fp8",
    "rope_quantize_fp8_append_paged_kv_cache",
]


@functools.lru_cache(maxsize=64)
def _plain(rotary_dim: int | None, interleave: bool, scale: float, theta: float) -> fp.Rope:
    return fp.Rope(rotary_dim=rotary_dim, interleaved=interleave, scale=scale, theta=theta)


@functools.lru_cache(maxsize=64)
def _llama31(
    rotary_dim: int | None,
    interleave: bool,
    scale: float,
    theta: float,
    low_freq_factor: float,
    high_freq_factor: float,
    old_context_len: int,
) -> fp.Rope:
    return fp.Rope(
        rotary_dim=rotary_dim,
        interleaved=interleave,
        scale=scale,
        theta=theta,
        scaling="llama3",
        low_freq_factor=low_freq_factor,
        high_freq_factor=high_freq_factor,
        original_length=old_context_len,
    )


def _positions(indptr: Tensor, offsets: Tensor, num_rows: int) -> Tensor:
    """The positions of rows: row i of request r has offsets[r] + i. Rows that belong to no request
    have the position 0, whose rotation changes nothing."""
    return get_batch_indices_positions(indptr, offsets + indptr.diff(), num_rows)[1]


def apply_rope_pos_ids(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[Tensor, Tensor]:
    """Calls `flashplan.apply_rope`. pos_ids: [tokens], int32 or int64, divided by rope_scale."""
    return fp.apply_rope(q, k, pos_ids, _plain(rotary_dim, interleave, rope_scale, rope_theta))


def apply_rope_pos_ids_inplace(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """Does what `apply_rope_pos_ids` does, in place."""
    rope = _plain(rotary_dim, interleave, rope_scale, rope_theta)
    fp.apply_rope(q, k, pos_ids, rope, out_q=q, out_k=k)


def apply_rope(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[Tensor, Tensor]:
    """Does what `apply_rope_pos_ids` does, for rows of requests: request r has the rows indptr[r]
    to indptr[r + 1] - 1, at the positions from offsets[r] on. indptr: [batch_size + 1]."""
    positions = _positions(indptr, offsets, q.shape[0])
    return apply_rope_pos_ids(q, k, positions, rotary_dim, interleave, rope_scale, rope_theta)


def apply_rope_inplace(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """Does what `apply_rope` does, in place."""
    positions = _positions(indptr, offsets, q.shape[0])
    apply_rope_pos_ids_inplace(q, k, positions, rotary_dim, interleave, rope_scale, rope_theta)


def apply_llama31_rope_pos_ids(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[Tensor, Tensor]:
    """Does what `apply_rope_pos_ids` does, with Llama 3.1's scaling; see `flashplan.Rope`."""
    factors = (low_freq_factor, high_freq_factor, old_context_len)
    rope = _llama31(rotary_dim, interleave, rope_scale, rope_theta, *factors)
    return fp.apply_rope(q, k, pos_ids, rope)


def apply_llama31_rope_pos_ids_inplace(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """Does what `apply_llama31_rope_pos_ids` does, in place."""
    factors = (low_freq_factor, high_freq_factor, old_context_len)
    rope = _llama31(rotary_dim, interleave, rope_scale, rope_theta, *factors)
    fp.apply_rope(q, k, pos_ids, rope, out_q=q, out_k=k)


def apply_llama31_rope(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[Tensor, Tensor]:
    """Does what `apply_rope` does, with the scaling of Llama 3.1."""
    positions = _positions(indptr, offsets, q.shape[0])
    factors = (low_freq_factor, high_freq_factor, old_context_len)
    rope = _llama31(rotary_dim, interleave, rope_scale, rope_theta, *factors)
    return fp.apply_rope(q, k, positions, rope)


def apply_llama31_rope_inplace(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """Does what `apply_llama31_rope` does, in place."""
    positions = _positions(indptr, offsets, q.shape[0])
    factors = (low_freq_factor, high_freq_factor, old_context_len)
    rope = _llama31(rotary_dim, interleave, rope_scale, rope_theta, *factors)
    fp.apply_rope(q, k, positions, rope, out_q=q, out_k=k)


def apply_rope_with_cos_sin_cache(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> tuple[Tensor, Tensor]:
    """Calls `flashplan.apply_rope` with a table of cosines and sines.

    Args:
        positions: [tokens], int32 or int64.
        query, key: [tokens, heads * head_size], or [tokens, heads, head_size].
        cos_sin_cache: [positions, rotary_dim] float32: cosines, then sines.
        is_neox: pairs are dims (i, i + rotary_dim / 2), else (2 i, 2 i + 1).

    Returns:
        (query, key), rotated, in the shapes that were given.
    """
    q, k = _in_heads(query, head_size), _in_heads(key, head_size)
    q, k = fp.apply_rope(q, k, positions, cos_sin_cache=cos_sin_cache, interleaved=not is_neox)
    return q.view(query.shape), k.view(key.shape)


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> None:
    """Does what `apply_rope_with_cos_sin_cache` does, in place."""
    q, k = _in_heads(query, head_size), _in_heads(key, head_size)
    fp.apply_rope(
        q,
        k,
        positions,
        cos_sin_cache=cos_sin_cache,
        interleaved=not is_neox,
        out_q=q,
        out_k=k,
    )


def _in_heads(x: Tensor, head_size: int) -> Tensor:
    if x.dim() == 2 and x.shape[1] % head_size:
        raise ValueError(f"head_size: expected a divisor of {x.shape[1]} dims, got {head_size}")
    return x.view(x.shape[0], -1, head_size) if x.dim() == 2 else x
