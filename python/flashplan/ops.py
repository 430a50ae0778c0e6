# SPDX-License-Identifier: Apache-2.0
"""Operators on attention states and on the KV cache."""

from typing import TypeVar

from flashplan import _core
from flashplan.compiled import not_traced
from flashplan.outputs import given_or_new, shape_of
from flashplan.rope import Rope
from flashplan.types import KvDType, KvLayout, Stream, Tensor, TensorT
from flashplan.values import is_hnd, to_bool, to_dtype

Given = TypeVar("Given")


@not_traced("call flashplan.torch.merge_states")
def merge_states(
    o_a: TensorT,
    lse_a: Tensor,
    o_b: Tensor | None = None,
    lse_b: Tensor | None = None,
    *,
    out: TensorT | None = None,
    lse: TensorT | None = None,
    base2: bool = False,
    stream: Stream | None = None,
) -> tuple[TensorT, TensorT]:
    """Merges attention states: (o, lse) of the same queries over different keys.

    If a state's lse is NaN or +inf, the merged lse and all of the merged o are NaN for this token
    and head. NaN or infinity in a dim of a state's o makes the same dim of the merged o NaN or
    infinite.

    Args:
        o_a, o_b: [tokens, heads, dim] float32, float16 or bfloat16 (also as uint16 memory).
        lse_a, lse_b: [tokens, heads] float32; -inf says that a state has no keys, and its o is
            ignored.
            Instead of two states, o_a [n, tokens, heads, dim] and lse_a [n, tokens, heads] may be n
            stacked states, at most 2^20.
        out, lse: where the result is written: one of the states, or memory apart from them;
            default: new tensors in o_a's framework.
        base2: every lse is a logarithm to base 2, not the natural one.
        stream: as in `Attention`; default: the current one of o_a's framework. None on the CPU.

    Returns:
        (o, lse) of all keys.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices differ. Nothing was written.

    Examples:
        >>> o = np.array([[[[1.0]]], [[[3.0]]]], np.float32)  # two states of one token and head
        >>> lse = np.zeros((2, 1, 1), np.float32)  # of the same weight
        >>> merged, merged_lse = fp.merge_states(o, lse)
        >>> merged.item(), round(merged_lse.item(), 3)  # log(2)
        (2.0, 0.693)
    """
    if (o_b is None) != (lse_b is None):
        raise TypeError("o_b: expected both o_b and lse_b, or neither, got one of them")
    is_base2 = to_bool("base2", base2)
    stacked = o_b is None
    o, finish_o = given_or_new(out, o_a, shape_of(o_a)[stacked:])
    merged_lse, finish_lse = given_or_new(lse, o_a, shape_of(lse_a)[stacked:], "float32")
    if stacked:
        _core.merge_stack(o_a, lse_a, o, merged_lse, is_base2, stream)
    else:
        _core.merge_pair(o_a, lse_a, o_b, lse_b, o, merged_lse, is_base2, stream)
    return finish_o(o), finish_lse(merged_lse)


@not_traced("call flashplan.torch.append_paged_kv")
def append_paged_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    indptr: Tensor | None = None,
    kv_lens: Tensor | None = None,
    *,
    block_table: Tensor | None = None,
    page_indptr: Tensor | None = None,
    page_indices: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
    kv_layout: KvLayout = "NHD",
    kv_dtype: KvDType | None = None,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    stream: Stream | None = None,
) -> None:
    """Writes the keys and values of new tokens into their pages.

    New token j of request r goes to position kv_lens[r] - (indptr[r + 1] - indptr[r]) + j. With
    batch_indices and positions, row i of k and v goes to positions[i] of request batch_indices[i].
    With slot_mapping, row i goes to the slot slot_mapping[i].

    Args:
        k, v: [tokens, num_kv_heads, head_dim], ragged by indptr.
        k_cache, v_cache: pages in `kv_layout`, written; k's dtype or an 8-bit float.
        indptr: [batch_size + 1] int32: row indptr[r] of k and v is the first one of request r.
        kv_lens: [batch_size] int32: the length of each request after the append.
        block_table: the page table, as in `Attention.run`, or
        page_indptr, page_indices: the page table as CSR.
        slot_mapping: [at most tokens] int64, instead of indptr, kv_lens and a page table:
            page * page_size + row in page, or -1 to skip a token. No two tokens may have the same
            slot. On a GPU, tokens with a slot outside of the caches are skipped too.
        batch_indices, positions: [at most tokens] int32, instead of indptr and kv_lens: the request
            of each token, -1 to skip it, and its position there, which no two tokens may share.
        kv_dtype: what a cache of uint8 or uint16 stores; default: uint16 stores bfloat16.
        k_scale, v_scale: stored key = key / k_scale, computed in float32. In 8-bit formats, values
            that are too large become the largest one. A number, or a float32 tensor on the device,
            [1] or [num_kv_heads], as for `Attention.run`.
        stream: as in `Attention`; default: the current one of k_cache's framework. None on the
            CPU.

    Raises:
        ValueError, TypeError: a tensor is malformed, or a cache shares memory with another
            argument. Nothing was written.

    Examples:
        >>> k_cache, v_cache = np.zeros((2, 4, 16, 2, 64), np.float32)  # 4 pages of 16 tokens
        >>> k, v = np.ones((2, 3, 2, 64), np.float32)
        >>> indptr, kv_lens = np.array([0, 3], np.int32), np.array([18], np.int32)
        >>> table = np.array([[3, 1]], np.int32)
        >>> fp.append_paged_kv(k, v, k_cache, v_cache, indptr, kv_lens, block_table=table)
        >>> k_cache[3, 15, 0, 0], k_cache[1, :3, 0, 0]  # positions 15, 16 and 17
        (np.float32(1.0), array([1., 1., 0.], dtype=float32))
        >>> slots = np.array([2 * 16 + 5, -1, 6], np.int64)  # of pages 2 and 0
        >>> fp.append_paged_kv(k, v, k_cache, v_cache, slot_mapping=slots)
        >>> k_cache[2, 5, 0, 0], k_cache[0, 6, 0, 0]
        (np.float32(1.0), np.float32(1.0))
    """
    if slot_mapping is None and batch_indices is None and positions is None:
        _given("indptr", indptr)
        _given("kv_lens", kv_lens)
    elif (batch_indices is None) != (positions is None):
        _given("batch_indices", batch_indices)
        _given("positions", positions)
    _core.append_paged_kv(
        k,
        v,
        k_cache,
        v_cache,
        indptr,
        kv_lens,
        block_table,
        page_indptr,
        page_indices,
        slot_mapping,
        batch_indices,
        positions,
        is_hnd(kv_layout),
        None if kv_dtype is None else to_dtype("kv_dtype", kv_dtype),
        k_scale,
        v_scale,
        stream,
    )


