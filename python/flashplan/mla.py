# SPDX-License-Identifier: Apache-2.0
"""The cache of multi-head latent attention: writing new keys into it, and gathering prefixes."""

from __future__ import annotations

from typing import Any, overload

from flashplan import _core
from flashplan.outputs import new_output, shape_of
from flashplan.rope import Rope
from flashplan.types import MlaDType, Stream, Tensor, TensorT
from flashplan.values import MLA_DTYPES, dtype_name, to_dtype

_DS_MLA_BYTES = 656


def parts(name: str, tensor: Any, tail: Any = None) -> tuple[Any, Any]:
    """Two tensors: `tensor` and its `tail`, or the two of a pair `tensor`."""
    if not isinstance(tensor, tuple | list):
        return tensor, tail
    if tail is not None:
        raise TypeError(f"{name}: expected one tensor beside {name}_tail, got a pair")
    if len(tensor) != 2 or any(part is None for part in tensor):
        raise TypeError(f"{name}: expected a tensor or a pair of tensors, got {len(tensor)} items")
    return tensor[0], tensor[1]


def _stored_dtype(cache: Any, kv_dtype: MlaDType | None) -> _core.DType:
    """The dtype of the values in a cache of dtype uint8 or uint16."""
    if kv_dtype is not None:
        return to_dtype("kv_dtype", kv_dtype, MLA_DTYPES)
    if dtype_name(getattr(cache, "dtype", "")) != "uint8":
        return _core.DType.bfloat16
    has_scales = shape_of(cache)[-1] == _DS_MLA_BYTES
    return MLA_DTYPES["fp8_ds_mla" if has_scales else "float8_e4m3fn"]


def append_mla(
    kv_c: Tensor,
    k_pe: Tensor | None,
    cache: Tensor | tuple[Tensor, Tensor],
    *,
    slot_mapping: Tensor,
    kv_dtype: MlaDType | None = None,
    scale: float = 1.0,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    rope: Rope | None = None,
    positions: Tensor | None = None,
    q_pe: Tensor | None = None,
    stream: Stream | None = None,
) -> None:
    """Writes the keys of new tokens of multi-head latent attention to their slots, in one launch.

    The latent dims are normalised if there is a norm_weight, the others are rotated if there is a
    rope, and both are narrowed to the dtype of the cache. Each step rounds as `rmsnorm`,
    `apply_rope` and `append_paged_kv` do.

    Args:
        kv_c: [tokens, C] float32, float16 or bfloat16 (also as uint16 memory): the latent dims.
        k_pe: [tokens, R] of kv_c's dtype: the dims that are rotated; None where keys have none.
        cache: [num_pages, page_size, C + R], or a pair of [num_pages, page_size, C] and
            [num_pages, page_size, R]; there may be a dimension of one head before the last one.
            kv_c's dtype or an 8-bit float. For bfloat16 tokens of 512 and 64 dims also uint8
            [num_pages, page_size, 656], "fp8_ds_mla": 512 float8_e4m3fn, 4 float32 scales, each the
            largest magnitude of 128 dims / 448, and 64 bfloat16.
        slot_mapping: [at most tokens] int64: token i goes to slot page * page_size + row in page;
            -1 skips it. No two tokens may have the same slot. On a GPU, tokens with a slot outside
            of the cache are skipped too.
        kv_dtype: what a cache of uint8 or uint16 stores; default: "fp8_ds_mla" where rows have 656
            bytes, else "float8_e4m3fn" in uint8, and bfloat16 in uint16.
        scale: stored key = key / scale, computed in float32. In 8-bit formats, values that are too
            large become the largest one. 1 with "fp8_ds_mla".
        norm_weight: [C] of kv_c's dtype or float32.
        eps: added to the mean square by the normalisation.
        rope: which of the R dims are rotated, and by which angles.
        positions: [tokens] int32 or int64, with `rope`: as in `apply_rope`.
        q_pe: [tokens, num_heads, R] of kv_c's dtype, with `rope`: rotated in place, also for tokens
            that are skipped.
        stream: as in `Attention`; default: the current one of cache's framework. None on the CPU.

    Raises:
        ValueError, TypeError: a tensor is malformed, or what is written shares memory with another
            argument. Nothing was written.

    Examples:
        >>> cache = np.zeros((4, 64, 576), np.float32)
        >>> kv_c, k_pe = np.full((2, 512), 3.0, np.float32), np.ones((2, 64), np.float32)
        >>> slots = np.array([64 + 5, -1], np.int64)  # row 5 of page 1; the other one is skipped
        >>> fp.append_mla(kv_c, k_pe, cache, slot_mapping=slots)
        >>> cache[1, 5, [0, 511, 512]]
        array([3., 3., 1.], dtype=float32)
    """
    if rope is not None and not isinstance(rope, Rope):
        raise TypeError(f"rope: expected a Rope, got {type(rope).__name__}")
    latent, tail = parts("cache", cache)
    _core.append_mla(
        kv_c,
        k_pe,
        latent,
        tail,
        slot_mapping,
        _stored_dtype(latent, kv_dtype),
        kv_dtype is not None,
        scale,
        norm_weight,
        eps,
        None if rope is None else rope._native,
        positions,
        q_pe,
        stream,
    )


