# SPDX-License-Identifier: Apache-2.0
"""Attention of a single request, which has no plan() of its own."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashplan._core import UnsupportedError
from flashplan.flash_plans import Plans
from flashplan.flashinfer._arguments import is_8_bit, one_of, product, refuse
from flashplan.flashinfer._masks import to_words
from flashplan.flashinfer._narrow_queries import read_queries
from flashplan.flashinfer._plans import Batch
from flashplan.flashinfer._positions import (
    MODES,
    alibi_arguments,
    alibi_variant,
    rotation,
    wide_dtype,
    widened,
    widens_keys,
)
from flashplan.flashinfer._wrapper import BACKENDS

_plans = Plans()


def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale_q: Tensor | None = None,
    scale_k: Tensor | None = None,
    scale_v: Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: Any = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> Any:
    """Attention of one request. Calls of equal shapes and options share a plan.

    Args:
        q: [qo_len, num_qo_heads, head_dim_qk].
        k, v: [kv_len, num_kv_heads, head_dim], with "HND" [num_kv_heads, kv_len, head_dim].
        scale_q, scale_k, scale_v: float32, [1] or one for each head: scales of 8-bit q, k and v,
            multiplied with k_scale and v_scale.
        o_dtype: dtype of o, of 16 bits; default: that of q. Needed for q of 8 bits.
        custom_mask: bool [qo_len, kv_len]: whether a query sees a key; takes the place of causal.
        packed_custom_mask: uint8: custom_mask, flat, as bits, the lowest of a byte first.
        return_lse: whether to return (o, lse), lse [qo_len, num_qo_heads] to base 2.

    The other arguments are those of `BatchPrefillWithPagedKVCacheWrapper`.

    Returns:
        o [qo_len, num_qo_heads, head_dim_vo], or (o, lse).

    Raises:
        UnsupportedError: an argument asks for what flashplan can not do.
        ValueError, TypeError: tensors do not fit each other.
        RuntimeError: a CUDA graph is being captured, and there was no earlier call of this kind.
    """
    refuse(kv_cache_sf=kv_cache_sf)
    one_of("kv_layout", kv_layout, ("NHD", "HND"))
    one_of("pos_encoding_mode", pos_encoding_mode, MODES)
    one_of("backend", backend, BACKENDS)
    o_dtype = q.dtype if o_dtype is None else o_dtype
    if is_8_bit(o_dtype):
        raise UnsupportedError(f"o_dtype: expected 16 bits (32 on the CPU), got {o_dtype}")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 3:
            raise ValueError(f"{name}: expected 3 dimensions, got shape {list(tensor.shape)}")
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    qo_len, kv_len = q.shape[0], k.shape[0]
    k_scale = product(scale_k, k_scale)
    if is_8_bit(q.dtype):
        q, k_scale = read_queries(q, scale_q, k.shape[1], k_scale)
    else:
        k_scale = product(scale_q, k_scale)
    softcap = 0.0 if logits_soft_cap is None else float(logits_soft_cap)
    tensors: dict[str, Any] = {}
    variant = rope = None
    if pos_encoding_mode == "ALIBI":
        variant = alibi_variant(softcap)
        tensors |= alibi_arguments(q.shape[1], softcap, q.device)
        softcap = 0.0
    elif pos_encoding_mode == "ROPE_LLAMA":
        rope = rotation(
            1e4 if rope_theta is None else rope_theta, 1.0 if rope_scale is None else rope_scale
        )
        if widens_keys(pos_encoding_mode, k.dtype, q.device):
            q = q.to(wide_dtype(q.dtype))
            k, v, _ = widened(k, v, {}, k.dtype, q.dtype)
    has_mask = custom_mask is not None or packed_custom_mask is not None
    if has_mask:
        batch = Batch(np.array([0, qo_len]), np.array([kv_len]), None)
        tensors["mask"] = to_words(batch, custom_mask, packed_custom_mask, q.device)
    options = {
        "num_qo_heads": q.shape[1],
        "num_kv_heads": k.shape[1],
        "head_dim": (q.shape[2], v.shape[2]),
        "page_size": None,
        "q_dtype": q.dtype,
        "kv_dtype": k.dtype,
        "o_dtype": o_dtype,
        "causal": causal and not has_mask,
        "window_left": window_left,
        "custom_mask": has_mask,
        "softcap": softcap,
        "softmax_scale": sm_scale,
        "variant": variant,
        "rope": rope,
        "lse_base2": True,
    }
    attn = _plans.attention(
        q.device,
        options,
        (1, qo_len),
        (qo_len, kv_len),
        lambda: ([0, qo_len], [kv_len], None),
        mask_begin=[0] if has_mask else None,
    )
    return attn.run(
        q,
        k,
        v,
        return_lse=return_lse,
        k_scale=product(None, k_scale),
        v_scale=product(scale_v, v_scale),
        **tensors,
    )


single_prefill_with_kv_cache_return_lse = functools.partial(
    single_prefill_with_kv_cache, return_lse=True
)


def single_decode_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Does what `single_prefill_with_kv_cache` does, for one query: q [num_qo_heads, head_dim].

    Returns:
        o [num_qo_heads, head_dim], or (o, lse), lse [num_qo_heads] to base 2.
    """
    if q.dim() != 2:
        raise ValueError(f"q: expected 2 dimensions, got shape {list(q.shape)}")
    results = single_prefill_with_kv_cache(
        q.unsqueeze(0),
        k,
        v,
        kv_layout=kv_layout,
        pos_encoding_mode=pos_encoding_mode,
        sm_scale=sm_scale,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        return_lse=return_lse,
        k_scale=product(q_scale, k_scale),
        v_scale=v_scale,
    )
    if not return_lse:
        return results.squeeze(0)
    o, lse = results
    return o.squeeze(0), lse.squeeze(0)
