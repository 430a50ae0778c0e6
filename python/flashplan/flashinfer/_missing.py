# SPDX-License-Identifier: Apache-2.0
"""Functions of FlashInfer that engines import and that flashplan lacks: each raises when called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from flashplan._core import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable


def _missing(name: str, hint: str) -> Callable[..., Any]:
    def refused(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"{name}: expected a function of flashplan, got none; {hint}")

    refused.__name__ = refused.__qualname__ = name
    refused.__doc__ = f"Raises UnsupportedError: {hint}."
    return refused


_PLAN = "plan and run a wrapper of this module, or call flashplan.flash_attn"
_FOUR_BITS = "caches have 8 bits or more"

cudnn_batch_decode_with_kv_cache = _missing("cudnn_batch_decode_with_kv_cache", _PLAN)
cudnn_batch_prefill_with_kv_cache = _missing("cudnn_batch_prefill_with_kv_cache", _PLAN)

nvfp4_quantize_append_paged_kv_cache = _missing("nvfp4_quantize_append_paged_kv_cache", _FOUR_BITS)
nvfp4_quantize_append_paged_kv_cache_with_slot_mapping = _missing(
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping", _FOUR_BITS
)

_TOP_K = "call top_k of the keys before the length, and look its indices up in the page table"
top_k_page_table_transform = _missing("top_k_page_table_transform", _TOP_K)
top_k_ragged_transform = _missing("top_k_ragged_transform", _TOP_K)
