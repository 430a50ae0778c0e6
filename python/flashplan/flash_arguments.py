# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of FlashAttention's functions, and converts them to those of `Attention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashplan._core import UnsupportedError

_HINTS = {
    "rotary_cos": "rotate ragged q and k by flashplan.apply_rope",
    "return_attn_probs": "return_softmax_lse=True returns the log-sum-exp",
}


# Keywords of newer forks that change what is computed, so they are refused if they have a value.
_REFUSED = frozenset(
    {
        "score_mod",
        "score_mod_bwd",
        "mask_mod",
        "aux_tensors",
        "aux_scalars",
        "aux_tensor_leading_dims",
        "block_sparse_tensors",
        "block_sparse_tensors_bwd",
        "dynamic_causal",
        "gather_kv_indices",
        "gather_kv_valid_length",
        "only_qv",
        "output_scale",
        "q_block_size",
        "rel_bias",
        "sfk",
        "sfq",
        "sfv",
    }
)
# Keywords of newer forks that only tune a kernel, or repeat what the tensors tell, so any value is
# accepted.
_IGNORED = frozenset(
    {
        "backend",
        "disable_scheduler_metadata",
        "max_seqlen_k",
        "min_seqlen_k",
        "qk_sf_vec_size",
        "rel_bias_prep_cache",
        "seqlen_k_per_split",
        "v_sf_vec_size",
        "zfill_padded_output",
    }
)


def refuse_others(function: str, others: dict[str, Any]) -> None:
    """Raises TypeError for a keyword that no fork has, and UnsupportedError for a keyword of
    _REFUSED whose value is not None, False or 0."""
    for name, value in others.items():
        if name not in _REFUSED and name not in _IGNORED:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        if name in _REFUSED:
            refuse(**{name: value})


def refuse(**arguments: Any) -> None:
    """Raises UnsupportedError for the first argument that is not None, False or 0."""
    for name, value in arguments.items():
        if value is None or (not isinstance(value, Tensor) and value == 0):
            continue
        got = "a tensor" if isinstance(value, Tensor) else repr(value)
        hint = f"; {_HINTS[name]}" if name in _HINTS else ""
        raise UnsupportedError(f"{name}: expected none, got {got}{hint}")


def one_of(first: str, a: Any, second: str, b: Any) -> Any:
    """The value of an argument that has two names. Raises ValueError if both are given."""
    if a is not None and b is not None:
        raise ValueError(f"{first}: expected it or {second}, got both")
    return a if b is None else b


def check_dims(name: str, tensor: Tensor, dims: int) -> None:
    if tensor.dim() != dims:
        raise ValueError(f"{name}: expected {dims} dimensions, got shape {list(tensor.shape)}")


def is_8_bit(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def attention_options(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_size: int | None,
    softmax_scale: Any,
    softcap: float,
    out: Tensor | None,
) -> dict[str, Any]:
    """The options of `Attention` for these tensors. With queries of 8 bits the dtype of o is that
    of `out`, by default bfloat16."""
    o_dtype = q.dtype
    if is_8_bit(q):
        o_dtype = torch.bfloat16 if out is None else out.dtype
    return {
        "num_qo_heads": q.shape[-2],
        "num_kv_heads": k.shape[-2],
        "head_dim": (q.shape[-1], v.shape[-1]),
        "page_size": page_size,
        "q_dtype": q.dtype,
        "kv_dtype": k.dtype,
        "o_dtype": o_dtype,
        "softmax_scale": softmax_scale,
        "softcap": softcap,
    }


def scale(name: str, scales: Tensor | None, narrow: Tensor) -> float | Tensor:
    """The scale of 8-bit queries or caches. `scales` is [num_kv_heads], or that expanded to
    [batch_size, num_kv_heads]. Scales of 16-bit tensors are ignored, as in FlashAttention."""
    if scales is None or not is_8_bit(narrow) or scales.numel() == 0:
        return 1.0
    if scales.dim() == 2:
        if scales.shape[0] > 1 and scales.stride(0) != 0:
            raise UnsupportedError(
                f"{name}: expected the scales of one sequence, or these expanded to all sequences, "
                f"got shape {list(scales.shape)} and stride {list(scales.stride())}"
            )
        scales = scales[0]
    is_expanded = scales.dim() == 1 and scales.stride(0) == 0
    return (scales[:1] if is_expanded else scales).float()


def sinks_of(*given: Tensor | None) -> Tensor | None:
    """The sinks, which have three names: s_aux, sinks and learnable_sink. At most one is given."""
    tensors = [tensor for tensor in given if tensor is not None]
    if len(tensors) > 1:
        raise ValueError("s_aux: expected it, sinks or learnable_sink, got several")
    if not tensors:
        return None
    sinks = tensors[0]
    return (sinks if sinks.dtype == torch.bfloat16 else sinks.float()).contiguous()


def int32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.int32)
