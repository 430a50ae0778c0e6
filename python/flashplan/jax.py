# SPDX-License-Identifier: Apache-2.0
"""Attention and appending as calls of XLA, for jit, scan and shard_map, on one device or several.

The functions have the arguments of those in the package, but return new arrays instead of writing
to the caller's. Call `plan()` outside of compiled functions: once per step, before the function is
called. A compiled function does not depend on the plan, so it serves every batch.

JAX runs compiled functions asynchronously, and a run reads the plan when it runs: call plan() only
after the results of the step before are ready (`jax.block_until_ready`, or by reading them).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

try:
    import jax
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(
        f"flashplan.jax: expected JAX (pip install jax), got: {_error}", name=_error.name
    ) from None
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from flashplan import _core
from flashplan.attention import Attention
from flashplan.jax_calls import Argument, Call, Result, call_xla, check_mesh, is_local
from flashplan.jax_devices import AttentionOnDevices
from flashplan.mla import parts as split_pair
from flashplan.values import is_hnd, to_float

if TYPE_CHECKING:
    from flashplan.types import KvLayout

_DTYPES = (
    "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32", "int64", "uint32",
    "uint8",  # for "fp8_ds_mla"
)  # fmt: skip

__all__ = ["AttentionOnDevices", "append_paged_kv", "on_devices", "run"]

for _name, _handler in _core.xla_handlers(on_cuda=False).items():
    jax.ffi.register_ffi_target(_name, _handler, platform="cpu")
if _core.built_for_cuda():
    for _name, _handler in _core.xla_handlers(on_cuda=True).items():
        jax.ffi.register_ffi_target(_name, _handler, platform="CUDA")


def on_devices(attn: Attention, devices: Sequence[Any]) -> AttentionOnDevices:
    """Makes an Attention for each device of one program, with the options of `attn`, for run().

    Args:
        attn: only its options are used. Its heads are those of one device: n devices have n times
            as many.
        devices: devices of this process out of `jax.devices()`, each once. All are GPUs or all are
            CPU devices, like the device of `attn`.

    Returns:
        An object that has devices, options and plan(), which plans the same step on all devices.
        run() finds the device of a call itself. Keep the object alive as long as functions that
        were compiled with it may run.

    Raises:
        ValueError, TypeError: `attn` is no Attention, or a device is of another kind or process, or
            is given twice.
        CudaError, UnsupportedError: as `Attention` raises them.
    """
    return AttentionOnDevices(attn, devices)


def _given(arguments: dict[Argument, ArrayLike | None]) -> tuple[dict[Argument, Any], np.int64]:
    """The arrays that are given, and a number of which bit i says whether array i is given.
    `arguments` must have the order in which the core reads optional arguments."""
    bits = sum(1 << i for i, array in enumerate(arguments.values()) if array is not None)
    given = {name: array for name, array in arguments.items() if array is not None}
    return given, np.int64(bits)


def _scale(name: str, scale: Any) -> tuple[np.float32, ArrayLike | None]:
    """Splits a scale into a number, and an array that the kernels read, or None. The scale is the
    product of both."""
    if isinstance(scale, (jax.Array, np.ndarray)):
        return np.float32(1.0), scale.ravel()
    return np.float32(to_float(name, scale)), None


def _scale_argument(name: str, scale: ArrayLike | None) -> Argument:
    return Argument(name, heads=None if scale is None or np.size(scale) == 1 else 0)


def _heads_of_cache(hnd: bool) -> int:
    """The index of the dimension of heads in a paged cache."""
    return 1 if hnd else 2


def _check_arrays(arrays: dict[Argument, Any]) -> None:
    """Checks dtypes and ranks. The call of XLA could not name a wrong array: it knows no names."""
    for argument, array in arrays.items():
        shape = np.shape(array)
        if not 1 <= len(shape) <= 4:
            raise ValueError(
                f"{argument.name}: expected 1 to 4 dimensions, got shape {list(shape)}"
            )
        dtype = jax.numpy.result_type(array).name
        if dtype not in _DTYPES:
            raise TypeError(f"{argument.name}: expected a dtype among {_DTYPES}, got {dtype}")


def _check_heads(arrays: dict[Argument, Any], num_qo_heads: int, num_kv_heads: int) -> None:
    """Checks the heads of all devices together: the call on a device sees only its own heads."""
    for argument, array in arrays.items():
        if argument.heads is None:
            continue
        shape = np.shape(array)
        heads = num_qo_heads if argument.name in ("q", "q_tail", "sinks") else num_kv_heads
        if len(shape) <= argument.heads or shape[argument.heads] != heads:
            raise ValueError(
                f"{argument.name}: expected {heads} heads in dimension {argument.heads}, "
                f"got shape {list(shape)}"
            )


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
    attn: Attention | AttentionOnDevices,
    q: ArrayLike | tuple[ArrayLike, ArrayLike],
    k: ArrayLike | tuple[ArrayLike, ArrayLike],
    v: ArrayLike | None = None,
    *,
    k_tail: ArrayLike | None = None,
    block_table: ArrayLike | None = None,
    page_indptr: ArrayLike | None = None,
    page_indices: ArrayLike | None = None,
    kv_lens: ArrayLike | None = None,
    topk_indices: ArrayLike | None = None,
    topk_lens: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    return_lse: Literal[False] = False,
    q_scale: ArrayLike = 1.0,
    k_scale: ArrayLike = 1.0,
    v_scale: ArrayLike = 1.0,
) -> Array: ...
@overload
def run(
    attn: Attention | AttentionOnDevices,
    q: ArrayLike | tuple[ArrayLike, ArrayLike],
    k: ArrayLike | tuple[ArrayLike, ArrayLike],
    v: ArrayLike | None = None,
    *,
    k_tail: ArrayLike | None = None,
    block_table: ArrayLike | None = None,
    page_indptr: ArrayLike | None = None,
    page_indices: ArrayLike | None = None,
    kv_lens: ArrayLike | None = None,
    topk_indices: ArrayLike | None = None,
    topk_lens: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    return_lse: Literal[True],
    q_scale: ArrayLike = 1.0,
    k_scale: ArrayLike = 1.0,
    v_scale: ArrayLike = 1.0,
) -> tuple[Array, Array]: ...
def run(
    attn: Attention | AttentionOnDevices,
    q: ArrayLike | tuple[ArrayLike, ArrayLike],
    k: ArrayLike | tuple[ArrayLike, ArrayLike],
    v: ArrayLike | None = None,
    *,
    k_tail: ArrayLike | None = None,
    block_table: ArrayLike | None = None,
    page_indptr: ArrayLike | None = None,
    page_indices: ArrayLike | None = None,
    kv_lens: ArrayLike | None = None,
    topk_indices: ArrayLike | None = None,
    topk_lens: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    return_lse: bool = False,
    q_scale: ArrayLike = 1.0,
    k_scale: ArrayLike = 1.0,
    v_scale: ArrayLike = 1.0,
) -> Array | tuple[Array, Array]:
    """`attn.run()` as a call of XLA. Under jit all arrays are traced; `attn` and numbers are not.
    A scale may be an array or a number.

    Args:
        attn: keep it alive as long as functions that were compiled with it may run. They must run
            on its device or, if it is on_devices(), on all of its devices. Its variant, if any, has
            no tensors; its scalars have their defaults.

    The other arguments are those of `Attention.run`; there is no out, lse, stream or pdl. On n
    devices, arrays have the shapes of one device inside shard_map. Elsewhere q, k, v, sinks and
    scales for each head have n times the heads, and these are divided among the devices: by a
    NamedSharding of the dimension of heads over a mesh of all of them. Arrays with all heads on
    each device are cut there. All other arrays are whole on each device, and with shared_kv k too.

    Returns:
        o, or (o, lse), of as many rows as q, because shapes must not depend on the plan. Rows after
        those that were planned are not written; their values are arbitrary. The heads are divided
        as those of q.

    Raises:
        ValueError: q has another shape than `attn` was made for, or the program is compiled for
            other devices than those of `attn`.
        UnsupportedError: a gradient is asked for, or the variant has tensors.
        jax.errors.JaxRuntimeError: raised by JAX when it compiles a program that divides an array
            in another way. The text names the array and the sharding.
        jax.errors.JaxRuntimeError, ValueError: an array disagrees with the plan; raised by JAX once
            the call has run. The text is that of `Attention.run`.
    """
    devices: frozenset[Any] = frozenset()
    if isinstance(attn, AttentionOnDevices):
        one, devices = attn._attentions[0], frozenset(attn.devices)
    else:
        one = attn
    if one._variant is not None and one._variant._tensors:
        names = ", ".join(one._variant._tensors)
        raise _core.UnsupportedError(f"attn: expected a variant without tensors, got {names}")
    q, q_tail = split_pair("q", q)
    k, k_tail = split_pair("k", k, k_tail)
    if v is None and not one._plan.options.shared_kv:
        raise TypeError("v: expected an array, got None")
    check_mesh(devices)
    parts = 1 if is_local() else max(1, len(devices))
    options = one._plan.options
    heads = options.num_qo_heads * parts
    num_tokens = _shape("q", q, (None, heads, None))[0]
    results = [Result((num_tokens, heads, options.head_dim_vo), one._o_dtype, heads=1)]
    if return_lse:
        results.append(Result((num_tokens, heads), "float32", heads=1))
    q_number, q_array = _scale("q_scale", q_scale)
    k_number, k_array = _scale("k_scale", k_scale)
    v_number, v_array = _scale("v_scale", v_scale)
    # With shared_kv all heads share the keys, so each device has all keys.
    shared = options.shared_kv
    kv_heads = None if shared else _heads_of_cache(options.hnd) if options.page_size else 1
    optional, given = _given(
        {
            Argument("v", kv_heads): v,
            Argument("q_tail", heads=1): q_tail,
            Argument("k_tail"): k_tail,
            Argument("block_table"): block_table,
            Argument("page_indptr"): page_indptr,
            Argument("page_indices"): page_indices,
            Argument("kv_lens"): kv_lens,
            Argument("topk_indices"): topk_indices,
            Argument("topk_lens"): topk_lens,
            Argument("mask"): mask,
            Argument("sinks", heads=0): sinks,
            _scale_argument("q_scale", q_array): q_array,
            _scale_argument("k_scale", k_array): k_array,
            _scale_argument("v_scale", v_array): v_array,
        }
    )
    arrays = {
        Argument("q", heads=1): q,
        Argument("k", kv_heads): k,
        **optional,
    }
    _check_arrays(arrays)
    if parts > 1:
        _check_heads(arrays, heads, options.num_kv_heads * parts)
    call = Call(
        "flashplan_run",
        tuple(arrays),
        tuple(results),
        (
            ("attention", np.int64(attn._handle)),
            ("given", given),
            ("q_scale", q_number),
            ("k_scale", k_number),
            ("v_scale", v_number),
        ),
        devices=devices,
    )
    outputs = call_xla(call, *arrays.values())
    return (outputs[0], outputs[1]) if return_lse else outputs[0]


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

    On several devices the heads of k, v and the caches may be divided among the devices, or all be
    on each; all other arrays are whole on each device. Inside shard_map shapes are those of one
    device.

    The other arguments are those of `flashplan.append_paged_kv`; there is no slot_mapping, kv_dtype
    or stream.

    Returns:
        (k_cache, v_cache) with the new tokens.

    Raises:
        ValueError: k, v, k_cache and v_cache do not have as many heads, or have other dimensions.
        UnsupportedError: a gradient is asked for.
        jax.errors.JaxRuntimeError: raised by JAX when it compiles a program that divides an array
            in another way.
        jax.errors.JaxRuntimeError, ValueError: an array is malformed; raised by JAX once the call
            has run. The text is that of `flashplan.append_paged_kv`.
    """
    k_number, k_array = _scale("k_scale", k_scale)
    v_number, v_array = _scale("v_scale", v_scale)
    optional, given = _given(
        {
            Argument("block_table"): block_table,
            Argument("page_indptr"): page_indptr,
            Argument("page_indices"): page_indices,
            _scale_argument("k_scale", k_array): k_array,
            _scale_argument("v_scale", v_array): v_array,
        }
    )
    hnd = is_hnd(kv_layout)
    heads = _heads_of_cache(hnd)
    num_heads = _shape("k", k, (None, None, None))[1]
    _shape("v", v, (None, num_heads, None))
    shape = (None, num_heads, None, None) if hnd else (None, None, num_heads, None)
    results = [
        Result(_shape(name, cache, shape), cache.dtype.name, heads)
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache))
    ]
    arrays = {
        Argument("k", heads=1): k,
        Argument("v", heads=1): v,
        Argument("k_cache", heads): k_cache,
        Argument("v_cache", heads): v_cache,
        Argument("indptr"): indptr,
        Argument("kv_lens"): kv_lens,
        **optional,
    }
    _check_arrays(arrays)
    check_mesh(None)
    call = Call(
        "flashplan_append_paged_kv",
        tuple(arrays),
        tuple(results),
        (
            ("given", given),
            ("hnd", np.int64(hnd)),
            ("k_scale", k_number),
            ("v_scale", v_number),
        ),
        aliases=((2, 0), (3, 1)),
    )
    caches = call_xla(call, *arrays.values())
    return caches[0], caches[1]
