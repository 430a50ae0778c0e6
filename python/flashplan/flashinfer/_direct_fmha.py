# SPDX-License-Identifier: Apache-2.0
"""Attends to prompts without plan(), with q, k and v in one of five layouts. The layers of a step
share a plan."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashplan._core import UnsupportedError
from flashplan.flash_arguments import int32
from flashplan.flash_plans import is_capturing
from flashplan.flash_runs import on_host, run_rows
from flashplan.flashinfer._chunks import in_chunks
from flashplan.flashinfer._direct import direct_options, narrowed, output_dtype, run_tensors
from flashplan.flashinfer._positions import alibi_arguments, alibi_variant

LAYOUTS = ("PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", "Q_PAGED_KV_NHD", "Q_PAGED_KV_HND")
MASKS = ("causal", "sliding_window", "chunked", "padding")
_LN2 = math.log(2)


class Inputs(NamedTuple):
    """q, k and v as run() takes them; page_size and block_table are None for ragged k and v."""

    q: Tensor
    k: Tensor
    v: Tensor
    page_size: int | None = None
    kv_layout: str = "NHD"
    block_table: Tensor | None = None


def _tensors(qkv: Any, input_layout: str, *dims: int) -> tuple[Tensor, ...]:
    """The tensors of qkv. Raises ValueError unless they have these numbers of dimensions."""
    parts = (qkv,) if isinstance(qkv, Tensor) else tuple(qkv)
    shapes = [tuple(part.shape) for part in parts]
    if tuple(map(len, shapes)) != dims:
        raise ValueError(
            f"qkv: {input_layout} expects {len(dims)} tensors of {', '.join(map(str, dims))} "
            f"dimensions, got shapes {shapes}"
        )
    return parts


def _unbind(joined: Tensor, input_layout: str, parts: int) -> tuple[Tensor, ...]:
    """Splits a tensor along dimension 1, which must have `parts` entries."""
    if joined.shape[1] != parts:
        raise ValueError(
            f"qkv: {input_layout} expects shape [tokens or pages, {parts}, ...], got "
            f"{tuple(joined.shape)}"
        )
    return joined.unbind(1)


def _inputs(
    qkv: Any, input_layout: str, block_tables: Tensor | None, seq_lens: Tensor, batch_size: int
) -> Inputs:
    if input_layout == "PACKED_QKV":
        (packed,) = _tensors(qkv, input_layout, 4)
        q, k, v = _unbind(packed, input_layout, 3)
        return Inputs(q, k, v)
    if input_layout == "CONTIGUOUS_Q_KV":
        q, joined = _tensors(qkv, input_layout, 3, 4)
        k, v = _unbind(joined, input_layout, 2)
        return Inputs(q, k, v)
    if input_layout == "SEPARATE_Q_K_V":
        q, k, v = _tensors(qkv, input_layout, 3, 3, 3)
        return Inputs(q, k, v)
    if input_layout not in LAYOUTS:
        raise ValueError(
            f"input_layout: expected one of {', '.join(LAYOUTS)}, got {input_layout!r}"
        )
    if block_tables is None:
        raise ValueError(f"block_tables is required for the {input_layout} input layout, got None")
    if block_tables.shape[0] != batch_size:
        raise ValueError(
            f"block_tables: expected {batch_size} rows (batch_size), got {block_tables.shape[0]}"
        )
    q, cache = qkv
    kv_layout = input_layout[-3:]
    tokens = 1 if kv_layout == "NHD" else 2
    if isinstance(cache, Tensor):
        _tensors(cache, input_layout, 5)
        k, v = _unbind(cache, input_layout, 2)
        table = _tensors(block_tables, "block_tables of one paged tensor", 2)[0]
    else:
        k, v = _tensors(cache, input_layout, 4, 4)
        table = _shared_table(k, v, block_tables, seq_lens, k.shape[tokens])
    return Inputs(q, k, v, k.shape[tokens], kv_layout, int32(table))


def _shared_table(
    k: Tensor, v: Tensor, block_tables: Tensor, seq_lens: Tensor, page_size: int
) -> Tensor:
    """The page ids [batch_size, most pages] of separate caches. FlashInfer takes ids for k and for
    v, both counted from the first page of k. Here each page of v must have the same place in v's
    cache as its page of k has in k's cache, so the ids of k serve both."""
    if block_tables.dim() != 3 or block_tables.shape[1] != 2:
        raise ValueError(
            "block_tables: separate k and v expect shape [batch_size, 2, pages], got "
            f"{tuple(block_tables.shape)}"
        )
    if is_capturing(k.device):
        raise UnsupportedError(
            "qkv: expected pages of k and v in one tensor while a CUDA graph is captured, got two"
        )
    distance = v.data_ptr() - k.data_ptr()
    of_k, of_v = block_tables.unbind(1)
    # Ids behind a length may be anything, so only those before it are compared.
    begins = torch.arange(of_k.shape[1], device=of_k.device) * page_size
    is_used = begins < seq_lens.to(of_k.device).long()[:, None]
    page_bytes = k.stride(0) * k.element_size()
    differ = is_used & ((of_v - of_k) * page_bytes != distance)
    if k.shape != v.shape or k.stride() != v.stride() or bool(differ.any()):
        raise UnsupportedError(
            "block_tables: expected a page of v at the same place in its cache as that of k, got "
            "others"
        )
    return of_k


def _softmax_stats(lse: Tensor, factor: Any) -> Tensor:
    """(m, s) for each row and head, such that log-sum-exp = factor * m + ln(s), as for the maximum
    and the sum that FlashInfer returns. Here s is 1."""
    m = lse * _LN2 / factor
    return torch.stack((m, torch.ones_like(m)), -1)