@not_traced("call flashplan.torch.rope_append_paged_kv")
def rope_append_paged_kv(
    q: TensorT,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    indptr: Tensor,
    kv_lens: Tensor,
    rope: Rope,
    *,
    block_table: Tensor | None = None,
    page_indptr: Tensor | None = None,
    page_indices: Tensor | None = None,
    kv_layout: KvLayout = "NHD",
    kv_dtype: KvDType | None = None,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    out_q: TensorT | None = None,
    stream: Stream | None = None,
) -> TensorT:
    """`apply_rope` and `append_paged_kv` in one launch, with the same bits.

    Rotates the new tokens of q and k by their positions in their requests, and writes k and v to
    their pages. k itself is not changed.

    Args:
        q: [tokens, num_qo_heads, head_dim] float32, float16 or bfloat16 (also as uint16 memory),
            ragged by indptr.
        k, v: [tokens, num_kv_heads, head_dim] of q's dtype; v may have another head_dim.
        k_cache, v_cache: as in `append_paged_kv`, of one dtype: q's or an 8-bit float.
        rope: which dims are rotated, and by which angles.
        out_q: shaped like q, written; q itself, or memory apart from all arguments; default: a new
            tensor in q's framework. Rows that belong to no request are not written.

    The other arguments are those of `append_paged_kv` except `slot_mapping`, `batch_indices` and
    `positions`, since positions follow from the lengths. If you need these three, call `apply_rope`
    and then `append_paged_kv`.

    Returns:
        q, rotated.

    Raises:
        ValueError, TypeError: an argument is malformed, or what is written shares memory with
            another argument. Nothing was written.

    Examples:
        >>> k_cache, v_cache = np.zeros((2, 4, 16, 2, 64), np.float32)  # 4 pages of 16 tokens
        >>> q, k, v = (np.ones((3, n, 64), np.float32) for n in (8, 2, 2))
        >>> indptr, kv_lens = np.array([0, 3], np.int32), np.array([18], np.int32)
        >>> lengths, table = (indptr, kv_lens), np.array([[3, 1]], np.int32)
        >>> q = fp.rope_append_paged_kv(
        ...     q, k, v, k_cache, v_cache, *lengths, fp.Rope(), block_table=table
        ... )
        >>> q[0, 0, 0] == k_cache[3, 15, 0, 0] == np.cos(np.float32(15)) - np.sin(np.float32(15))
        np.True_
    """
    if not isinstance(rope, Rope):
        raise TypeError(f"rope: expected a Rope, got {type(rope).__name__}")
    rotated, finish = given_or_new(out_q, q)
    _core.rope_append_paged_kv(
        q,
        k,
        v,
        k_cache,
        v_cache,
        _given("indptr", indptr),
        _given("kv_lens", kv_lens),
        rope._native,
        block_table,
        page_indptr,
        page_indices,
        is_hnd(kv_layout),
        None if kv_dtype is None else to_dtype("kv_dtype", kv_dtype),
        k_scale,
        v_scale,
        rotated,
        stream,
    )
    return finish(rotated)


def _given(argument: str, tensor: Given | None) -> Given:
    if tensor is None:
        raise TypeError(f"{argument}: expected a tensor, got None")
    return tensor
