# SPDX-License-Identifier: Apache-2.0
"""Makes flashplan the flash attention of torch.nn.functional.scaled_dot_product_attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashplan import flash_attn
from flashplan._core import UnsupportedError
from flashplan.flash_arguments import refuse

NAME = "flashplan"


class _Registered:
    """The object that PyTorch keeps while the implementation is active. PyTorch calls remove() to
    get its own operators back."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def remove(self) -> None:
        self._library._destroy()


def register() -> str:
    """Makes flashplan known to PyTorch as an implementation of flash attention. Returns NAME."""
    registry: Any = torch.nn.attention
    if not hasattr(registry, "register_flash_attention_impl"):
        raise UnsupportedError(
            "torch: expected a version with torch.nn.attention.register_flash_attention_impl, got "
            f"{torch.__version__}"
        )
    registry.register_flash_attention_impl(NAME, register_fn=_activate)
    return NAME


def _activate() -> _Registered:
    library: Any = torch.library
    operators = library.Library("aten", "IMPL", "CUDA")
    for name, function in (
        ("_scaled_dot_product_flash_attention", dense_forward),
        ("_scaled_dot_product_flash_attention_backward", _backward),
        ("_flash_attention_forward", forward),
        ("_flash_attention_backward", _backward),
    ):
        operators.impl(name, function, "CUDA")
    return _Registered(operators)


def _refuse_gradients(*tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        _backward()


def _backward(*_arguments: Any, **_more: Any) -> None:
    raise UnsupportedError(
        "requires_grad: expected inference with flashplan (under torch.no_grad()), got True"
    )


def _no_dropout(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The seed, offset and mask of dropout that PyTorch expects, for no dropout."""
    return (
        torch.zeros(2, dtype=torch.uint64, device=device),
        torch.zeros((), dtype=torch.uint64, device=device),
        torch.empty(0, dtype=dtype, device=device),
    )


def dense_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """Computes aten::_scaled_dot_product_flash_attention: [batch_size, heads, tokens, head_dim]."""
    _refuse_gradients(query, key, value)
    refuse(dropout_p=dropout_p, return_debug_mask=return_debug_mask)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    o, lse = flash_attn.flash_attn_func(
        q, k, v, softmax_scale=scale, causal=is_causal, return_softmax_lse=True
    )
    out = torch.empty_like(query)  # compiled programs expect o to have the strides of query
    if out.stride() == o.transpose(1, 2).stride():
        out = o.transpose(1, 2)
    else:
        out.copy_(o.transpose(1, 2))
    lengths = (query.shape[2], key.shape[2])
    return (out, lse, None, None, *lengths, *_no_dropout(query.device, query.dtype))


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    """Computes aten::_flash_attention_forward of [batch_size, tokens, heads, head_dim], or with
    cum_seq_q of ragged [tokens, heads, head_dim]."""
    _refuse_gradients(query, key, value)
    refuse(dropout_p=dropout_p, return_debug_mask=return_debug_mask, alibi_slopes=alibi_slopes)
    left, right = (-1 if size is None else size for size in (window_size_left, window_size_right))
    options: dict[str, Any] = {
        "softmax_scale": scale,
        "causal": is_causal,
        "window_size": (left, right),
        "return_softmax_lse": True,
    }
    if cum_seq_q is None:
        refuse(seqused_k=seqused_k, block_table=block_table)
        results = flash_attn.flash_attn_func(query, key, value, **options)
    else:
        results = flash_attn.flash_attn_varlen_func(
            query,
            key,
            value,
            cum_seq_q,
            cum_seq_k,
            max_q,
            max_k,
            seqused_k=seqused_k,
            block_table=block_table,
            **options,
        )
    return (*results, *_no_dropout(query.device, query.dtype))
