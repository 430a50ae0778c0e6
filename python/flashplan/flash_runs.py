# SPDX-License-Identifier: Apache-2.0
"""Plans and runs attention for functions that have no plan() of their own, those of
`flashplan.flash_attn` and some of `flashplan.flashinfer`. They have checked the arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashplan import ops
from flashplan._core import UnsupportedError
from flashplan.flash_arguments import check_dims, int32, is_8_bit
from flashplan.flash_plans import Plans, is_capturing

if TYPE_CHECKING:
    from flashplan.flash_plans import Lengths

_plans = Plans()


def on_host(*tensors: Tensor) -> list[list[int]]:
    """The integers of tensors. Copies from a GPU are kept until PyTorch writes to the tensors."""
    return _plans.on_host(*tensors)


def _equal_lengths(batch_size: int, qo_len: int, kv_len: int) -> Lengths:
    qo_indptr = [request * qo_len for request in range(batch_size + 1)]
    return qo_indptr, [kv_len] * batch_size, None


def run_equal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, int, int],
    options: dict[str, Any],
    **tensors: Any,
) -> Any:
    """Attention of rows [tokens, heads, head_dim], equally many of each sequence: o, or (o, lse).

    Args:
        lengths: three numbers: the batch size, and for each sequence its rows of q and its keys;
            with kv_lens in `tensors`, the most keys that a sequence may have.
        options: the options of `Attention` except bounds, device and workspace.
        tensors: the other arguments of `Attention.run`.
    """
    batch_size, qo_len, _ = lengths
    attn = _plans.attention(
        q.device,
        options,
        (batch_size, batch_size * qo_len),
        ("equal", *lengths),
        lambda: _equal_lengths(*lengths),
    )
    return attn.run(q, k, v, **tensors)


def run_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: dict[str, Tensor | None],
    longest: tuple[Any, Any],
    options: dict[str, Any],
    block_table: Tensor | None,
    **tensors: Any,
) -> Any:
    """Attention of rows [tokens, heads, head_dim] of sequences of any lengths: o, or (o, lse).

    Where a paged cache is read by equally many queries of each sequence, the lengths of keys are
    read on the device. Otherwise lengths on a GPU are copied to the host, which waits for them.

    Args:
        ends: cu_seqlens_q, and cu_seqlens_k, seqused_k or both.
        longest: max_seqlen_q and max_seqlen_k; None where one is not known.
    """
    cu_seqlens_q, cu_seqlens_k, seqused_k = ends.values()
    assert cu_seqlens_q is not None
    batch_size, num_rows = cu_seqlens_q.shape[0] - 1, q.shape[0]
    qo_len, kv_len = (None if n is None or isinstance(n, Tensor) else int(n) for n in longest)
    if block_table is not None and qo_len is not None and num_rows == batch_size * qo_len:
        most = block_table.shape[1] * options["page_size"]
        if kv_len is not None:
            most = min(most, kv_len)
        if seqused_k is None:
            assert cu_seqlens_k is not None
            seqused_k = cu_seqlens_k.diff()
        lengths = (batch_size, qo_len, most)
        tensors |= {"block_table": block_table, "kv_lens": int32(seqused_k)}
        return run_equal(q, k, v, lengths, options, **tensors)
    if is_capturing(q.device):
        raise UnsupportedError(
            "cu_seqlens_q: expected max_seqlen_q queries of each sequence of a paged cache while a "
            "CUDA graph is captured, got others"
        )
    given = {name: tensor for name, tensor in ends.items() if tensor is not None}
    host = dict(zip(given, _plans.on_host(*given.values())))
    qo_indptr, kv_indptr = host["cu_seqlens_q"], host.get("cu_seqlens_k")
    kv_lens = host.get("seqused_k")
    if kv_lens is None:
        assert kv_indptr is not None
        kv_lens = [end - begin for begin, end in zip(kv_indptr, kv_indptr[1:])]
    if block_table is not None:
        kv_indptr = None
    planned = (qo_indptr, kv_lens, kv_indptr)
    attn = _plans.attention(
        q.device,
        options,
        (batch_size, num_rows),
        ("rows", *(tuple(numbers or ()) for numbers in planned)),
        lambda: planned,
    )
    return attn.run(q, k, v, block_table=block_table, **tensors)


def append(
    new: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    indptr: Tensor | None,
    kv_lens: Tensor,
    block_table: Tensor,
    scales: tuple[float | Tensor, float | Tensor],
) -> Tensor:
    """Writes new keys and values behind those of each sequence, and returns the new lengths. For an
    8-bit cache, new keys and values of 16 bits are divided by the cache's scales."""
    k, v = new
    for name, tensor in (("k", k), ("v", v)):
        check_dims(name, tensor, 4 if indptr is None else 3)
    if indptr is None:
        indptr = torch.arange(k.shape[0] + 1, dtype=torch.int32, device=k.device) * k.shape[1]
        kv_lens = kv_lens + k.shape[1]
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    else:
        kv_lens = kv_lens + int32(indptr.diff())
    ops.append_paged_kv(
        k,
        v,
        *caches,
        int32(indptr),
        kv_lens,
        block_table=block_table,
        k_scale=1.0 if is_8_bit(k) else scales[0],
        v_scale=1.0 if is_8_bit(v) else scales[1],
    )
    return kv_lens


def in_batches(results: Any, batch_size: int, qo_len: int) -> Any:
    """Reshapes rows to o [batch_size, qo_len, heads, dim] and lse [batch_size, heads, qo_len]."""
    if not isinstance(results, tuple):
        return results.unflatten(0, (batch_size, qo_len))
    o, lse = (x.unflatten(0, (batch_size, qo_len)) for x in results)
    return o, lse.transpose(1, 2).contiguous()


def heads_first(results: Any) -> Any:
    """o, or (o, lse) with lse transposed to [heads, tokens]."""
    if not isinstance(results, tuple):
        return results
    o, lse = results
    return o, lse.t().contiguous()