def trtllm_fmha_v2_prefill(
    qkv: Any,
    input_layout: str,
    workspace_buffer: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | Tensor,
    bmm2_scale: float | Tensor,
    batch_size: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    block_tables: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    sinks: Any = None,
    pos_encoding_mode: str | None = None,
    logits_soft_cap_scale: float | None = None,
    mask_mode: str | None = "causal",
    window_left: int = -1,
    chunked_attention_size: int = 0,
    save_softmax_stats: bool = False,
    skip_softmax_threshold_scale_factor: float = 0,
) -> Any:
    """Attention of prompts: rows are the last tokens of requests. The host waits for the lengths.

    Args:
        qkv, input_layout: "PACKED_QKV": [tokens, 3, heads, dim]; "CONTIGUOUS_Q_KV": q [tokens,
            num_qo_heads, dim] and [kv_tokens, 2, num_kv_heads, dim]; "SEPARATE_Q_K_V": q, k, v;
            "Q_PAGED_KV_NHD", "Q_PAGED_KV_HND": q and pages [pages, 2, ...], or (k, v).
        seq_lens: [batch_size]: keys of each request.
        cum_seq_lens_q, cum_seq_lens_kv: [batch_size + 1]: where the rows of q and the ragged keys
            of each request begin.
        bmm1_scale, bmm2_scale: the whole factors of logits and of outputs, numbers or float32
            tensors of one element.
        block_tables: [batch_size, most pages]; with (k, v) [batch_size, 2, most pages], ids of k
            and of v, both counted from the first page of k. They must name pages at the same place
            of each cache.
        out, out_dtype: o may have 8 bits; default: the dtype of q.
        pos_encoding_mode: None or "alibi".
        mask_mode: "causal", "sliding_window" (with window_left), "chunked" (with
            chunked_attention_size), or "padding", which hides nothing. Upper and lower case are
            alike.
        chunked_attention_size: tokens of a chunk: a query sees the keys of its own chunk, up to
            itself.
        save_softmax_stats: also return [tokens, num_qo_heads, 2] float32: (m, s) with log-sum-exp =
            sqrt(dim) * bmm1_scale * m + ln(s), with a cap sqrt(dim) * m + ln(s). FlashInfer has the
            maximum and the sum there; here s is 1.
        skip_softmax_threshold_scale_factor: no effect: FlashInfer may leave out keys that weigh
            less than this allows, and here all keys are computed.

    Returns:
        o [tokens, num_qo_heads, dim], or with save_softmax_stats (o, stats).

    Raises:
        UnsupportedError: an argument asks for what flashplan can not do.
        ValueError, TypeError: tensors do not fit each other.
    """
    inputs = _inputs(qkv, input_layout, block_tables, seq_lens, batch_size)
    q = inputs.q
    mask = (mask_mode or "causal").lower()
    if mask not in MASKS:
        raise ValueError(f"mask_mode: expected one of {', '.join(MASKS)}, got {mask_mode!r}")
    if mask == "padding" and (window_left >= 0 or chunked_attention_size > 0):
        feature = "Sliding window" if window_left >= 0 else "Chunked"
        raise ValueError(
            f"mask_mode: {feature} attention requires causal masking, got {mask_mode!r}"
        )
    if mask == "chunked" and chunked_attention_size < 1:
        raise ValueError(
            f"chunked_attention_size: expected >= 1 (chunked), got {chunked_attention_size}"
        )
    lengths: dict[str, Tensor] = {
        "cu_seqlens_q": cum_seq_lens_q,
        "cu_seqlens_k": cum_seq_lens_kv,
        "seqused_k": seq_lens,
    }
    longest: tuple[Any, Any] = max_q_len, max_kv_len
    if mask == "chunked":
        if is_capturing(q.device):
            raise UnsupportedError(
                "mask_mode: expected none that needs lengths on the host while a CUDA graph is "
                "captured, got 'chunked'"
            )
        inputs, lengths = in_chunks(inputs, on_host(*lengths.values()), chunked_attention_size)
        longest = None, None
    softcap = float(logits_soft_cap_scale or 0.0)
    variant, arguments = _encoding(pos_encoding_mode, q, softcap)
    o_dtype = output_dtype(q, out, out_dtype)
    results = run_rows(
        q,
        inputs.k,
        inputs.v,
        {**lengths},
        longest,
        {
            **direct_options(
                q,
                inputs.k,
                inputs.v,
                inputs.page_size,
                inputs.kv_layout,
                mask != "padding",
                window_left if mask == "sliding_window" else -1,
                o_dtype,
            ),
            "softcap": 0.0 if variant is not None else softcap,
            "variant": variant,
        },
        inputs.block_table,
        return_lse=save_softmax_stats,
        **run_tensors(bmm1_scale, bmm2_scale, sinks, out, None),
        **arguments,
    )
    results = narrowed(results, out, o_dtype)
    if not save_softmax_stats:
        return results
    o, lse = results
    factor = math.sqrt(q.shape[2]) * (1.0 if softcap else bmm1_scale)
    return o, _softmax_stats(lse, factor)


def _encoding(mode: str | None, q: Tensor, softcap: float) -> tuple[Any, dict[str, Any]]:
    """The variant for a position encoding, and the arguments of run() that it takes."""
    if mode is None or mode.lower() == "none":
        return None, {}
    if mode.lower() != "alibi":
        raise UnsupportedError(f"pos_encoding_mode: expected None or 'alibi', got {mode!r}")
    return alibi_variant(softcap), alibi_arguments(q.shape[1], softcap, q.device)
