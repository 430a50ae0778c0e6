# SPDX-License-Identifier: Apache-2.0
"""Attention and appending as calls of XLA, for jit, scan and shard_map.

The functions have the arguments of those in the package, but return new arrays instead of writing
to the caller's. Call `plan()` outside of compiled functions: once per step, before the function is
called. A compiled function does not depend on the plan, so it serves every batch.

JAX runs compiled functions asynchronously, and a run reads the plan when it runs: call plan() only
after the results of the step before are ready (`jax.block_until_ready`, or by reading them).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, overload

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from flashplan import _core
from flashplan.values import is_hnd, to_float

if TYPE_CHECKING:
    from flashplan.attention import Attention
    from flashplan.types import KvLayout

_Output: TypeAlias = tuple[tuple[int, ...], str]  # shape and dtype

for _name, _handler in _core.xla_handlers(on_cuda=False).items():
    jax.ffi.register_ffi_target(_name, _handler, platform="cpu")
if _core.built_for_cuda():
    for _name, _handler in _core.xla_handlers(on_cuda=True).items():
        jax.ffi.register_ffi_target(_name, _handler, platform="CUDA")


class _Static:
    """The arguments of a call that are not arrays. JAX needs them to be hashable."""

    def __init__(
        self, name: str, outputs: list[_Output], aliases: dict[int, int], **attributes: Any
    ) -> None:
        self.parts = (name, tuple(outputs), tuple(aliases.items()), tuple(attributes.items()))

    def __hash__(self) -> int:
        return hash(self.parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.parts == other.parts


def _call_xla(static: _Static, *arrays: ArrayLike) -> tuple[Array, ...]:
    name, outputs, aliases, attributes = static.parts
    make: Any = jax.ShapeDtypeStruct
    call = jax.ffi.ffi_call(
        name,
        [make(shape, dtype) for shape, dtype in outputs],
        input_output_aliases=dict(aliases),
        vmap_method="sequential",
    )
    results: Any = call(*arrays, **dict(attributes))
    return tuple(results)


def _refuse_gradient(static: _Static, _primals: Any, _tangents: Any) -> NoReturn:
    name = static.parts[0].replace("_", ".jax.", 1)
    raise _core.UnsupportedError(
        f"{name}: expected no gradient (there is no backward pass: jax.lax.stop_gradient), "
        "got a function that is differentiated"
    )


_call: Any = jax.custom_jvp(_call_xla, nondiff_argnums=(0,))
_call.defjvp(_refuse_gradient)


def _given(*arrays: ArrayLike | None) -> tuple[list[ArrayLike], np.int64]:
    """The arrays that are given, and a bit for each place where one is."""
    bits = sum(1 << i for i, array in enumerate(arrays) if array is not None)
    return [array for array in arrays if array is not None], np.int64(bits)


def _scale(name: str, scale: Any) -> tuple[np.float32, ArrayLike | None]:
    """A number, and an array that the kernels read, or None: the scale is their product."""
    if isinstance(scale, (jax.Array, np.ndarray)):
        return np.float32(1.0), scale.ravel()
    return np.float32(to_float(name, scale)), None


def _shape(name: str, array: Any, expected: tuple[int | None, ...]) -> tuple[int, ...]:
    """The shape of an array, traced or not; None stands for any size."""
    shape = tuple(np.shape(array))
    if len(shape) != len(expected) or any(
        want not in (None, size) for want, size in zip(expected, shape)
    ):
        text = ", ".join("any" if size is None else str(size) for size in expected)
        raise ValueError(f"{name}: expected shape [{text}], got {list(shape)}")
    return shape


@overload
def run(
    attn: Attention,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    block_table: ArrayLike | None = None,
    page_indptr: ArrayLike | None = None,
    page_indices: ArrayLike | None = None,
    kv_lens: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    return_lse: Literal[False] = False,
    k_scale: ArrayLike = 1.0,
    v_scale: ArrayLike = 1.0,
) -> Array: ...
@overload
def run(
    attn: Attention,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    block_table: ArrayLike | None = None,
    page_indptr: ArrayLike | None = None,
    page_indices: ArrayLike | None = None,
    kv_lens: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    return_lse: Literal[True],
    k_scale: ArrayLike = 1.0,
    v_scale: ArrayLike = 1.0,
) -> tuple[Array, Array]: ...
def run(
    attn: Attention,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    block_table: ArrayLike | None = None,
    page_indptr: ArrayLike | None = None,
    page_indices: ArrayLike | None = None,
    kv_lens: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    return_lse: bool = False,
    k_scale: ArrayLike = 1.0,
    v_scale: ArrayLike = 1.0,
) -> Array | tuple[Array, Array]:
    """`attn.run()` as a call of XLA. Under jit all arrays are traced; `attn` and numbers are not.
    A scale may be an array or a number.

    Args:
        attn: keep it alive as long as functions that were compiled with it may run. They must run
            on its device. Its variant, if any, has no tensors; its scalars have their defaults.

    The other arguments are those of `Attention.run`; there is no out, lse, stream or pdl.

    Returns:
        o, or (o, lse), of as many rows as q, because shapes must not depend on the plan. Rows after
        those that were planned are not written; their values are arbitrary.

    Raises:
        ValueError: q has another shape than `attn` was made for.
        UnsupportedError: a gradient is asked for, or the variant has tensors.
        jax.errors.JaxRuntimeError, ValueError: an array disagrees with the plan; raised by JAX once
            the call has run. The text is that of `Attention.run`.
    """
    if attn._variant is not None and attn._variant._tensors:
        names = ", ".join(attn._variant._tensors)
        raise _core.UnsupportedError(f"attn: expected a variant without tensors, got {names}")
    num_heads, head_dim = attn._o_heads_and_dim
    num_tokens = _shape("q", q, (None, num_heads, None))[0]
    outputs: list[_Output] = [((num_tokens, num_heads, head_dim), attn._o_dtype)]
    if return_lse:
        outputs.append(((num_tokens, num_heads), "float32"))
    k_number, k_array = _scale("k_scale", k_scale)
    v_number, v_array = _scale("v_scale", v_scale)
    optional, given = _given(
        block_table, page_indptr, page_indices, kv_lens, mask, sinks, k_array, v_array
    )
    static = _Static(
        "flashplan_run",
        outputs,
        {},
        attention=np.int64(attn._handle),
        given=given,
        k_scale=k_number,
        v_scale=v_number,
    )
    results = _call(static, q, k, v, *optional)
    return (results[0], results[1]) if return_lse else results[0]


def append_paged_kv(
    k: ArrayLike,
    v: ArrayLike,
    k_cache: Array,
    v_cache: Array,
    indptr: ArrayLike,
    kv_lens: ArrayLike,
    *,
    block_table: ArrayLike | None = None,
    page_indptr: ArrayLike | None = None,
    page_indices: ArrayLike | None = None,
    kv_layout: KvLayout = "NHD",
    k_scale: ArrayLike = 1.0,
    v_scale: ArrayLike = 1.0,
) -> tuple[Array, Array]:
    """`flashplan.append_paged_kv()` as a call of XLA.

    Args:
        k_cache, v_cache: written in place if they are donated arguments of the compiled function
            (`jax.jit(..., donate_argnums=...)`); otherwise they are copied first.

    The other arguments are those of `flashplan.append_paged_kv`; there is no slot_mapping, kv_dtype
    or stream.

    Returns:
        (k_cache, v_cache) with the new tokens.

    Raises:
        UnsupportedError: a gradient is asked for.
        jax.errors.JaxRuntimeError, ValueError: an array is malformed; raised by JAX once the call
            has run. The text is that of `flashplan.append_paged_kv`.
    """
    k_number, k_array = _scale("k_scale", k_scale)
    v_number, v_array = _scale("v_scale", v_scale)
    optional, given = _given(block_table, page_indptr, page_indices, k_array, v_array)
    static = _Static(
        "flashplan_append_paged_kv",
        [(tuple(np.shape(cache)), cache.dtype.name) for cache in (k_cache, v_cache)],
        {2: 0, 3: 1},
        given=given,
        hnd=np.int64(is_hnd(kv_layout)),
        k_scale=k_number,
        v_scale=v_number,
    )
    results = _call(static, k, v, k_cache, v_cache, indptr, kv_lens, *optional)
    return results[0], results[1]