@overload
def gather_mla(
    cache: TensorT | tuple[TensorT, TensorT],
    block_table: Tensor,
    kv_indptr: Tensor,
    *,
    starts: Tensor | None = None,
    out: tuple[TensorT, TensorT],
    scale: float = 1.0,
    kv_dtype: MlaDType | None = None,
    stream: Stream | None = None,
) -> tuple[TensorT, TensorT]: ...
@overload
def gather_mla(
    cache: TensorT | tuple[TensorT, TensorT],
    block_table: Tensor,
    kv_indptr: Tensor,
    *,
    starts: Tensor | None = None,
    out: TensorT | None = None,
    scale: float = 1.0,
    kv_dtype: MlaDType | None = None,
    stream: Stream | None = None,
) -> TensorT: ...
def gather_mla(
    cache: Any,
    block_table: Tensor,
    kv_indptr: Tensor,
    *,
    starts: Tensor | None = None,
    out: Any = None,
    scale: float = 1.0,
    kv_dtype: MlaDType | None = None,
    stream: Stream | None = None,
) -> Any:
    """Copies ranges of cached tokens of multi-head latent attention out of their pages.

    The rows are those of a chunk of each request's prefix, which is then multiplied by the weights
    that expand latent dims to keys and values of all heads. 8-bit floats are widened.

    Args:
        cache: as in `append_mla`.
        block_table: [at least batch_size, max_pages] int32 page ids.
        kv_indptr: [batch_size + 1] int32, ascending: rows kv_indptr[r] to kv_indptr[r + 1] - 1 of
            the result are those of request r.
        starts: [batch_size] int32: the token of each request that is copied to its first row;
            default: 0.
        out: [at least kv_indptr[batch_size], C + R], or a pair of [..., C] and [..., R], written.
            It has the dtype of the cache; with an 8-bit cache float32, float16 or bfloat16. Rows
            behind the last request are left as they are. Default, on the CPU only, where the number
            of rows is known: a new tensor in cache's framework, bfloat16 with an 8-bit cache.
        scale: real key = scale * stored key.
        kv_dtype: what a cache of uint8 or uint16 stores, as in `append_mla`.
        stream: as in `Attention`; default: the current one of cache's framework. None on the CPU.

    On a GPU the values of the index tensors are not checked: a row whose page id lies outside of
    the cache or of the block table becomes 0.

    Returns:
        `out`, or the new tensor.

    Raises:
        ValueError, TypeError: a tensor is malformed, or `out` shares memory with another argument.
            Nothing was written.

    Examples:
        >>> cache = np.arange(3 * 2 * 4, dtype=np.float32).reshape(3, 2, 4)  # 3 pages of 2 tokens
        >>> table = np.array([[2, 0], [1, 0]], np.int32)
        >>> kv_indptr, starts = np.array([0, 2, 3], np.int32), np.array([1, 0], np.int32)
        >>> fp.gather_mla(cache, table, kv_indptr, starts=starts)[:, 0]  # tokens 1, 2 and 0
        array([20.,  0.,  8.], dtype=float32)
    """
    latent, tail = parts("cache", cache)
    stored = _stored_dtype(latent, kv_dtype)
    finish = None  # converts a new output to the caller's kind of tensor
    if out is None:
        out, finish = _new_rows(latent, tail, kv_indptr, stored)
    out_latent, out_tail = parts("out", out)
    _core.gather_mla(
        latent,
        tail,
        stored,
        kv_dtype is not None,
        block_table,
        kv_indptr,
        starts,
        out_latent,
        out_tail,
        scale,
        stream,
    )
    return finish(out) if finish else out


def _new_rows(latent: Any, tail: Any, kv_indptr: Any, stored: _core.DType) -> tuple[Any, Any]:
    """A new output for gather_mla(), and the function that converts it for the caller."""
    if getattr(kv_indptr, "__dlpack_device__", lambda: (1, 0))()[0] != 1:
        raise TypeError(
            "out: expected a tensor on a GPU, where the number of rows is not known, got None"
        )
    name = dtype_name(getattr(latent, "dtype", "float32"))
    if name == "uint8" or name.startswith("float8"):
        name = "bfloat16"
    dims = 576 if stored.name == "fp8_ds_mla" else shape_of(latent)[-1]
    if tail is not None:
        dims += shape_of(tail)[-1]
    try:
        rows = max(0, int(kv_indptr[-1]))
    except (TypeError, IndexError, ValueError):  # the core will refuse this kv_indptr
        rows = 0
    return new_output(latent, (rows, dims), name)
